"""What stream `DEAD` holds, folded: each dead request with what became of it."""

from dataclasses import dataclass, field

from diptych_bus.port import Bus, StoredItem
from diptych_cli.failing import CliError
from diptych_contracts import subjects
from diptych_contracts.dead import Cause, DeadEntry, DeadLetter, DeadRequest, DeadRetried
from diptych_contracts.errors import Permanent
from diptych_contracts.requests import Request
from diptych_contracts.responses import PREFIX
from diptych_contracts.streams import DEAD
from diptych_contracts.wire import decode

SHOWN_AS = (PREFIX, "chatcmpl-")
"""What clients and logs put before a request's id."""
_CHOICES = 3


@dataclass(slots=True)
class Grave:
    """One dead request, or a message that is none."""

    id: str
    seq: int
    entry: DeadRequest | DeadLetter
    retries: list[DeadRetried] = field(default_factory=list)

    @property
    def request(self) -> Request | None:
        """The request, if it can be had; one that nobody could read, a newer version may."""
        if isinstance(self.entry, DeadRequest):
            return self.entry.request
        try:
            found: Request = decode(self.entry.payload, Request)
        except Permanent:
            return None
        return found

    @property
    def cause(self) -> Cause:
        """Why it is here."""
        return self.entry.cause if isinstance(self.entry, DeadRequest) else Cause.UNREADABLE

    @property
    def reason(self) -> str:
        """The same in words."""
        return self.entry.detail if isinstance(self.entry, DeadRequest) else self.entry.reason


async def graves(bus: Bus) -> list[Grave]:
    """Everything in stream `DEAD`, oldest first. Raises `BusAway`."""
    found: dict[str, Grave] = {}
    async for item in bus.all_stored(DEAD.name, subject=subjects.DEADS):
        entry = _entry(item)
        if isinstance(entry, DeadRetried):
            if (grave := found.get(entry.request_id)) is not None:
                grave.retries.append(entry)
            continue
        name = entry.request_id or f"seq-{item.seq}"
        found.setdefault(name, Grave(name, item.seq, entry))
    return list(found.values())


def _entry(item: StoredItem) -> DeadRequest | DeadLetter | DeadRetried:
    try:
        entry: DeadRequest | DeadLetter | DeadRetried = item.delivery.decode(DeadEntry)
    except Permanent as err:  # written by a newer version
        delivery = item.delivery
        return DeadLetter(subject=delivery.subject, reason=str(err), payload=delivery.data)
    return entry


def pick(all_graves: list[Grave], wanted: str) -> Grave:
    """The one that `wanted` names: an id as clients or logs show it, or its unique beginning.

    Raises:
        CliError: none, or several.
    """
    name = wanted
    for prefix in SHOWN_AS:
        name = name.removeprefix(prefix)
    found = [g for g in all_graves if g.id == name] or [
        g for g in all_graves if name and g.id.startswith(name)
    ]
    if not found:
        raise CliError(
            f"no dead request is called {wanted!r}; diptych dead list shows those there are"
        )
    if len(found) > 1:
        some = ", ".join(g.id for g in found[:_CHOICES])
        raise CliError(f"{len(found)} dead requests begin with {wanted!r}: {some}, …")
    return found[0]
