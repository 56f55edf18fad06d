"""Vectors of texts, on request: one answer per job, nothing stored.

What waits is bounded; beyond it a job is refused with the time to ask again. A job ends with its
vectors, with its budget, or when its gateway says that nobody waits any more.
"""

import asyncio
from collections.abc import Callable

from diptych_bus.port import Bus, Delivery
from diptych_chassis.member import Member
from diptych_contracts import subjects
from diptych_contracts.embeddings import (
    EmbedAnswer,
    EmbedCancel,
    Embedded,
    EmbedJob,
    EmbedRefusal,
    EmbedRefused,
)
from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import RequestId
from diptych_engine.embedding import Vectors
from diptych_engine.port import Engine
from diptych_policy.embedding import EmbedRoom

_Key = tuple[RequestId, int, int]


class EmbedDesk:
    """Takes jobs for one worker.

    Args:
        member: The worker.
        engine: What computes.
        model: The only one served.
        draining: Whether nothing more is taken.
        room: How much is taken at once.
    """

    def __init__(
        self,
        member: Member,
        engine: Engine,
        *,
        model: str,
        draining: Callable[[], bool],
        room: EmbedRoom | None = None,
    ) -> None:
        self._me = member.incarnation
        self._bus: Bus = member.bus
        self._now_s = member.now_s
        self._engine = engine
        self._model = model
        self._draining = draining
        self._room = room or EmbedRoom()
        self._running: dict[_Key, asyncio.Future[Vectors]] = {}

    def __len__(self) -> int:
        return self._room.jobs

    @property
    def waiting_tokens(self) -> int:
        """Of the jobs here."""
        return self._room.tokens

    async def start(self) -> None:
        """Take jobs; to be called once. The subscriptions end with the bus."""
        await self._bus.serve(subjects.embed(self._me, "job"), self._on_job)
        await self._bus.subscribe(subjects.embed(self._me, "cancel"), self._on_cancel)

    def stop(self) -> None:
        """Give up what is left."""
        for running in list(self._running.values()):
            running.cancel()

    async def _on_job(self, delivery: Delivery) -> EmbedAnswer:
        job: EmbedJob = delivery.decode(EmbedJob)
        refused = self._refusal(job)
        if refused is not None:
            return refused
        if not self._room.enter(job.tokens):
            text = f"{self._room.jobs} jobs of {self._room.tokens} tokens wait here"
            return self._no(job, EmbedRefusal.NO_ROOM, text)
        try:
            return await self._vectors(job)
        finally:
            self._room.leave(job.tokens)

    def _refusal(self, job: EmbedJob) -> EmbedRefused | None:
        if self._draining():
            return self._no(job, EmbedRefusal.DRAINING, "the worker takes nothing more")
        if job.model != self._model:
            return self._no(job, EmbedRefusal.WRONG_MODEL, f"{self._model!r} is served here")
        vocab_size = self._engine.spec.vocab_size
        if any(not 0 <= token < vocab_size for text in job.texts for token in text):
            text = f"expected tokens from 0 to {vocab_size - 1}"
            return self._no(job, EmbedRefusal.UNSUPPORTED, text)
        return None

    async def _vectors(self, job: EmbedJob) -> EmbedAnswer:
        key = (job.request_id, job.part, job.attempt)
        began_s, before = self._now_s(), self._room.tokens
        try:
            running = asyncio.wrap_future(self._engine.embed(job.texts))
            self._running[key] = running
            async with asyncio.timeout(job.budget_ms / 1000):
                vectors = await running
        except TimeoutError:
            return self._no(job, EmbedRefusal.EXPIRED, "its time was over")
        except asyncio.CancelledError:
            if not running.cancelled() or _cancelled_here():
                raise
            return self._no(job, EmbedRefusal.DRAINING, "given up")
        except DiptychError as err:
            return self._no(job, EmbedRefusal.UNSUPPORTED, str(err))
        finally:
            self._running.pop(key, None)
        self._room.paced(before, self._now_s() - began_s)
        return Embedded(
            request_id=job.request_id,
            worker=self._me,
            size=vectors.shape[1],
            vectors=vectors.astype("<f4").tobytes(),
        )

    def _on_cancel(self, delivery: Delivery) -> None:
        cancel: EmbedCancel = delivery.decode(EmbedCancel)
        running = self._running.get((cancel.request_id, cancel.part, cancel.attempt))
        if running is not None:
            running.cancel()

    def _no(self, job: EmbedJob, reason: EmbedRefusal, detail: str) -> EmbedRefused:
        return EmbedRefused(
            request_id=job.request_id,
            reason=reason,
            detail=detail,
            retry_after_s=self._room.retry_after_s,
        )


def _cancelled_here() -> bool:
    """Whether this task is to end, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
