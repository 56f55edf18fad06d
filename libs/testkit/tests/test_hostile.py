"""What is drawn follows from the seed, and stays what it claims to be."""

import json

from diptych_testkit.hostile import CHAT, Hostility
from diptych_testkit.hostile_clients import Answer, Judge, close_code


def test_a_seed_draws_the_same_again() -> None:
    one, other = Hostility("7", "tiny"), Hostility("7", "tiny")
    for _ in range(60):
        assert one.request() == other.request()
        assert one.frame() == other.frame()
        assert one.handshake() + one.wire() == other.handshake() + other.wire()
    assert Hostility("8", "tiny").request() != Hostility("7", "tiny").request()


def test_some_requests_are_valid_and_most_of_the_http_is() -> None:
    drawn = [Hostility("7", "tiny")] * 400
    sent = [hostility.request() for hostility in drawn]
    assert 0.8 < sum(request.whole for request in sent) / len(sent) < 0.97
    valid = 0
    for request in sent:
        head, _, body = request.raw.partition(b"\r\n\r\n")
        if request.whole and head.startswith(b"POST " + CHAT.encode()):
            try:
                valid += isinstance(json.loads(body), dict)
            except (ValueError, RecursionError):
                continue
    assert valid > 20


def test_a_judge_knows_only_what_is_documented() -> None:
    judge = Judge({200: frozenset(), 400: frozenset({"invalid_json"})})
    head = {"content-type": "application/json", "x-request-id": "1"}

    def error(code: str) -> bytes:
        detail = {"message": "a", "type": "b", "param": None, "code": code}
        return json.dumps({"error": detail}).encode()

    judge.answer(Answer(400, head, error("invalid_json")), of=b"x")
    assert not judge.faults
    judge.answer(Answer(400, head, error("nonsense")), of=b"x")
    judge.answer(Answer(500, head, error("invalid_json")), of=b"x")
    judge.answer(Answer(400, {}, b"words"), of=b"x")
    assert len(judge.faults) == 3


def test_the_code_of_a_close_frame() -> None:
    assert close_code(b"") == 1006
    assert close_code(b"\x81\x02hi\x88\x02\x03\xea") == 1002
    assert close_code(b"\x88\x00") == 1005
