"""What a process writes, and has written: its half of each transfer's story.

A story begins when a reservation is asked for, before there is a ticket, and ends with the
hand-over or its failure. Used on one thread, the event loop's; a transfer's own steps come from
others, and are copied.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import msgspec

from diptych_contracts.control import KvTransfer
from diptych_contracts.ids import Incarnation, TransferId
from diptych_kvlink.ledger import OPEN, State, Step
from diptych_kvlink.listing import since_end_ms, with_steps
from diptych_kvlink.outgoing import OutgoingTransfer

ASKED = "asked"
"""A reservation was sent, and not answered yet."""
_REMEMBERED = 1024
_MOST_ABOUT = 256


class Story:
    """One transfer as its writer sees it. Times are that process's monotonic clock."""

    def __init__(
        self,
        transfer_id: TransferId,
        *,
        writer: Incarnation,
        reader: Incarnation,
        clock: Callable[[], float],
    ) -> None:
        self.transfer_id = transfer_id
        self._clock = clock
        self._began_s = self._until_s = clock()
        self._told = KvTransfer(transfer_id=transfer_id, state=ASKED, writer=writer, reader=reader)
        self._steps: list[Step] = []
        self._transfer: OutgoingTransfer | None = None
        self.is_over = False

    def asks(self, link: str, *, until_s: float, why: str = "") -> None:
        """A reservation over `link` is sent; `why` not over the one before."""
        self._told = msgspec.structs.replace(self._told, link=link)
        self._until_s = until_s
        self._steps.append(Step(ASKED, f"{link}: {why}" if why else link, self._clock()))

    def opened(self, transfer: OutgoingTransfer) -> None:
        """It has a ticket and a link."""
        self._transfer = transfer

    def reserved(self, *, until_s: float) -> None:
        """It has a ticket, and an engine moves its KV: no link of ours knows of it."""
        self._enter(State.RESERVED, until_s)

    def awaits_answer(self, *, until_s: float) -> None:
        """All is written, or offered by the engine; the reader is asked to take it over."""
        if self._transfer is None:
            self._enter(State.WRITTEN, until_s)
        self._until_s = until_s

    def _enter(self, state: State, until_s: float) -> None:
        self._told = msgspec.structs.replace(self._told, state=state)
        self._steps.append(Step(state, "", self._clock()))
        self._until_s = until_s

    def handed_over(self, *, remainder_s: float) -> None:
        """The reader answers for it now."""
        self._told = msgspec.structs.replace(self._told, remainder_ms=round(remainder_s * 1000, 3))
        self.end(State.RELEASED, "handed over")

    def end(self, state: State, reason: str) -> None:
        """It is over, and what holds memory is let go. Only the first end counts."""
        if self.is_over:
            return
        now_s = self._clock()
        self._told = self._now(now_s)
        self._steps = [*self._all_steps(), Step(state, reason, now_s)]
        self._told = msgspec.structs.replace(self._told, state=state, reason=reason, left_ms=0)
        self._transfer, self.is_over = None, True

    def expire(self) -> None:
        """End what its lease has ended."""
        if self._transfer is not None:
            self._transfer.expire()

    def told(self, *, steps: bool = False) -> KvTransfer:
        """As it is now."""
        now_s = self._clock()
        told = self._now(now_s)
        if self.is_over:
            told = msgspec.structs.replace(
                told, age_ms=0, ended_ms=since_end_ms(self._steps, now_s)
            )
        return with_steps(told, self._all_steps(), now_s) if steps else told

    def _now(self, now_s: float) -> KvTransfer:
        if self.is_over:
            return self._told
        known = msgspec.structs.replace(
            self._told,
            age_ms=round((now_s - self._began_s) * 1000),
            left_ms=round((self._until_s - now_s) * 1000),
        )
        transfer = self._transfer
        if transfer is None:
            return known
        handing_over = transfer.state == State.WRITTEN
        until_s = self._until_s if handing_over else transfer.deadline_s
        return msgspec.structs.replace(
            known,
            state=transfer.state,
            link=transfer.kind,
            tls=transfer.encrypted,
            sealed=transfer.sealed,
            codec=transfer.codec,
            left_ms=round((until_s - now_s) * 1000),
            n_bytes=transfer.bytes_written,
            blocks=transfer.blocks,
            held_blocks=transfer.held_blocks,
            raw_bytes=transfer.raw_bytes,
            moving_ms=round(transfer.moving_s * 1000, 3),
            overlap_frac=round(transfer.overlap.frac, 3),
        )

    def _all_steps(self) -> list[Step]:
        if self._transfer is None:
            return self._steps
        shown = (*OPEN, State.EXPIRED)
        of_ticket = [step for step in self._transfer.steps if step.state in shown]
        return sorted([*self._steps, *of_ticket], key=lambda step: step.at_s)


class OutgoingLog:
    """The stories of one process: those that go on, and the last ones that are over.

    Args:
        writer: This process.
        clock: Monotonic seconds.
        remembered: How many of those that are over to keep.
    """

    def __init__(
        self, writer: Incarnation, *, clock: Callable[[], float], remembered: int = _REMEMBERED
    ) -> None:
        self.writer = writer
        self._clock = clock
        self._open: dict[TransferId, Story] = {}
        self._over: deque[Story] = deque(maxlen=remembered)

    @contextmanager
    def story(self, transfer_id: TransferId, *, reader: Incarnation) -> Iterator[Story]:
        """The story of one transfer, which ends here; by an exception, if one comes through."""
        story = Story(transfer_id, writer=self.writer, reader=reader, clock=self._clock)
        self._open[transfer_id] = story
        try:
            yield story
        except BaseException as err:
            story.end(State.FAILED, str(err) or type(err).__name__)
            raise
        finally:
            story.end(State.RELEASED, "nothing to hand over: the answer ended with its first token")
            self._over.append(story)
            if self._open.get(transfer_id) is story:
                del self._open[transfer_id]

    def sweep(self) -> None:
        """End what is overdue. To be called a few times a second."""
        for story in tuple(self._open.values()):
            story.expire()

    def transfers(self, *, ended: int = 0) -> list[KvTransfer]:
        """Every transfer on its way, and the `ended` last ones that are over, newest first."""
        over = islice(reversed(self._over), ended)
        return [*(story.told() for story in self._open.values()), *(s.told() for s in over)]

    def about(self, beginning: str) -> list[KvTransfer]:
        """Transfers whose id begins so, each with its way."""
        known = (*self._open.values(), *reversed(self._over))
        found = (story for story in known if story.transfer_id.startswith(beginning))
        return [story.told(steps=True) for story in islice(found, _MOST_ABOUT)]
