"""The shell both workers share: jobs in, journal entries out."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from diptych_bus.port import Delivery
from diptych_chassis.draining import Drain
from diptych_chassis.member import Member
from diptych_chassis.orders import Refused as OrderRefused
from diptych_chassis.orders import obeying
from diptych_chassis.repeating import every
from diptych_contracts import subjects
from diptych_contracts.attempts import AttemptAsk, AttemptIs
from diptych_contracts.blocks import BlocksQuery, BlocksSnapshot
from diptych_contracts.control import (
    ForgetAnswer,
    ForgetTenant,
    KvAsk,
    KvSnapshot,
    TenantForgotten,
    TenantKept,
    TiersAsk,
    TiersSnapshot,
)
from diptych_contracts.errors import DiptychError, Refused, Transient, Unverified
from diptych_contracts.ids import RequestId
from diptych_contracts.jobs import (
    Cancel,
    CancelDone,
    DecodeJob,
    GenerateJob,
    Job,
    JobAccepted,
    JobAnswer,
    JobRefused,
    PrefillJob,
    RefusalReason,
)
from diptych_contracts.link_reports import LinksAsk, LinksReport
from diptych_contracts.orders import Signed
from diptych_contracts.transfers import Release, Released, Reserve, ReserveAnswer, Ticket
from diptych_engine.port import Engine, KvBlock, Phase, SequenceKey
from diptych_kvlink.claiming import IncomingBlock
from diptych_kvlink.sealing import BadTicket
from diptych_kvlink.writer_links import WriterLinks
from diptych_kvtiers.stack import Forgotten
from diptych_policy.job_admission import Admitted, JobAdmission, NotAdmitted
from diptych_policy.overtaken import Rounds
from diptych_telemetry import logger
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.attempts import Attempt
from diptych_worker.decoding import Decoding
from diptych_worker.device import Device
from diptych_worker.embedding import EmbedDesk
from diptych_worker.engine_handing_over import EngineHandOver
from diptych_worker.engine_news import EngineNews
from diptych_worker.handing_over import HandOver
from diptych_worker.prompts import Prompts
from diptych_worker.registering import Register
from diptych_worker.reporting import Reports
from diptych_worker.taking_over import TakeOver, context_tokens, whole_tokens
from diptych_worker.tiering import Tiering

log = logger("worker")

_LOAD_S = 0.1
_SWEEP_S = 0.25
_BLOCKS_S = 0.02
_TIERS_S = 1.0
_REFRESH_S = 10.0
_LOOK_S = 0.5
_ASK_S = 2.0
_LINGER_S = 0.3
"""Ten times what a registration's end takes to reach everybody."""


ControlAsk = KvAsk | TiersAsk | LinksAsk | BlocksQuery | Signed
ControlAnswer = KvSnapshot | TiersSnapshot | LinksReport | BlocksSnapshot | ForgetAnswer


@dataclass(frozen=True, slots=True)
class Parts:
    """What a worker is made of."""

    engine: Engine
    admission: JobAdmission
    news: EngineNews
    hand_over: HandOver | EngineHandOver
    take_over: TakeOver
    writing: WriterLinks
    survey: Callable[..., LinksReport]
    decoding: Decoding
    embedding: EmbedDesk
    prompts: Prompts
    blocks: AnnouncedBlocks
    register: Register
    reports: Reports
    device: Device
    tiering: Tiering | None = None


class Worker:
    """One worker of either role."""

    def __init__(self, member: Member, parts: Parts, *, drain_s: float) -> None:
        self._member = member
        self._me = member.incarnation
        self._bus = member.bus
        self._drain_s = drain_s
        self._engine = parts.engine
        self._admission = parts.admission
        self._news = parts.news
        self._hand_over = parts.hand_over
        self._take_over = parts.take_over
        self._writing = parts.writing
        self._survey = parts.survey
        self._prompts = parts.prompts
        self._blocks = parts.blocks
        self._register = parts.register
        self._device = parts.device
        self._decoding = parts.decoding
        self._embedding = parts.embedding
        self._reports = parts.reports
        self._tiering = parts.tiering
        self._obeying = obeying(member, subjects.control(self._me), ForgetTenant)
        self._attempts: dict[SequenceKey, Attempt] = {}
        self._rounds = Rounds()

    async def run(self) -> None:
        """Serve until told to stop, then drain: finish what is here, and leave."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._bus.serve(subjects.job(self._me), self._on_job)
            await self._bus.serve(subjects.cancel(self._me), self._on_cancel)
            await self._bus.serve(subjects.kv(self._me, "reserve"), self._on_reserve)
            await self._bus.serve(subjects.kv(self._me, "release"), self._on_release)
            await self._bus.serve(subjects.control(self._me), self._on_control)
            await self._embedding.start()
            await self._bus.subscribe(subjects.power(self._me), self._reports.set_power)
            await self._register.enter()
            turns = [
                self._tasks.create_task(every(_LOAD_S, self._reports.send)),
                self._tasks.create_task(every(_SWEEP_S, self._sweep)),
                self._tasks.create_task(every(_BLOCKS_S, self._blocks.announce)),
                self._tasks.create_task(every(_LOOK_S, self._look_for_overtaken)),
                self._tasks.create_task(self._reports.end_once_back()),
            ]
            if self._tiering is not None:
                turns.append(self._tasks.create_task(every(_TIERS_S, self._tiering.measure)))
            staying = self._tasks.create_task(every(_REFRESH_S, self._register.refresh))
            self._member.ready(True)
            await self._member.stopping.wait()
            await self._drain()
            staying.cancel()
            await self._register.leave()
            # What was sent before everybody knew is still answered: a refusal costs its sender
            # nothing, silence would cost it an attempt.
            await asyncio.sleep(_LINGER_S)
            for turn in turns:
                turn.cancel()
        await self._bus.flush(timeout_s=2.0)

    async def _drain(self) -> None:
        """Take nothing more, finish what is here, and hand back what that takes too long for."""
        self._admission.draining = True
        drain = Drain(self._member, self._drain_s)
        await self._reports.send()
        while (left_here := len(self._admission) + len(self._embedding)) and drain.left_s:
            drain.tell(left_here)
            await asyncio.sleep(_LOAD_S)
        self._embedding.stop()
        left = [await self._hand_back(attempt) for attempt in list(self._attempts.values())]
        await drain.done(left=sum(left))

    async def _hand_back(self, attempt: Attempt) -> bool:
        """Stop an attempt and tell its owner, who runs it elsewhere; False if it has just ended."""
        await self._stop(attempt.key)
        task = attempt.task
        if attempt.failure is None and not (task is not None and task.cancelled()):
            return False
        log.warning("attempt_not_drained", request_id=attempt.key.request_id)
        self._news.fail(attempt, Refused(RefusalReason.DRAINING, "its worker's drain was cut off"))
        return True

    # Jobs

    async def _on_job(self, delivery: Delivery) -> JobAnswer:
        job: Job = delivery.decode(Job)
        generation = job.generation
        key = SequenceKey(generation.request_id, generation.attempt)
        began_s = self._member.now_s()
        try:
            duplicate, blocks = self._seat(job, key)
        except (Refused, Unverified) as err:
            return _refused(key, err)
        if not duplicate:
            self._start(job, blocks, verified_s=self._member.now_s() - began_s)
        return JobAccepted(request_id=key.request_id, attempt=key.attempt, duplicate=duplicate)

    def _seat(self, job: Job, key: SequenceKey) -> tuple[bool, Sequence[IncomingBlock]]:
        """Whether the job is a duplicate, and its verified blocks. Raises if it is refused."""
        if key in self._attempts:
            return True, []
        generation = job.generation
        match job:
            case DecodeJob():
                if self._admission.past(*key):
                    return True, []
                return False, self._take_over.claim(job)
            case PrefillJob():
                admitted = self._admission.admit(*key, context_tokens(generation), may_wait=True)
            case GenerateJob():
                admitted = self._admission.admit(*key, whole_tokens(generation), may_wait=False)
            case _:
                assert_never(job)
        if isinstance(admitted, NotAdmitted):
            raise Refused(admitted.reason, admitted.detail)
        self._stop_stale(admitted, key)
        return admitted.duplicate, []

    def _stop_stale(self, admitted: Admitted, key: SequenceKey) -> None:
        for attempt in admitted.stale:
            self._tasks.create_task(self._stop(SequenceKey(key.request_id, attempt)))

    def _start(self, job: Job, blocks: Sequence[IncomingBlock], *, verified_s: float) -> None:
        now_s = self._member.now_s()
        attempt = Attempt(
            job=job,
            worker=self._me,
            accepted_s=now_s,
            expires_s=now_s + job.generation.budget_ms / 1000,
            energy_source=self._device.energy_source,
            verified_s=verified_s,
            engine=self._engine.spec.engine,
            keep=self._take_over.keeps(blocks),
        )
        self._attempts[attempt.key] = self._news.attempts[attempt.key] = attempt
        attempt.task = self._tasks.create_task(self._run(attempt, job, blocks))
        attempt.task.add_done_callback(lambda _task: self._leave(attempt, job))

    async def _run(self, attempt: Attempt, job: Job, blocks: Sequence[IncomingBlock]) -> None:
        """One attempt from its acceptance to the moment the engine has nothing of it."""
        try:
            if isinstance(job, DecodeJob) and self._admission.parks(*attempt.key):
                attempt.parked = True
                self._decoding.parked(attempt, job)
            attempt.prompt_ids = await self._prompts.ids(job.generation)
            if isinstance(job, PrefillJob):
                await self._hand_over.run(attempt, job)
            else:
                unpacked = await self._unpacked(attempt, job, blocks)
                await self._decoding.run(attempt, job, unpacked)
        except DiptychError as err:
            self._news.fail(attempt, err)

    async def _unpacked(
        self, attempt: Attempt, job: DecodeJob | GenerateJob, blocks: Sequence[IncomingBlock]
    ) -> list[KvBlock]:
        """What the engine imports of `blocks`, once it has a seat for them."""
        if not isinstance(job, DecodeJob) or not attempt.parked:
            return await self._take_over.unpacked(blocks)
        return await self._take_over.parking.hold(
            attempt, job, blocks, copied=lambda: self._take_over.imported(job.transfer_id)
        )

    def _leave(self, attempt: Attempt, job: Job) -> None:
        """Nothing of an attempt is held here any more.

        Not in its task's own `finally`: a worker that thaws finds a job and its cancel together,
        and a task that is cancelled before its first turn never gets there.
        """
        self._news.attempts.pop(attempt.key, None)
        del self._attempts[attempt.key]
        if isinstance(job, DecodeJob):
            self._take_over.imported(job.transfer_id)
            self._take_over.parking.free(job.transfer_id)
        self._admission.leave(*attempt.key)
        self._take_over.parking.advance()

    # Cancels

    async def _on_cancel(self, delivery: Delivery) -> CancelDone:
        cancel: Cancel = delivery.decode(Cancel)
        await self._cancel(cancel.request_id, cancel.attempt)
        return CancelDone(request_id=cancel.request_id, attempt=cancel.attempt)

    async def _cancel(self, request_id: RequestId, up_to: int) -> None:
        for attempt in self._admission.cancel(request_id, up_to):
            await self._stop(SequenceKey(request_id, attempt))

    async def _look_for_overtaken(self) -> None:
        for request_id, attempt in self._rounds.due(self._admission, now_s=self._member.now_s()):
            ask = AttemptAsk(request_id=request_id, attempt=attempt)
            try:
                answer: AttemptIs = await self._bus.request(
                    subjects.current(self._me), ask, AttemptIs, timeout_s=_ASK_S
                )
            except Transient as err:  # the next look asks again
                log.debug("attempt_not_asked", request_id=request_id, error=str(err))
                continue
            if answer.overtaken:
                log.info("attempt_overtaken", request_id=request_id, attempt=attempt)
                self._tasks.create_task(self._cancel(request_id, attempt))

    async def _stop(self, key: SequenceKey) -> None:
        """Make sure that nothing of an attempt runs or is held here."""
        attempt = self._attempts.get(key)
        if attempt is None or attempt.task is None:
            self._take_over.cancel(*key)
            return
        if not attempt.stopping:
            attempt.stopping = True
            if attempt.phase is Phase.PREFILL or attempt.prompt_ids is None or attempt.parked:
                attempt.task.cancel()
            else:
                self._engine.abort(key)
        await asyncio.wait([attempt.task])

    # Hand-off

    async def _on_reserve(self, delivery: Delivery) -> ReserveAnswer:
        reserve: Reserve = delivery.decode(Reserve)
        await self._take_over.make_room(reserve)
        answer = self._take_over.reserve(reserve)
        if isinstance(answer, Ticket):
            self._prompts.expect(reserve.generation)
        return answer

    async def _on_release(self, delivery: Delivery) -> Released:
        return self._take_over.release(delivery.decode(Release))

    async def _on_control(self, delivery: Delivery) -> ControlAnswer:
        ask: ControlAsk = delivery.decode(ControlAsk)
        match ask:
            case KvAsk():
                return self._kv(ask)
            case LinksAsk():
                return await asyncio.to_thread(self._survey, gpus=ask.gpus)
            case TiersAsk():
                tiering = self._tiering
                none = TiersSnapshot(worker=self._me)
                return none if tiering is None else tiering.snapshot(self._me, ask.tier)
            case BlocksQuery():
                return self._blocks.snapshot()
            case Signed():
                return await self._obey(delivery.data)
            case _:
                assert_never(ask)

    def _kv(self, ask: KvAsk) -> KvSnapshot:
        return msgspec.structs.replace(
            self._take_over.snapshot(self._me, ask),
            outgoing=self._writing.transfers(ask),
            prefix_blocks=self._blocks.count,
            unix_ms=self._member.unix_ms(),
        )

    async def _obey(self, data: bytes) -> ForgetAnswer:
        try:
            order: ForgetTenant = self._obeying.order(data)
        except OrderRefused as err:
            return TenantKept(worker=self._me, reason=str(err))
        self._prompts.forget()
        dropped = await asyncio.wrap_future(self._engine.forget(order.tenant))
        kept = Forgotten() if self._tiering is None else await self._tiering.forget(order.tenant)
        log.info("tenant_forgotten", sequences=dropped, tier_entries=kept.entries)
        return TenantForgotten(
            worker=self._me,
            sequences=dropped,
            tier_entries=kept.entries,
            tiers_away=kept.unreachable,
        )

    # Time

    async def _sweep(self) -> None:
        self._take_over.sweep()
        self._writing.sweep()
        now_s = self._member.now_s()
        for attempt in list(self._attempts.values()):
            if now_s >= attempt.expires_s and not attempt.stopping:
                log.warning("attempt_expired", request_id=attempt.key.request_id)
                self._tasks.create_task(self._stop(attempt.key))


def _refused(key: SequenceKey, err: Refused | Unverified) -> JobRefused:
    reason = err.reason if isinstance(err, Refused) else RefusalReason.UNVERIFIED_KV
    return JobRefused(
        request_id=key.request_id,
        attempt=key.attempt,
        reason=RefusalReason(reason),
        detail=str(err),
        fault=err.fault if isinstance(err, BadTicket) else None,
    )
