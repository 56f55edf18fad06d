"""Asks workers for vectors: one after the other, until one answers.

The scheduler has no part in it: a job changes nothing, so nothing need be stored and nobody need
own it. A worker that falls silent, refuses, or is gone is left for another.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

from diptych_bus.port import Bus, Delivery, Subscription
from diptych_contracts import subjects
from diptych_contracts.embeddings import (
    EmbedAnswer,
    EmbedCancel,
    Embedded,
    EmbedJob,
    EmbedRefusal,
    EmbedRefused,
)
from diptych_contracts.errors import BusAway, DiptychError, Transient
from diptych_contracts.fleet import WorkerLoad
from diptych_contracts.ids import Incarnation, RequestId
from diptych_gateway.admission.models import Models
from diptych_gateway.errors import ApiError
from diptych_policy.embedding import Reports, choose
from diptych_telemetry import logger

MAX_ATTEMPTS = 6
PATIENCE_S = 5.0
"""How long a request waits where there is nobody to ask: a killed worker is started again."""
_PAUSE_S = 0.25
_ALL_OF_IT = 3
"""From this attempt on, an attempt may take all the time that is left; before, half of it."""

log = logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Texts of a request that one worker computes."""

    request_id: RequestId
    number: int
    model: str
    texts: Sequence[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        """Of all texts."""
        return sum(map(len, self.texts))


@dataclass(slots=True)
class _Tries:
    """What became of a part so far."""

    tried: set[Incarnation] = field(default_factory=set)
    attempts: int = 0
    refused: EmbedRefused | None = None
    """The last refusal for want of room, or for good."""
    waited_s: float = 0.0


class Embedders:
    """The workers, as far as embedding goes.

    Args:
        bus: Where they are.
        models: Knows who serves what.
        now_s: The monotonic clock.
    """

    def __init__(self, bus: Bus, models: Models, now_s: Callable[[], float]) -> None:
        self._bus = bus
        self._models = models
        self._now_s = now_s
        self._reports = Reports()
        self._given: Counter[Incarnation] = Counter()
        self._waiting: dict[asyncio.Future[None], Incarnation] = {}
        self._requests = 0
        self._listening: Subscription | None = None

    def __len__(self) -> int:
        return self._requests

    @contextmanager
    def request(self) -> Iterator[None]:
        """Inside the `with`, a request counts as one that is worked on."""
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def start(self) -> None:
        """Hear workers."""
        self._listening = await self._bus.subscribe(subjects.LOADS, self._on_load)

    async def close(self) -> None:
        """Hear no more."""
        if self._listening is not None:
            await self._listening.close()

    async def vectors(self, part: Part, *, deadline_s: float) -> Embedded:
        """The vectors of `part`, which is given until `deadline_s`.

        Raises:
            ApiError: every worker has too much to do (429), with the time to ask again.
            Transient: nobody answers.
        """
        tries = _Tries()
        for attempt in count(1):
            worker = choose(
                self._models.offers(part.model),
                self._reports,
                given=self._given,
                tried=tries.tried,
            )
            if worker is None:
                await self._nobody(tries)
                continue
            tries.attempts += 1
            left_s = max(0.05, deadline_s - self._now_s())
            job = EmbedJob(
                request_id=part.request_id,
                part=part.number,
                attempt=attempt,
                model=part.model,
                texts=tuple(part.texts),
                budget_ms=round(1000 * (left_s if tries.attempts >= _ALL_OF_IT else left_s / 2)),
            )
            answer = await self._ask(worker, job)
            if isinstance(answer, Embedded):
                return answer
            self._note(tries, worker, answer)
        raise AssertionError("unreachable")

    def _note(self, tries: _Tries, worker: Incarnation, answer: EmbedRefused | None) -> None:
        tries.tried.add(worker)
        why = "no answer" if answer is None else f"{answer.reason}: {answer.detail}"
        log.warning("embedding_tried_in_vain", worker=worker, why=why)
        if answer is not None and answer.reason is not EmbedRefusal.DRAINING:
            tries.refused = answer

    async def _nobody(self, tries: _Tries) -> None:
        """Wait for somebody to ask, or raise."""
        refused = tries.refused
        if refused is not None and refused.reason is EmbedRefusal.NO_ROOM:
            raise ApiError(
                429,
                f"no worker takes more texts at the moment: {refused.detail}",
                code="queue_full",
                retry_after_s=refused.retry_after_s,
            )
        if refused is not None and refused.reason is not EmbedRefusal.EXPIRED:
            raise Transient(f"no worker makes these vectors: {refused.detail}")
        if tries.attempts >= MAX_ATTEMPTS or tries.waited_s >= PATIENCE_S:
            raise Transient("no worker answered that makes vectors of texts")
        tries.tried.clear()
        tries.waited_s += _PAUSE_S
        await asyncio.sleep(_PAUSE_S)

    async def _ask(self, worker: Incarnation, job: EmbedJob) -> EmbedAnswer | None:
        """The worker's answer; None: it gives none."""
        gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        subject = subjects.embed(worker, "job")
        asking = asyncio.ensure_future(
            self._bus.request(subject, job, EmbedAnswer, timeout_s=job.budget_ms / 1000)
        )
        self._waiting[gone] = worker
        self._given[worker] += job.tokens
        try:
            await asyncio.wait({asking, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return None
            answer: EmbedAnswer = asking.result()
            return answer
        except BusAway:
            return None
        finally:
            del self._waiting[gone]
            self._given[worker] -= job.tokens
            if self._given[worker] <= 0:
                del self._given[worker]
            if not asking.done():
                asking.cancel()
                await self._cancel(worker, job)

    async def _cancel(self, worker: Incarnation, job: EmbedJob) -> None:
        cancel = EmbedCancel(request_id=job.request_id, part=job.part, attempt=job.attempt)
        with suppress(DiptychError):
            await self._bus.publish(subjects.embed(worker, "cancel"), cancel)

    def _on_load(self, delivery: Delivery) -> None:
        load: WorkerLoad = delivery.decode(WorkerLoad)
        self._reports.heard(load, now_s=self._now_s())
        if self._waiting:
            for gone, worker in self._waiting.items():
                if not gone.done() and self._reports.silent(worker):
                    gone.set_result(None)
        self._reports.forget(self._models.workers)
