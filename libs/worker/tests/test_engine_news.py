import asyncio
from collections.abc import AsyncIterator

import pytest

from diptych_bus.memory import MemoryBroker, MemoryBus
from diptych_bus.port import JournalItem
from diptych_contracts.errors import DiptychError, Expired, Incompatible, Permanent, Refused
from diptych_contracts.ids import Incarnation
from diptych_contracts.jobs import GenerateJob, Job, PrefillJob, RefusalReason
from diptych_contracts.journal import AttemptFailed, EndReason, JournalEntry, TokenFrame
from diptych_engine.port import (
    NewTokens,
    SequenceAborted,
    SequenceFailed,
    SequenceKey,
    SequenceStarted,
    StepNews,
    StepReport,
)
from diptych_power.sim import SimulatedDevice
from diptych_testkit.builders import GATEWAY, a_generation, tokens
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.attempts import Attempt
from diptych_worker.engine_news import EngineNews
from diptych_worker.metering import WorkerMetrics

ME = Incarnation("me")
OTHER_GATEWAY = Incarnation("gateway-2")


class Room:
    """Engine news, an attempt or two, and what reached the journals."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.now_s = 0.0
        metrics = WorkerMetrics("toy", ToyStepEngine().spec)
        self.blocks = AnnouncedBlocks(bus, ME)
        self.news = EngineNews(
            bus, ME, SimulatedDevice(), metrics, blocks=self.blocks, now_s=lambda: self.now_s
        )
        self.journal: list[tuple[Incarnation, JournalEntry]] = []

    async def follow(self) -> None:
        for gateway in (GATEWAY, OTHER_GATEWAY):

            def note(item: JournalItem, gateway: Incarnation = gateway) -> None:
                self.journal.append((gateway, item.entry))

            await self.bus.follow(gateway, note)

    def add(self, job: Job) -> Attempt:
        attempt = Attempt(job=job, worker=ME, accepted_s=0.0, expires_s=60.0)
        self.news.attempts[attempt.key] = attempt
        return attempt

    async def hear(self, *news: StepNews, **report: object) -> None:
        self.news.heard(StepReport(news=news, duration_s=0.1, **report))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        await self.bus.flush(1)


@pytest.fixture
async def room() -> AsyncIterator[Room]:
    bus = MemoryBroker().connect("me")
    room = Room(bus)
    await room.follow()
    yield room
    await bus.close()


def generate(request_id: str = "r1", gateway: Incarnation = GATEWAY) -> GenerateJob:
    return GenerateJob(generation=a_generation(request_id, gateway=gateway))


def new(attempt: Attempt, *ids: int, index: int = 0, finish: EndReason | None = None) -> NewTokens:
    return NewTokens(attempt.key, index, ids, finish)


async def test_a_step_is_one_frame_per_gateway(room: Room) -> None:
    first, second = room.add(generate("r1")), room.add(generate("r2"))
    third = room.add(generate("r3", OTHER_GATEWAY))
    await room.hear(new(first, 4), new(second, 5), new(third, 6))
    frames = dict(room.journal)
    assert len(room.journal) == 2
    assert frames[GATEWAY] == TokenFrame(
        worker=ME, entries=(tokens(4, of="r1"), tokens(5, of="r2"))
    )
    assert frames[OTHER_GATEWAY] == TokenFrame(worker=ME, entries=(tokens(6, of="r3"),))


async def test_the_last_tokens_carry_the_end(room: Room) -> None:
    attempt = room.add(generate())
    room.now_s = 1.0
    await room.hear(SequenceStarted(attempt.key))
    room.now_s = 3.0
    await room.hear(new(attempt, 4, 5, finish=EndReason.LENGTH))
    ((_, frame),) = room.journal
    assert isinstance(frame, TokenFrame)
    (end,) = frame.ends
    assert (end.reason, end.tokens) == (EndReason.LENGTH, 2)
    assert end.report is not None
    assert end.report.prefill_ms == 2000.0
    assert attempt.left.is_set()
    assert not room.news.attempts


async def test_an_end_without_a_token_has_no_entry(room: Room) -> None:
    attempt = room.add(generate())
    await room.hear(new(attempt, finish=EndReason.STOP))
    ((_, frame),) = room.journal
    assert isinstance(frame, TokenFrame)
    assert frame.entries == ()
    assert frame.ends[0].tokens == 0


async def test_a_prefill_that_sampled_its_token_has_left_the_engine(room: Room) -> None:
    job = PrefillJob(generation=a_generation(), decode_worker=Incarnation("d"), link="shm")
    attempt = room.add(job)
    await room.hear(new(attempt, 4))
    assert (await attempt.sampled).token_ids == (4,)
    assert attempt.left.is_set()
    ((_, frame),) = room.journal
    assert isinstance(frame, TokenFrame)
    assert frame.ends == ()


@pytest.mark.parametrize(
    ("news", "reason"),
    [
        (lambda key: SequenceFailed(key, "no_room", "no cells"), "no_room"),
        (SequenceAborted, "cancelled"),
    ],
)
async def test_what_the_engine_drops_is_told_to_who_waits(
    news: type[SequenceAborted], reason: str, room: Room
) -> None:
    attempt = room.add(generate())
    await room.hear(news(attempt.key))
    assert attempt.left.is_set()
    with pytest.raises(Refused, match=reason):
        await attempt.sampled
    assert room.journal == []


async def test_what_would_fail_anywhere_is_not_tried_again(room: Room) -> None:
    attempt = room.add(generate())
    await room.hear(SequenceFailed(attempt.key, "engine_error", "not finite", permanent=True))
    with pytest.raises(Permanent, match="not finite"):
        await attempt.sampled


async def test_energy_is_split_by_tokens(room: Room) -> None:
    first, second = room.add(generate("r1")), room.add(generate("r2"))
    await room.hear(tokens_by_key={first.key: 3, second.key: 1}, prefill_tokens=3, decode_tokens=1)
    assert first.energy_j == pytest.approx(3 * second.energy_j)
    assert first.energy_j + second.energy_j > 0.1 * 50


async def test_news_of_strangers_is_ignored(room: Room) -> None:
    await room.hear(NewTokens(SequenceKey(a_generation().request_id, 9), 0, (1,)))
    assert room.journal == []


@pytest.mark.parametrize(
    ("err", "worker", "reason", "retryable"),
    [
        (Refused("no_room", "full", by="d1"), "d1", "no_room", True),
        (Refused("unverified_kv"), ME, "unverified_kv", True),
        (Expired("too late"), ME, "Expired", True),
        (Incompatible("layout"), ME, "Incompatible", True),
        (Permanent("not finite"), ME, "Permanent", False),
    ],
)
async def test_a_failure_names_who_could_not_go_on(
    err: DiptychError, worker: str, reason: str, retryable: bool, room: Room
) -> None:
    attempt = room.add(generate())
    room.news.fail(attempt, err)
    await room.bus.flush(1)
    ((_, failed),) = room.journal
    assert isinstance(failed, AttemptFailed)
    assert (failed.worker, failed.reason) == (worker, reason)
    assert failed.retryable is retryable


async def test_a_cancel_is_no_failure(room: Room) -> None:
    room.news.fail(room.add(generate()), Refused(RefusalReason.CANCELLED))
    await room.bus.flush(1)
    assert room.journal == []
