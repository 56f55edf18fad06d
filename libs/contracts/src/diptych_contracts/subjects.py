"""Every subject, built in this module only.

A name from outside (a model id may hold `/`, `.` or spaces) becomes one subject token by `escape`.
"""

from diptych_contracts.ids import Incarnation, RequestId

_PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")


def escape(name: str) -> str:
    """`name` as one subject or key token: other characters become `=XX` (UTF-8 hex).

    Raises:
        ValueError: if `name` is empty.
    """
    if not name:
        raise ValueError("a subject token cannot be empty")
    return "".join(
        chr(byte) if chr(byte) in _PLAIN else f"={byte:02X}" for byte in name.encode("utf-8")
    )


def unescape(token: str) -> str:
    """The name that `escape` turned into `token`."""
    head, *rest = token.split("=")
    data = head.encode() + b"".join(bytes([int(p[:2], 16)]) + p[2:].encode() for p in rest)
    return data.decode("utf-8")


# Stored (see `contracts.streams`).


def request(priority_class: str, model: str) -> str:
    """An accepted request, in stream `REQUESTS`."""
    return f"request.{escape(priority_class)}.{escape(model)}"


def request_any() -> str:
    """Every accepted request."""
    return "request.*.*"


def token(gateway: Incarnation) -> str:
    """The journal of one gateway's requests, in stream `TOKENS`."""
    return f"token.{gateway}"


def live(gateway: Incarnation) -> str:
    """Where the stored journal is republished, in stream order."""
    return f"live.{gateway}"


LIVES = "live.*"
"""Every journal's republication."""


def event(name: str) -> str:
    """A life-cycle event, in stream `EVENTS`."""
    return f"event.{name}"


def audit(action: str) -> str:
    """A word about an administrator's action, in stream `AUDIT`."""
    return f"audit.{action}"


AUDITS = "audit.>"
"""Everything in stream `AUDIT`."""


def dead(stream: str) -> str:
    """A stored message that cannot be read, in stream `DEAD`."""
    return f"dead.{stream}"


def dead_request(request_id: RequestId) -> str:
    """A request that ended `failed`, in stream `DEAD`."""
    return f"dead.request.{request_id}"


DEADS = "dead.>"
"""Everything in stream `DEAD`."""


def undelivered(stream: str, consumer: str) -> str:
    """The server's word that it will deliver a message no more; kept in stream `UNDELIVERED`."""
    return f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.{stream}.{consumer}"


# Not stored.


def job(worker: Incarnation) -> str:
    """Jobs for one worker; request and typed answer."""
    return f"job.{worker}"


def kv(worker: Incarnation, verb: str) -> str:
    """KV hand-off control of one worker: `reserve`, `release`; request and typed answer."""
    return f"kv.{worker}.{verb}"


def embed(worker: Incarnation, verb: str) -> str:
    """Embedding by one worker: `job` (request and typed answer), `cancel`."""
    return f"embed.{worker}.{verb}"


def beat(member: Incarnation) -> str:
    """One process's sign of life, every 100 ms."""
    return f"beat.{member}"


BEATS = "beat.*"
"""Everybody's beats."""


def load(worker: Incarnation) -> str:
    """One worker's telemetry, every 100 ms and on change."""
    return f"load.{worker}"


LOADS = "load.*"
"""Every worker's telemetry."""


def queue(scheduler: Incarnation) -> str:
    """How long one scheduler's queue is and how fast it moves, every 250 ms."""
    return f"queue.{scheduler}"


QUEUES = "queue.*"
"""Every scheduler's queue."""


def cancel(worker: Incarnation) -> str:
    """Stop work on an attempt; request and answer."""
    return f"cancel.{worker}"


def current(worker: Incarnation) -> str:
    """One worker's question whether it works in vain; any scheduler answers."""
    return f"current.{worker}"


CURRENT = "current.*"
"""Every worker's question."""


def attended(gateway: Incarnation) -> str:
    """Which answers out of one gateway's journal are read elsewhere."""
    return f"attended.{gateway}"


ATTENDED = "attended.*"
"""Answers read elsewhere, of every gateway."""


def power(worker: Incarnation) -> str:
    """Leased power set-points for one worker's device."""
    return f"power.{worker}"


def control(member: Incarnation) -> str:
    """Questions and orders to one process; request and typed answer."""
    return f"control.{member}"


def blocks(worker: Incarnation) -> str:
    """What one worker has cached, as it changes."""
    return f"blocks.{worker}"


BLOCKS = "blocks.*"
"""Every worker's cached blocks."""


EVERYTHING = (
    *("request.>", "token.>", "live.>", "event.>", "dead.>"),
    *("job.>", "kv.>", "embed.>", "cancel.>", "control.>", "current.>", "power.>"),
    *("beat.>", "load.>", "queue.>", "attended.>", "blocks.>"),
    *("$KV.>", "$O.>", "$JS.EVENT.ADVISORY.>"),
)
"""Every subject above, and every bucket's: all there is, but for others' inboxes."""
