"""What the workers of a made-up world (`ledger_world`) do with their jobs."""

from random import Random

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import (
    Job,
    JobAccepted,
    JobAnswer,
    JobRefused,
    PrefillJob,
    RefusalReason,
)
from diptych_contracts.journal import End, EndReason, Started
from diptych_policy.job_admission import NotAdmitted
from diptych_testkit.world_members import TOKENS, Running, Worker, failed, token


class Crew:
    """All workers: a prefill hands over to another of them."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.workers: dict[Incarnation, Worker] = {}

    def admit(self, worker: Worker, job: Job) -> JobAnswer:
        """A job reaches its worker."""
        generation = job.generation
        request_id, attempt = key = (generation.request_id, generation.attempt)
        waits = isinstance(job, PrefillJob)
        admitted = worker.admission.admit(*key, 16, may_wait=waits)
        if isinstance(admitted, NotAdmitted):
            return JobRefused(request_id=request_id, attempt=attempt, reason=admitted.reason)
        if not admitted.duplicate:
            for stale in admitted.stale:
                worker.leave((request_id, stale))
            phase = "prefill" if waits else "decode"
            worker.running[key] = Running(job, len(generation.prefix_ids), phase)
        worker.admission.check()
        return JobAccepted(request_id=request_id, attempt=attempt, duplicate=admitted.duplicate)

    def compute(self, worker: Worker, key: tuple[RequestId, int]) -> None:
        """One step of one attempt."""
        running = worker.running[key]
        request_id, attempt = key
        if self._rng.random() < 0.05:
            worker.unsaid.append(failed(worker, running.job, RefusalReason.UNVERIFIED_KV))
            worker.leave(key)
            return
        worker.unsaid.append(token(running.job, running.index))
        running.index += 1
        if running.index >= TOKENS:
            end = End(
                request_id=request_id,
                attempt=attempt,
                reason=EndReason.LENGTH,
                tokens=TOKENS,
                voice=running.job.generation.voice,
            )
            worker.unsaid.append(end)
            worker.leave(key)
        elif running.phase == "prefill":
            self._hand_over(worker, key, running)

    def _hand_over(self, worker: Worker, key: tuple[RequestId, int], running: Running) -> None:
        assert isinstance(running.job, PrefillJob)
        decode = self.workers.get(running.job.decode_worker)
        taken = decode is not None and decode.up and not decode.frozen
        if decode is None or not taken:
            worker.unsaid.append(failed(worker, running.job, RefusalReason.NO_ROOM))
        elif isinstance(decode.admission.admit(*key, 16, may_wait=False), NotAdmitted):
            worker.unsaid.append(failed(decode, running.job, RefusalReason.NO_ROOM))
        else:
            decode.running[key] = Running(running.job, running.index, "decode")
            started = Started(
                request_id=key[0],
                attempt=key[1],
                worker=decode.name,
                phase="decode",
                voice=running.job.generation.voice,
            )
            decode.unsaid.append(started)
            decode.unsaid.append(token(running.job, running.index - 1))
        worker.leave(key)
