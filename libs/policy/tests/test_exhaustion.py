from diptych_policy.exhaustion import Exhaustion
from diptych_policy.job_admission import JobAdmission

FULL = "all 4 seats are taken"


def test_full_for_a_moment_is_no_reason() -> None:
    seen = Exhaustion(lasting_s=2.0)
    assert seen.reason(FULL, now_s=10.0) == ""
    assert seen.reason(FULL, now_s=11.9) == ""
    assert seen.reason("", now_s=12.0) == ""
    assert seen.reason(FULL, now_s=12.1) == ""
    assert seen.reason(FULL, now_s=14.0) == ""


def test_full_without_a_break_is_one_until_there_is_room() -> None:
    seen = Exhaustion(lasting_s=2.0)
    seen.reason(FULL, now_s=10.0)
    assert seen.reason(FULL, now_s=12.0) == FULL
    assert seen.reason("another", now_s=12.1) == "another"
    assert seen.reason("", now_s=12.2) == ""


def test_a_worker_says_what_the_smallest_job_would_be_told() -> None:
    admission = JobAdmission(max_sequences=2, kv_tokens=256, max_waiting=3)
    assert admission.obstacle(64, may_wait=False) == ""
    admission.admit("r1", 1, 200, may_wait=False)
    assert admission.obstacle(64, may_wait=False) == "needs 64 KV cells, 56 of 256 are free"
    assert admission.obstacle(64, may_wait=True) == "", "it may wait for room"
    admission.admit("r2", 1, 10, may_wait=False)
    assert admission.obstacle(1, may_wait=False) == "all 2 seats are taken"
    admission.admit("r3", 1, 64, may_wait=True)
    assert admission.obstacle(64, may_wait=True) == "all 3 seats are taken"
    admission.leave("r1", 1)
    admission.leave("r2", 1)
    assert admission.obstacle(64, may_wait=False) == ""
