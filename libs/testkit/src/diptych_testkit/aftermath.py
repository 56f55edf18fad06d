"""What must hold once every request of a small fleet is over."""

from collections import Counter
from collections.abc import Iterable, Iterator

from diptych_bus.journal_items import journal_item
from diptych_bus.memory.stream import StoredMessage
from diptych_contracts import subjects
from diptych_contracts.dead import DeadEntry
from diptych_contracts.ids import Incarnation
from diptych_contracts.requests import RequestRecord
from diptych_contracts.streams import DEAD, EVENTS, REQUESTS, TOKENS
from diptych_contracts.wire import decode
from diptych_policy.journal import JournalPart, RequestView, parts
from diptych_testkit.builders import GATEWAY
from diptych_testkit.small_fleet import SmallFleet


def messages(fleet: SmallFleet, stream: str) -> Iterator[StoredMessage]:
    """What a stream holds, in order."""
    seq = 0
    while (message := fleet.broker.streams[stream].next_after(seq)) is not None:
        seq = message.seq
        yield message


def journal_of(
    fleet: SmallFleet, request_id: str, gateway: Incarnation = GATEWAY
) -> list[JournalPart]:
    """Everything the journal of `gateway` says of a request."""
    mine = subjects.token(gateway)
    return [
        part
        for subject, part in _journalled(fleet)
        if subject == mine and part.request_id == request_id
    ]


def views(fleet: SmallFleet) -> dict[str, RequestView]:
    """Every request as any reader of the journals has it: its tokens and its end."""
    found: dict[str, RequestView] = {}
    for _, part in _journalled(fleet):
        view = found.setdefault(part.request_id, RequestView(part.request_id))
        view.apply(part)
    return found


def _journalled(fleet: SmallFleet) -> Iterator[tuple[str, JournalPart]]:
    """Every part that a reader is shown, with its subject."""
    for message in messages(fleet, TOKENS.name):
        item = journal_item(message.subject, message.seq, message.data)
        for part in parts(item.entry) if item is not None else ():
            yield message.subject, part


def dead_letters(fleet: SmallFleet) -> list[DeadEntry]:
    """What was buried."""
    return [decode(message.data, DeadEntry) for message in messages(fleet, DEAD.name)]


async def nothing_is_left(
    fleet: SmallFleet, request_ids: Iterable[str] = ("r1",), timeout_s: float = 60.0
) -> dict[str, RequestRecord]:
    """The closed records of requests that left nothing behind.

    Nothing is held by any worker, each record is closed with the end the journal tells first, its
    request is erased, and its terminal event was stored once.
    """
    await fleet.settled(timeout_s=timeout_s)
    records = {name: await fleet.closed(name, timeout_s=timeout_s) for name in request_ids}
    told = views(fleet)
    told_ends = Counter(m.headers.get("Nats-Msg-Id") for m in messages(fleet, EVENTS.name))
    stored = {message.seq for message in messages(fleet, REQUESTS.name)}
    for name, record in records.items():
        assert record.end == told[name].end, name
        assert record.request_seq not in stored, f"{name} is still stored"
        assert told_ends[f"{name}.end"] == 1, f"the end of {name} was not told"
    return records
