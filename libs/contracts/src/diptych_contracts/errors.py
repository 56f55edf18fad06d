"""The error tree, sorted by what the receiver does.

    DiptychError
    ├── Transient            try again (the same id, until the deadline)
    │   ├── BusAway          the bus did not answer; the outcome is unknown
    │   ├── StoreFull        a stream or bucket has no room: it did not take the message
    │   ├── LinkBroken       a KV link failed: nothing sent over it counts
    │   ├── TierAway         a store of KV blocks did not answer: a miss
    │   │   └── TierFull     it did, and has no room; what it has can be read
    │   └── EngineGone       an engine outside the process is dead or out of reach
    ├── Permanent            will never work; tell the client
    │   ├── InvalidRequest   the client's request is wrong: names the parameter
    │   ├── UnknownModel     nobody serves this model
    │   ├── ContextOverflow  prompt and answer do not fit the model's context
    │   └── Incompatible     two parties that must match do not; names the field
    ├── Conflict             a compare-and-swap was lost; read back and decide
    ├── Refused              a typed "no" from a worker; route elsewhere
    ├── Unverified           KV that failed a check; never decode from it
    └── Expired              the deadline passed; drop

Anything else is a bug: the process dies and recovery takes over.
"""


class DiptychError(Exception):
    """Root of every error Diptych raises on purpose."""


class Transient(DiptychError):
    """Not now: the same call may work later."""


class BusAway(Transient):
    """The bus did not answer in time; whether it took the message is unknown."""


class StoreFull(Transient):
    """A stream or bucket has reached its limit: what was sent is not stored, and will not be."""


class LinkBroken(Transient):
    """A KV link cannot be used, or failed under way: its peer is dead, hung or out of reach."""


class TierAway(Transient):
    """A store of KV blocks is out of reach, or hung: whatever was asked for is a miss."""


class TierFull(TierAway):
    """A store of KV blocks has no room for an entry; what it has can be read."""


class EngineGone(Transient):
    """The engine behind a worker is dead, hung or out of reach: what it held is lost."""


class Permanent(DiptychError):
    """Never: the same call will fail again."""


class InvalidRequest(Permanent):
    """A client's request that cannot be served as written.

    Args:
        message: What was expected and what was seen.
        param: The offending parameter, by its name in the body.
        code: A stable machine-readable code.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class UnknownModel(InvalidRequest):
    """No model of that name is served here."""


class ContextOverflow(InvalidRequest):
    """Prompt and answer together exceed the model's context."""


class Incompatible(Permanent):
    """Two parties that must agree do not; the message names the fields that differ."""


class Conflict(DiptychError):
    """Another writer was first."""


class Refused(DiptychError):
    """A worker said no; `reason` is one of `contracts.jobs.RefusalReason`.

    Args:
        reason: Why.
        detail: What was expected and what was seen.
        by: The worker that said it, if it was not this process.
    """

    def __init__(self, reason: str, detail: str = "", *, by: str | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.by = by


class Unverified(DiptychError):
    """A KV block that is missing, altered or someone else's.

    Args:
        message: What was expected and what was seen.
        reason: One word of a closed set, for counting.
    """

    def __init__(self, message: str = "", *, reason: str = "unverified_kv") -> None:
        super().__init__(message)
        self.reason = reason


class Expired(DiptychError):
    """The deadline passed."""
