import math

import pytest

from diptych_contracts.requests import Request
from diptych_policy.attendance import Attendance, grace_s
from diptych_testkit.builders import a_request


@pytest.mark.parametrize(
    ("request_", "expected_s"),
    [
        (a_request(), 0.0),
        (a_request(resume=True), 30.0),
        (a_request(background=True), math.inf),
        (a_request(resume=True, background=True), math.inf),
    ],
)
def test_intent_decides_the_grace(request_: Request, expected_s: float) -> None:
    assert grace_s(request_) == expected_s


def test_what_is_read_is_never_given_up() -> None:
    attendance = Attendance(0.0)
    assert not attendance.given_up(now_s=1e9)
    attendance.read_elsewhere(now_s=1.0)
    assert not attendance.given_up(now_s=1e9)


def test_without_grace_it_is_given_up_at_once() -> None:
    attendance = Attendance(0.0)
    attendance.unread(now_s=5.0)
    assert attendance.given_up(now_s=5.0)


def test_the_grace_runs_from_the_first_moment_unread() -> None:
    attendance = Attendance(30.0)
    attendance.unread(now_s=5.0)
    attendance.unread(now_s=20.0)
    assert not attendance.given_up(now_s=34.9)
    assert attendance.given_up(now_s=35.0)


def test_a_reader_elsewhere_starts_the_grace_anew_and_one_here_ends_it() -> None:
    attendance = Attendance(30.0)
    attendance.unread(now_s=0.0)
    attendance.read_elsewhere(now_s=29.0)
    assert not attendance.given_up(now_s=58.0)
    attendance.read()
    assert not attendance.given_up(now_s=1e9)
    attendance.unread(now_s=100.0)
    assert attendance.given_up(now_s=130.0)
