import pytest

from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import DecodeJob, GenerateJob, PrefillJob
from diptych_contracts.journal import Report
from diptych_engine.port import Phase, SequenceKey
from diptych_testkit.builders import GATEWAY, REQUEST, a_generation
from diptych_worker.attempts import Attempt

ME, PEER = Incarnation("me"), Incarnation("peer")


async def an_attempt(job: PrefillJob | DecodeJob | GenerateJob) -> Attempt:
    attempt = Attempt(job=job, worker=ME, accepted_s=10.0, expires_s=70.0)
    attempt.started_s, attempt.first_token_s = 10.5, 12.5
    attempt.energy_j = 8.0
    return attempt


async def test_a_prefill_reports_its_phase() -> None:
    job = PrefillJob(generation=a_generation(), decode_worker=PEER, link="shm")
    attempt = await an_attempt(job)
    assert (attempt.phase, attempt.key) == (Phase.PREFILL, SequenceKey(REQUEST, 1))
    assert attempt.gateway == GATEWAY
    report = attempt.report(12.5)
    assert (report.mode, report.prefill_worker, report.link) == ("remote", ME, "shm")
    assert (report.prefill_wait_ms, report.prefill_ms) == (500.0, 2000.0)
    assert (report.prefill_j, report.decode_j) == (8.0, 0.0)


async def test_a_decode_adds_its_part_to_the_peers_report() -> None:
    handed_over = Report(mode="remote", prefill_worker=PEER, transfer_ms=1.0, prefill_j=3.0)
    job = DecodeJob(
        generation=a_generation(attempt=2),
        prefill_worker=PEER,
        transfer_id=TransferId("r1.2"),
        first_ids=(4,),
        blocks=(),
        report=handed_over,
    )
    attempt = await an_attempt(job)
    attempt.verified_s = 0.002
    report = attempt.report(14.5)
    assert attempt.phase is Phase.DECODE
    assert (report.prefill_worker, report.decode_worker) == (PEER, ME)
    assert (report.transfer_ms, report.decode_ms) == (3.0, 4000.0)
    assert (report.prefill_j, report.decode_j) == (3.0, 8.0)


async def test_a_local_attempt_splits_its_energy_by_time() -> None:
    attempt = await an_attempt(GenerateJob(generation=a_generation()))
    report = attempt.report(14.5)
    assert (report.mode, report.prefill_worker, report.decode_worker) == ("local", ME, ME)
    assert (report.prefill_ms, report.decode_ms) == (2000.0, 2000.0)
    assert report.prefill_j == pytest.approx(4.0)
    assert report.decode_j == pytest.approx(4.0)


async def test_an_attempt_that_never_began_reports_zeros() -> None:
    attempt = Attempt(
        job=GenerateJob(generation=a_generation()), worker=ME, accepted_s=1.0, expires_s=2.0
    )
    report = attempt.report(1.5)
    assert (report.prefill_ms, report.decode_ms, report.decode_j) == (0.0, 0.0, 0.0)
