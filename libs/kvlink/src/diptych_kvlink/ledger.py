"""Where each KV transfer stands: the state machine both sides keep, with no I/O.

What time it is, a transfer is told by the clock it is made with; only its steps show it.

    state     who acts            ends by itself
    reserved  writer: may start   deadline → expired
    writing   writer: fills slots deadline → expired
    written   reader: must verify deadline → expired
    verified  reader: imports     deadline → expired
    released  nobody              over
    expired   nobody, see rule 3  over
    failed    nobody, see rule 3  over

Rules:

1. States only move down this list; an open state (the first four) can also end as `expired` or
   `failed`. Nothing leaves an ended state: a late message about it changes no state.
2. Every open state has a deadline. `renew` moves it while the writer has not finished.
3. A transfer that has ended may still be *touched*: by a writer that never said it stopped (it may
   only be frozen, and shared memory does not stop it), or by a reader that holds a view. Its slots
   stay in quarantine until both are known to have stopped; then it is `settled`.
4. The reader touches slots only in `verified`, or in an end that followed it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from diptych_contracts.codecs import RAW
from diptych_contracts.ids import Incarnation, TransferId


class State(StrEnum):
    """Where a transfer stands."""

    RESERVED = "reserved"
    WRITING = "writing"
    WRITTEN = "written"
    VERIFIED = "verified"
    RELEASED = "released"
    EXPIRED = "expired"
    FAILED = "failed"


OPEN = (State.RESERVED, State.WRITING, State.WRITTEN, State.VERIFIED)
_RANK = {state: rank for rank, state in enumerate(OPEN)}


class Step(NamedTuple):
    """A state was entered."""

    state: str
    reason: str
    at_s: float


def _no_time() -> float:
    return 0.0


@dataclass(slots=True)
class Transfer:
    """One transfer as one side sees it. Times are that side's monotonic clock."""

    transfer_id: TransferId
    deadline_s: float
    writer: Incarnation | None = None
    """The process that writes; None at the writer itself."""
    opened_s: float = 0.0
    tokens: int = 0
    """What the reader expects; 0 at the writer, whose engine counts."""
    held_blocks: int = 0
    """The first blocks, which the reader has already: they do not cross."""
    blocks: int = 0
    """Those that do; 0 at the writer."""
    salt: int = 0
    """Of the context whose KV it carries (`verifying.context_salt`)."""
    link: str = ""
    """Over which link it comes; empty at the writer."""
    tls: bool = False
    """Whether that is encrypted."""
    certificate: bytes = b""
    """Of its writer: whoever repeats its `Reserve` must name it too."""
    codec: str = RAW
    """How its blocks are encoded."""
    sealing_key: bytes = field(default=b"", repr=False)
    """What they are sealed with; empty: nothing."""
    slots_digest: bytes = b""
    """What the seal of its ticket says of its slots (`sealing`)."""
    n_bytes: int = 0
    """The room it was given; once verified, its bytes."""
    state: State = State.RESERVED
    reason: str = ""
    """Why it ended."""
    writer_may_write: bool = True
    reader_may_read: bool = False
    clock: Callable[[], float] = field(default=_no_time, repr=False)
    steps: list[Step] = field(default_factory=list)
    """Its way: at most five, since states only go down. Other threads may copy it."""

    def __post_init__(self) -> None:
        self.steps.append(Step(self.state, "", self.opened_s))

    @property
    def is_open(self) -> bool:
        """Whether it can still succeed."""
        return self.state in _RANK

    @property
    def settled(self) -> bool:
        """Whether it has ended and nobody can touch its slots any more."""
        return not (self.is_open or self.writer_may_write or self.reader_may_read)

    def advance(self, state: State, *, deadline_s: float) -> None:
        """Go on to a later open state. Raises `ValueError` for any other move."""
        if not self.is_open or _RANK.get(state, -1) <= _RANK[self.state]:
            raise ValueError(f"{self.transfer_id} cannot go from {self.state} to {state}")
        self.deadline_s = deadline_s
        self._enter(state, "")

    def renew(self, deadline_s: float) -> None:
        """Give an unfinished writer until `deadline_s`, if that is later."""
        if self.state in (State.RESERVED, State.WRITING):
            self.deadline_s = max(self.deadline_s, deadline_s)

    def end(self, state: State, reason: str) -> bool:
        """End it, unless it has ended already; says whether it did."""
        if state in _RANK:
            raise ValueError(f"{state} is not an end")
        if not self.is_open:
            return False
        self.reason = reason
        self._enter(state, reason)
        return True

    def expire(self, now_s: float) -> bool:
        """End it if its deadline has passed; says whether it did."""
        if not self.is_open or now_s < self.deadline_s:
            return False
        return self.end(State.EXPIRED, f"deadline of state {self.state} passed")

    def check(self) -> None:
        """Raise `AssertionError` if a rule is broken."""
        assert self.state in OPEN or self.reason, f"{self.transfer_id} ended without a reason"
        if self.state in (State.RESERVED, State.WRITING):
            assert self.writer_may_write, f"{self.transfer_id} is {self.state} without a writer"
            assert not self.reader_may_read, f"{self.transfer_id} is read before verification"

    def _enter(self, state: State, reason: str) -> None:
        self.state = state
        self.steps.append(Step(state, reason, self.clock()))


@dataclass(frozen=True, slots=True)
class Over:
    """What is remembered of a transfer that nobody touches any more."""

    state: State
    reason: str
    writer: Incarnation | None
    link: str
    n_bytes: int
    tls: bool = False
    sealed: bool = False
    codec: str = RAW
    steps: tuple[Step, ...] = ()
    blocks: int = 0
    held_blocks: int = 0

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


class TransferLedger:
    """Every transfer one side still answers for, and those that are over.

    Args:
        remembered: How many ended ones to keep, so that a late repetition of a reservation is
            recognized instead of being granted again.
    """

    def __init__(self, *, remembered: int = 4096) -> None:
        self._held: dict[TransferId, Transfer] = {}
        self._over: OrderedDict[TransferId, Over] = OrderedDict()
        self._remembered = remembered

    def __iter__(self) -> Iterator[Transfer]:
        return iter(tuple(self._held.values()))

    def get(self, transfer_id: TransferId) -> Transfer | None:
        """The transfer, while anyone may still touch its slots."""
        return self._held.get(transfer_id)

    def how_ended(self, transfer_id: TransferId) -> str | None:
        """How a transfer ended; None if it is open or was never (or too long ago) seen."""
        held = self._held.get(transfer_id)
        if held is not None:
            return None if held.is_open else str(_over(held))
        over = self._over.get(transfer_id)
        return None if over is None else str(over)

    def ended(self, n: int) -> list[tuple[TransferId, Over]]:
        """The `n` transfers that were over last, newest first, and how they ended."""
        return list(islice(reversed(self._over.items()), n))

    def over_about(self, beginning: str, *, most: int) -> list[tuple[TransferId, Over]]:
        """Those that are over and whose id begins so, newest first."""
        found = (each for each in reversed(self._over.items()) if each[0].startswith(beginning))
        return list(islice(found, most))

    def add(self, transfer: Transfer) -> None:
        """Take a new transfer on. Raises `ValueError` for an id seen before."""
        if transfer.transfer_id in self._held or transfer.transfer_id in self._over:
            raise ValueError(f"transfer {transfer.transfer_id} exists already")
        self._held[transfer.transfer_id] = transfer

    def expire(self, now_s: float) -> list[Transfer]:
        """End what is overdue; gives the transfers that ended now."""
        return [transfer for transfer in self if transfer.expire(now_s)]

    def take_settled(self) -> list[Transfer]:
        """Remove and give the transfers nobody touches any more: their slots are free."""
        settled = [transfer for transfer in self if transfer.settled]
        for transfer in settled:
            del self._held[transfer.transfer_id]
            self._over[transfer.transfer_id] = _over(transfer)
        while len(self._over) > self._remembered:
            self._over.popitem(last=False)
        return settled

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        for transfer in self:
            transfer.check()
        assert not self._held.keys() & self._over.keys(), "a transfer is both held and over"


def _over(transfer: Transfer) -> Over:
    return Over(
        transfer.state,
        transfer.reason,
        transfer.writer,
        transfer.link,
        transfer.n_bytes,
        transfer.tls,
        bool(transfer.sealing_key),
        transfer.codec,
        tuple(transfer.steps),
        transfer.blocks,
        transfer.held_blocks,
    )
