"""The decode worker of an attempt, as its prefill worker asks it."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from diptych_bus.port import Bus
from diptych_contracts import subjects
from diptych_contracts.errors import BusAway, DiptychError, Expired, LinkBroken, Refused
from diptych_contracts.ids import TransferId, transfer_id
from diptych_contracts.jobs import DecodeJob, Generation, JobAnswer, JobRefused, PrefillJob
from diptych_contracts.transfers import (
    Release,
    Released,
    Reserve,
    ReserveAnswer,
    ReserveRefused,
    Ticket,
)
from diptych_contracts.wire import Message

LEASE_MARGIN_MS = 5_000
"""For clocks that started at different moments."""
_CALL_S = 0.5
_PAUSE_S = 0.1
_MOST_CHARS = 300


class DecodePeer:
    """Asks until there is an answer: decode workers are idempotent.

    Args:
        bus: To them.
        transfer_s: How long a hand-off may take where its job does not say.
        now_s: Monotonic seconds.
    """

    def __init__(self, bus: Bus, *, transfer_s: float, now_s: Callable[[], float]) -> None:
        self._bus = bus
        self._transfer_s = transfer_s
        self.now_s = now_s

    def within_s(self, job: PrefillJob) -> float:
        """How long the hand-off of `job` may take."""
        return job.transfer_ms / 1000 or self._transfer_s

    async def reserve(self, job: PrefillJob, reserve: Reserve) -> Ticket:
        """A ticket. Raises `Refused` by the decode worker's word, `Expired` without one."""
        answer: ReserveAnswer = await self._ask(
            subjects.kv(job.decode_worker, "reserve"),
            reserve,
            ReserveAnswer,
            within_s=self.within_s(job),
        )
        if isinstance(answer, ReserveRefused):
            raise Refused(answer.reason, answer.detail, by=job.decode_worker)
        return answer

    async def decode(
        self,
        job: PrefillJob,
        decode: DecodeJob,
        *,
        within_s: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> JobAnswer:
        """Whether the decode worker answers for the attempt from now on.

        Raises:
            Expired: there is no answer.
            LinkBroken: nor will there be: it is `gone`, as its link knows.
        """
        subject = subjects.job(job.decode_worker)
        answer: JobAnswer = await self._ask(
            subject, decode, JobAnswer, within_s=within_s, gone=gone
        )
        return answer

    async def release(self, job: PrefillJob, reason: str, *, writes: bool) -> None:
        """Give the ticket back and say why; if that is not heard, its lease frees it."""
        release = Release(
            transfer_id=ticket_of(job.generation), reason=reason[:_MOST_CHARS], writes=writes
        )
        with contextlib.suppress(DiptychError):
            await self._bus.request(
                subjects.kv(job.decode_worker, "release"), release, Released, timeout_s=_CALL_S
            )

    async def _ask(
        self,
        subject: str,
        message: Message,
        reply: object,
        *,
        within_s: float,
        gone: Callable[[], bool] = lambda: False,
    ) -> Any:
        give_up_s = self.now_s() + within_s
        while True:
            try:
                return await self._bus.request(subject, message, reply, timeout_s=_CALL_S)
            except BusAway as err:
                if gone():
                    raise LinkBroken(f"no answer on {subject}: nobody is there any more") from err
                if not self._bus.connected:
                    give_up_s = self.now_s() + within_s
                elif self.now_s() >= give_up_s:
                    raise Expired(f"no answer on {subject} in {within_s:g} s") from err
                await asyncio.sleep(_PAUSE_S)


def check_taken(answer: JobAnswer, job: PrefillJob) -> None:
    """Raise `Refused` if the decode worker said no."""
    if isinstance(answer, JobRefused):
        raise Refused(answer.reason, answer.detail, by=job.decode_worker)


def ticket_of(generation: Generation) -> TransferId:
    """The one transfer id an attempt may use."""
    return transfer_id(generation.request_id, generation.attempt)
