"""The phases that answer: decode from blocks handed over, or do both phases here."""

import asyncio
from collections.abc import Callable

from diptych_bus.port import Bus
from diptych_contracts.errors import Refused
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import DecodeJob, GenerateJob, RefusalReason
from diptych_contracts.journal import Started, TokenEntry, TokenFrame
from diptych_engine.port import Engine, KvBlock, SequenceWork
from diptych_telemetry import names, tracer
from diptych_worker.attempts import Attempt
from diptych_worker.tiering import NOTHING, Tiering, TierWork

spans = tracer("worker")


class Decoding:
    """Runs attempts to the end of their answers.

    Args:
        bus: Their journals.
        engine: Computes.
        worker: Whose attempts they are.
        imported: Told, on the event loop, that a transfer's blocks are needed no more.
        remained: Told of each hand-over's link, and how long after prefill's compute decode could
            begin, in seconds.
        now_s: Monotonic seconds.
        tiering: The tiers that prompts which are filled here are looked for in; None: there are
            none.
    """

    def __init__(  # noqa: PLR0913 - all that an answer goes by
        self,
        bus: Bus,
        engine: Engine,
        *,
        worker: Incarnation,
        imported: Callable[[TransferId], None],
        remained: Callable[[str, float], None],
        now_s: Callable[[], float],
        tiering: Tiering | None = None,
    ) -> None:
        self._bus = bus
        self._engine = engine
        self._worker = worker
        self._imported = imported
        self._remained = remained
        self._now_s = now_s
        self._tiering = tiering

    async def run(
        self, attempt: Attempt, job: DecodeJob | GenerateJob, blocks: list[KvBlock]
    ) -> None:
        """Decode until the engine has nothing of it any more.

        Raises:
            Refused: it was told to stop before it began, or the engine refused it.
            Permanent: the engine cannot ever run it.
        """
        kept = NOTHING
        if isinstance(job, DecodeJob):
            self._take_over(attempt, job)
        elif self._tiering is not None:
            kept = await self._tiering.work(attempt)
        try:
            await self._run(attempt, self._work(attempt, job, blocks, kept))
        finally:
            kept.leave()

    async def _run(self, attempt: Attempt, work: SequenceWork) -> None:
        if attempt.stopping:  # before its first turn: the engine was told already
            raise Refused(RefusalReason.CANCELLED, "stopped before it began")
        with spans.start_as_current_span(names.DECODE_RUN) as span:
            span.set_attribute(names.ATTEMPT, attempt.key.attempt)
            self._engine.submit(work)
            del work  # and the KV it brought: the engine lets go of it when it has it
            await attempt.left.wait()
            span.set_attribute(names.ENERGY_J, attempt.energy_j)
            if attempt.remainder_s is not None:
                span.set_attribute(names.REMAINDER_MS, round(attempt.remainder_s * 1000, 3))
        if attempt.failure is not None:
            raise attempt.failure

    def parked(self, attempt: Attempt, job: DecodeJob) -> None:
        """Say that the answer will go on here, once there is a seat for it."""
        self._started(attempt, "parked")
        if job.first_ids:
            self._bus.append(attempt.gateway, _taken_over(self._worker, job))

    def _take_over(self, attempt: Attempt, job: DecodeJob) -> None:
        """Say that the answer goes on here."""
        if job.hand_off is None:
            self._started(attempt)
        if job.first_ids:
            self._bus.append(attempt.gateway, _taken_over(self._worker, job))

    def _started(self, attempt: Attempt, phase: str = "") -> None:
        """Say that the attempt needs its prefill worker no more."""
        started = Started(
            request_id=attempt.key.request_id,
            attempt=attempt.key.attempt,
            worker=self._worker,
            phase=phase or attempt.phase,
            voice=attempt.voice,
        )
        self._bus.append(attempt.gateway, started)

    def _work(
        self,
        attempt: Attempt,
        job: DecodeJob | GenerateJob,
        blocks: list[KvBlock],
        kept: TierWork,
    ) -> SequenceWork:
        generation = job.generation
        first_ids = job.first_ids if isinstance(job, DecodeJob) else ()
        return SequenceWork(
            key=attempt.key,
            phase=attempt.phase,
            prompt_ids=attempt.prompt_ids or (),
            answer_ids=(*generation.prefix_ids, *first_ids),
            sampling=generation.sampling,
            stopping=generation.stopping,
            tenant=generation.tenant,
            blocks=blocks,
            keep=attempt.keep,
            hand_off=job.hand_off if isinstance(job, DecodeJob) else None,
            on_imported=self._when_imported(attempt, job)
            if isinstance(job, DecodeJob)
            else kept.leave,
            sink=kept.tee,
            wanted=kept.wanted,
            restored=kept.restored,
        )

    def _note_remainder(self, attempt: Attempt, job: DecodeJob, at_s: float) -> None:
        """What its writer told, and what has gone by here: the job's own way is not in it."""
        received_s = attempt.accepted_s - attempt.verified_s
        waited_s = attempt.parked_s  # for a seat, not for its KV
        attempt.remainder_s = job.report.transfer_ms / 1000 + max(0.0, at_s - received_s - waited_s)
        self._remained(job.report.link, attempt.remainder_s)

    def _when_imported(self, attempt: Attempt, job: DecodeJob) -> Callable[[], None]:
        loop = asyncio.get_running_loop()

        def fetched(at_s: float) -> None:
            self._note_remainder(attempt, job, at_s)
            if job.hand_off is not None:  # until now the KV was with prefill's engine
                self._started(attempt)
            self._imported(job.transfer_id)

        def imported() -> None:
            loop.call_soon_threadsafe(fetched, self._now_s())

        return imported


def _taken_over(worker: Incarnation, job: DecodeJob) -> TokenFrame:
    """The tokens that came with `job`, said again: whoever sampled them may have died first.

    A reader that has them already drops them by their index.
    """
    generation = job.generation
    entry = TokenEntry(
        request_id=generation.request_id,
        attempt=generation.attempt,
        index=len(generation.prefix_ids),
        token_ids=job.first_ids,
        logprobs=job.first_logprobs,
        voice=generation.voice,
    )
    return TokenFrame(worker=worker, entries=(entry,))
