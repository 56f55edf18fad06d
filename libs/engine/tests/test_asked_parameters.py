"""What is asked of each engine: every parameter of a work, by the engine's own name, and no other.

A fake that takes a request does not obey most of them, so it does not miss one that is lost.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from diptych_contracts.sampling import Grammar, Sampling, Stopping
from diptych_engine.over_http.resuming import seed_after
from diptych_engine.port import SequenceWork
from diptych_engine.sglang.asking import question
from diptych_engine.tensorrt_llm.asking import sampling_fields
from diptych_engine.tensorrt_llm.serve_wire import body_of
from diptych_engine.vllm.asking import Asking
from diptych_testkit.fake_engines.works import a_work

PROMPT = (4, 5, 6)
EOS_IDS = (2, 9)
WARM = Sampling(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    seed=11,
    presence_penalty=0.2,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
)
SGLANGS = {"seed": "sampling_seed", "max_tokens": "max_new_tokens"}


def _vllm(work: SequenceWork, *, token_level: bool = False) -> dict[str, Any]:
    asking = Asking(model="m", token_level=token_level, lark=False)
    body: dict[str, Any] = msgspec.json.decode(asking.answer(work, EOS_IDS, "", None))
    return body.get("sampling_params", {}) | body


def _vllms_tokens(work: SequenceWork) -> dict[str, Any]:
    return _vllm(work, token_level=True)


def _sglang(work: SequenceWork) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.json.decode(question(work, EOS_IDS, "", None))
    ours = {theirs: name for name, theirs in SGLANGS.items()}
    asked = {ours.get(name, name): value for name, value in body["sampling_params"].items()}
    return asked | body


def _tensorrt_llm(work: SequenceWork) -> dict[str, Any]:
    fields = sampling_fields(work, EOS_IDS)
    return fields | {"stop_token_ids": [fields["end_id"], *fields.get("stop_token_ids", ())]}


def _trtllm_serve(work: SequenceWork) -> dict[str, Any]:
    body = body_of(work, model="m", eos_ids=EOS_IDS, params=None, stream=True)
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(body))
    known = [EOS_IDS[0]]  # the server knows the model's own
    return told | {"stop_token_ids": [*known, *told.get("stop_token_ids", ())]}


Asked = Callable[[SequenceWork], dict[str, Any]]
ENGINES: dict[str, Asked] = {
    "vllm": _vllm,
    "vllm-tokens": _vllms_tokens,
    "sglang": _sglang,
    "tensorrt_llm": _tensorrt_llm,
    "trtllm_serve": _trtllm_serve,
}
every_engine = pytest.mark.parametrize("asked_of", ENGINES.values(), ids=ENGINES)


@every_engine
def test_no_parameter_is_lost_or_taken_for_another(asked_of: Asked) -> None:
    asked = asked_of(a_work(prompt_ids=PROMPT, sampling=WARM))
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    names += ("presence_penalty", "frequency_penalty", "repetition_penalty")
    assert {name: asked.get(name) for name in names} == {n: getattr(WARM, n) for n in names}


@every_engine
def test_an_answers_rest_is_asked_for_as_a_rest(asked_of: Asked) -> None:
    work = a_work(prompt_ids=PROMPT, sampling=WARM, max_tokens=8, answer_ids=(7, 8))
    asked = asked_of(work)
    prompts = [asked[n] for n in ("prompt", "token_ids", "input_ids") if n in asked]
    assert prompts in ([[*PROMPT, 7, 8]], [])
    assert asked["max_tokens"] == 6
    seeds = {seed_after(WARM, 2) + n * (1 << 64) for n in (0, -1)}  # signed, where it must be
    assert asked["seed"] in seeds | {seed & ((1 << 63) - 1) for seed in seeds}
    assert asked["seed"] != WARM.seed


@every_engine
def test_every_end_of_text_ends_an_answer_unless_it_is_ignored(asked_of: Asked) -> None:
    ending = asked_of(a_work(stopping=Stopping(max_tokens=8)))
    assert (ending["ignore_eos"], ending["stop_token_ids"]) == (False, list(EOS_IDS))
    going_on = asked_of(a_work(stopping=Stopping(max_tokens=8, ignore_eos=True)))
    assert going_on["ignore_eos"]
    assert EOS_IDS[1] not in going_on.get("stop_token_ids", ())


@every_engine
def test_no_limit_of_likely_tokens_is_the_engines_own_word_for_it(asked_of: Asked) -> None:
    unlimited = asked_of(a_work(sampling=msgspec.structs.replace(WARM, top_k=0)))
    assert unlimited["top_k"] == (-1 if asked_of is _sglang else 0)


@every_engine
def test_a_bias_is_of_its_token(asked_of: Asked) -> None:
    if asked_of is _tensorrt_llm:
        pytest.skip("it refuses one")
    biased = msgspec.structs.replace(WARM, logit_bias=((7, 1.5), (8, -2.0)))
    assert asked_of(a_work(sampling=biased))["logit_bias"] == {"7": 1.5, "8": -2.0}


@every_engine
def test_a_schema_is_passed_as_it_was_written(asked_of: Asked) -> None:
    if asked_of is _tensorrt_llm:
        pytest.skip("it is given as an object of the engine's: test_trtllm_engine")
    schema = '{"type":"object"}'
    guided = msgspec.structs.replace(WARM, grammar=Grammar(kind="json_schema", text=schema))
    asked = asked_of(a_work(sampling=guided))
    if asked_of is _sglang:
        assert asked["json_schema"] == schema
    elif asked_of is _trtllm_serve:
        assert asked["response_format"] == {"type": "json", "schema": msgspec.json.decode(schema)}
    else:
        assert asked["structured_outputs"] == {"json": schema}
