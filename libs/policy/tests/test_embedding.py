"""Who is asked for vectors, and how much embedding takes on."""

import pytest

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.fleet import Role, WorkerLoad, WorkerRegistration
from diptych_contracts.ids import Incarnation
from diptych_policy.embedding import EmbedRoom, Reports, Spared, choose


def offer(name: str, role: Role = Role.PREFILL) -> WorkerRegistration:
    return WorkerRegistration(
        worker=Incarnation(name),
        role=role,
        engine="x",
        model="m",
        fingerprint=Fingerprint(base="b", weights="w"),
        layout=KvLayout(layout_id="x", engine_build="x", block_tokens=64, slot_bytes=1, dtype="f"),
        endpoints=(),
        max_sequences=4,
        kv_tokens=1,
        context_tokens=1,
    )


def reported(*loads: WorkerLoad, now_s: float = 0.0) -> Reports:
    reports = Reports()
    for load in loads:
        reports.heard(load, now_s=now_s)
    return reports


def load(name: str, waiting: int = 0, **more: bool | int) -> WorkerLoad:
    return WorkerLoad(worker=Incarnation(name), waiting_tokens=waiting, **more)  # type: ignore[arg-type]


def test_the_prefill_worker_with_the_least_to_do_is_asked() -> None:
    offers = [offer("d", Role.DECODE), offer("p1"), offer("p2"), offer("p3")]
    reports = reported(load("d"), load("p1", 9), load("p2", 5), load("p3", embedding_tokens=7))
    assert choose(offers, reports, given={}) == "p2"
    assert choose(offers, reports, given={Incarnation("p2"): 100}) == "p3"
    assert choose(offers, reports, given={}, tried={Incarnation("p2"), Incarnation("p3")}) == "p1"


def test_where_there_is_no_prefill_worker_any_will_do() -> None:
    assert choose([offer("d", Role.DECODE)], reported(), given={}) == "d"
    assert choose([], reported(), given={}) is None


def test_the_silent_and_the_draining_are_not_asked() -> None:
    offers = [offer("p1"), offer("p2"), offer("d", Role.DECODE)]
    reports = reported(load("p1"), load("p2", draining=True))
    reports.heard(load("d"), now_s=1.4)
    assert choose(offers, reports, given={}) == "p1"
    reports.heard(load("d"), now_s=1.6)
    assert reports.silent(Incarnation("p1"))
    assert choose(offers, reports, given={}) == "d"


def test_while_nobody_reports_nobody_is_silent() -> None:
    reports = reported(load("p1"), load("p2"))
    assert not reports.silent(Incarnation("p1"))
    reports.heard(load("p2"), now_s=100.0)
    reports.forget({"p2"})
    assert reports.load(Incarnation("p1")) is None
    assert not reports.silent(Incarnation("p1"))


def test_a_room_is_bounded_and_one_job_always_fits() -> None:
    room = EmbedRoom(max_jobs=2, max_tokens=100)
    assert room.enter(1000)
    assert not room.enter(1)
    room.leave(1000)
    assert room.enter(60)
    assert not room.enter(60)
    assert room.enter(40)
    assert not room.enter(0)
    assert (room.jobs, room.tokens) == (2, 100)


def test_the_time_to_come_back_follows_the_pace() -> None:
    room = EmbedRoom()
    assert room.retry_after_s == 1.0
    room.enter(5000)
    room.paced(1000, 2.0)
    assert room.retry_after_s == pytest.approx(10.0)
    room.tokens = 500_000
    assert room.retry_after_s == 120.0


def test_generation_keeps_its_share() -> None:
    """Chunks and steps of one length: one chunk to two steps."""
    spared, chunks = Spared(share=1 / 3), 0
    for _ in range(300):
        if spared.may(0.01):
            spared.computed(0.01)
            chunks += 1
    assert chunks == pytest.approx(150, abs=1)
    assert spared.may(0.0)
