from random import Random

import pytest

from diptych_contracts import subjects
from diptych_contracts.ids import Incarnation, RequestId

WORKER = Incarnation("decode-worker-0123456789ab")
PLAIN = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("plain-Name_1", "plain-Name_1"),
        ("org/model-7.5B", "org=2Fmodel-7=2E5B"),
        ("a b", "a=20b"),
        ("=3D", "=3D3D"),
        ("*.>", "=2A=2E=3E"),
        ("é", "=C3=A9"),
        ("\r\n\0", "=0D=0A=00"),
    ],
)
def test_a_name_becomes_one_subject_token_and_back(name: str, token: str) -> None:
    assert subjects.escape(name) == token
    assert subjects.unescape(token) == name


@pytest.mark.parametrize("seed", range(20))
def test_any_name_survives_as_one_plain_token(seed: int) -> None:
    rng = Random(seed)
    codes = [rng.choice([rng.randrange(0x80), rng.randrange(0xD800)]) for _ in range(40)]
    name = "".join(map(chr, codes))

    token = subjects.escape(name)

    assert set(token) <= PLAIN
    assert subjects.unescape(token) == name


def test_different_names_never_meet() -> None:
    names = ["a.b", "a=2Eb", "a=b", "a/b", "a b", "ab", "A.b"]
    assert len({subjects.escape(name) for name in names}) == len(names)


def test_an_empty_name_is_no_subject_token() -> None:
    with pytest.raises(ValueError, match="cannot be empty"):
        subjects.escape("")


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (subjects.request("interactive", "org/m"), "request.interactive.org=2Fm"),
        (subjects.token(WORKER), f"token.{WORKER}"),
        (subjects.live(WORKER), f"live.{WORKER}"),
        (subjects.event("request_ended"), "event.request_ended"),
        (subjects.dead("REQUESTS"), "dead.REQUESTS"),
        (subjects.dead_request(RequestId("r1")), "dead.request.r1"),
        (subjects.job(WORKER), f"job.{WORKER}"),
        (subjects.kv(WORKER, "reserve"), f"kv.{WORKER}.reserve"),
        (subjects.beat(WORKER), f"beat.{WORKER}"),
        (subjects.load(WORKER), f"load.{WORKER}"),
        (subjects.cancel(WORKER), f"cancel.{WORKER}"),
        (subjects.power(WORKER), f"power.{WORKER}"),
    ],
)
def test_each_subject_is_as_documented(subject: str, expected: str) -> None:
    assert subject == expected
