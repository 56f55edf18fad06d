"""Batches: who runs one, which run here, and what becomes of a line by its status.

A gateway owns a batch for `LEASE_S` at a time and says so anew every `RENEW_S`; what its owner has
not renewed is anybody's. Two who run one for a moment, because one of them was frozen, do no harm:
each line is an idempotent request, and only the owner's writes to the record succeed.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import sha256

from diptych_contracts.batches import BatchRecord

LEASE_S = 10.0
RENEW_S = 2.5
MAX_ADOPTIONS = 5
"""In a row, without a line done: then it is the batch that kills its gateways."""
MODEL_WAIT_S = 120.0
"""A model that nobody serves may be back: its workers start again, and register."""
MAX_TRIES = 5
"""Of a line whose request was accepted and failed."""
MODEL_NOT_FOUND = "model_not_found"
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 15.0
_MAX_ABSENT = 16

_OK = 200
_LIMITED = 429
_REFUSALS = (408, 429, 503)
_FIRST_SERVER_STATUS = 500


class Outcome(Enum):
    """What becomes of a line."""

    GOOD = auto()
    BAD = auto()
    AGAIN = auto()


def outcome(
    status: int, code: str | None, *, tries: int, waited_s: float, hopeless: bool = False
) -> Outcome:
    """What becomes of a line that was answered with `status`.

    A refusal says nothing of the line: it is repeated for as long as the batch lasts. A failure may
    be the line's own.

    Args:
        status: Of HTTP.
        code: Of the error object, if there is one.
        tries: How often it has failed, this time included.
        waited_s: How long its model has been away, if it is (`Absences`).
        hopeless: Whether a refusal said that repeating helps nothing: the line alone exceeds what
            its tenant is allowed.
    """
    if status == _OK:
        return Outcome.GOOD
    if status == _LIMITED and hopeless:
        return Outcome.BAD
    if status in _REFUSALS:
        return Outcome.AGAIN
    if code == MODEL_NOT_FOUND:
        return Outcome.AGAIN if waited_s < MODEL_WAIT_S else Outcome.BAD
    if status >= _FIRST_SERVER_STATUS and tries < MAX_TRIES:
        return Outcome.AGAIN
    return Outcome.BAD


@dataclass(slots=True)
class Absences:
    """How long the models that lines of a batch name have not been served.

    A model is waited for once, not by each line anew: 50,000 lines with a wrong name would else
    keep their batch, and the place where it runs, for a day. Beyond 16 names the rest are waited
    for as if they were one.
    """

    _since_s: dict[bytes, float] = field(default_factory=dict)

    def away_s(self, model: str, *, now_s: float) -> float:
        """For how long `model` has not been there; it is not there now."""
        name = self._name(model)
        if name not in self._since_s and len(self._since_s) > _MAX_ABSENT:
            name = b""
        return now_s - self._since_s.setdefault(name, now_s)

    def there(self, model: str) -> None:
        """`model` is served (again): if it goes once more, it is waited for once more."""
        self._since_s.pop(self._name(model), None)

    def _name(self, model: str) -> bytes:
        return sha256(model.encode("utf-8", "surrogatepass")).digest()


def wait_s(tries: int, asked_s: float = 0.0) -> float:
    """How long to wait after that many vain tries; `asked_s` is what a refusal named."""
    return max(min(_FIRST_WAIT_S * float(2 ** min(tries - 1, 10)), _MAX_WAIT_S), asked_s)


def is_free(record: BatchRecord, *, now_unix_ms: int) -> bool:
    """Whether a batch that is not over has no owner that renews."""
    unowned = record.owner is None or record.owned_until_unix_ms <= now_unix_ms
    return unowned and not record.state.is_over


def next_to_run(
    records: Iterable[BatchRecord],
    running: Collection[str],
    *,
    at_once: int,
    now_unix_ms: int,
) -> BatchRecord | None:
    """The batch to take over next, if any.

    Tenants take turns: first whoever has the fewest running anywhere, then the oldest batch.

    Args:
        records: Every batch.
        running: Ids of those that run here.
        at_once: How many may.
        now_unix_ms: The server's time.
    """
    if len(running) >= at_once:
        return None
    every = list(records)
    busy = Counter(
        record.tenant
        for record in every
        if not record.state.is_over and not is_free(record, now_unix_ms=now_unix_ms)
    )
    free = [
        record
        for record in every
        if is_free(record, now_unix_ms=now_unix_ms) and record.batch_id not in running
    ]
    return min(
        free,
        key=lambda record: (busy[record.tenant], record.created_unix_ms, record.batch_id),
        default=None,
    )
