"""Answers that follow a grammar, through hand-overs and deaths: the state is replayed from tokens.

The toy engine draws what it says from a hash of all tokens before, so an answer that follows the
grammar from another state, or starts afresh, is another answer.
"""

import json
from typing import Any

import pytest

from diptych_contracts.fleet import Role
from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import Forced, Mode, Request
from diptych_contracts.sampling import Grammar, Sampling, Stopping
from diptych_testkit.builders import a_request
from diptych_testkit.small_fleet import SmallFleet, small_fleet
from diptych_testkit.small_gateway import VOCAB_SIZE
from diptych_testkit.structured_list import valid
from diptych_testkit.tiny_gguf import tiny_card
from diptych_testkit.toy_engine import ToyStepEngine
from diptych_text.codec import TextCodec

pytestmark = pytest.mark.virtual_time
CODEC = TextCodec.from_card(tiny_card())
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "parts": {"type": "array", "items": {"type": "integer"}, "minItems": 3},
        "kind": {"enum": ["big", "small"]},
    },
    "required": ["name", "parts", "kind"],
    "additionalProperties": False,
}
MOST = 90
SAMPLINGS = {"greedy": Sampling(temperature=0.0), "sampled": Sampling(temperature=1.0, seed=3)}


def request(sampling: Sampling, mode: Mode, *, text: str = json.dumps(SCHEMA)) -> Request:
    chosen = Sampling(
        temperature=sampling.temperature,
        seed=sampling.seed,
        grammar=Grammar(kind="json_schema", text=text),
    )
    return a_request(
        "r1",
        prompt_ids=tuple(range(1, 101)),
        sampling=chosen,
        stopping=Stopping(max_tokens=MOST),
        forced=Forced(mode=mode),
    )


def an_engine() -> ToyStepEngine:
    return ToyStepEngine(vocab_size=VOCAB_SIZE, step_s=0.02)


async def start(fleet: SmallFleet) -> None:
    fleet.scheduler()
    for name, role in {"p1": Role.PREFILL, "d1": Role.DECODE}.items():
        fleet.worker(name, role, engine=an_engine())
    await fleet.ready()


async def undisturbed(asked: Request) -> list[int]:
    async with small_fleet() as fleet:
        await start(fleet)
        await fleet.client.send(asked)
        assert (await fleet.client.ended("r1")).reason is EndReason.STOP
        return list(fleet.client.delivered["r1"])


def value_of(tokens: Any) -> Any:
    return valid(b"".join(CODEC.token_bytes(token) for token in tokens).decode(), SCHEMA)


@pytest.mark.parametrize("kind", SAMPLINGS)
async def test_every_path_gives_one_valid_answer(kind: str) -> None:
    remote, local = [await undisturbed(request(SAMPLINGS[kind], mode)) for mode in Mode]
    assert remote == local
    assert value_of(remote)["kind"] in ("big", "small")
    assert len(remote) > 40


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("after", [1, 7, 30, 44])
async def test_after_a_death_it_goes_on_where_it_was(kind: str, mode: Mode, after: int) -> None:
    asked = request(SAMPLINGS[kind], mode)
    expected = await undisturbed(asked)
    async with small_fleet() as fleet:
        await start(fleet)
        await fleet.client.send(asked)
        await fleet.client.has_tokens("r1", after)
        fleet.worker("d2", Role.DECODE, engine=an_engine())
        await fleet.ready("d2")
        await fleet.kill("d1")
        end = await fleet.client.ended("r1")
        assert (end.reason, end.attempt) == (EndReason.STOP, 2)
        assert list(fleet.client.delivered["r1"]) == expected
        assert value_of(expected)


async def test_a_grammar_no_engine_can_follow_ends_its_request_only() -> None:
    """The gateway refuses it; should one come through, the sequence fails and nothing else."""
    async with small_fleet() as fleet:
        await start(fleet)
        await fleet.client.send(request(SAMPLINGS["greedy"], Mode.REMOTE, text='{"not": {}}'))
        end: End = await fleet.client.ended("r1")
        assert end.reason is EndReason.FAILED
        assert "not" in end.detail
        assert end.attempt == 1
        assert not fleet.crashes
        await fleet.client.send(a_request("r2"))
        assert (await fleet.client.ended("r2")).reason is EndReason.LENGTH
