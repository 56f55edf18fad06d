"""What vLLM says that is no answer, and what of an answer is no token of it."""

from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import EngineGone, Permanent, Refused
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.journal import EndReason
from diptych_engine.port import Phase
from diptych_engine.vllm.answers import delta, read_answer
from diptych_engine.vllm.engine import MAX_OPAQUE_BYTES, VllmEngine, _Model
from diptych_engine.vllm.options import VllmOptions
from diptych_testkit.fake_engines.works import a_work, adapter_settings

EOS_IDS = (2,)


def choice(ids: list[int], finish: str | None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"token_ids": ids, "finish_reason": finish, **more}]}


class Says:
    """A server that answers every request alike."""

    def __init__(self, answer: Any) -> None:
        self._answer = msgspec.json.encode(answer)

    async def post(self, path: str, body: bytes, *, within_s: float, headers: Any) -> bytes:
        return self._answer


def engine_that(answer: Any, **options: Any) -> VllmEngine:
    engine = VllmEngine(adapter_settings("vllm", "http://h:1"), VllmOptions(**options))
    engine._describe("0.32.0", _Model(id="m"), "")
    engine._http = Says(answer)  # type: ignore[assignment]
    return engine


async def offers_of(engine: VllmEngine) -> list[EngineHandOff]:
    offers: list[EngineHandOff] = []
    await engine.prefill(a_work(Phase.PREFILL), offers.append)
    return offers


def test_an_answer_the_engine_gave_up_is_no_end() -> None:
    with pytest.raises(Refused, match="abort"):
        delta(read_answer(msgspec.json.encode(choice([5], "abort"))), EOS_IDS, ignore_eos=False)


def test_a_token_that_stopped_it_is_no_token_of_the_answer() -> None:
    """The server knows ends of text of its own, besides the card's."""
    for ids, reason in (([5, 2], None), ([5, 9], 9)):
        answer = read_answer(msgspec.json.encode(choice(ids, "stop", stop_reason=reason)))
        found = delta(answer, EOS_IDS, ignore_eos=False)
        assert found is not None
        assert (found.token_ids, found.finish) == ((5,), EndReason.STOP)


async def test_a_prefill_that_was_aborted_is_not_offered() -> None:
    with pytest.raises(Refused, match="no KV to fetch"):
        await offers_of(engine_that(choice([], "abort")))


async def test_an_error_of_status_200_is_one_of_a_prefill_too() -> None:
    answer = choice([5], "length") | {"error": {"message": "EngineCore died", "code": 500}}
    with pytest.raises(EngineGone, match="EngineCore died"):
        await offers_of(engine_that(answer))


async def test_a_description_too_long_for_the_bus_is_refused() -> None:
    params = {"remote_block_ids": "x" * MAX_OPAQUE_BYTES}
    with pytest.raises(Permanent, match="describes its KV in"):
        await offers_of(engine_that(choice([5], "length") | {"kv_transfer_params": params}))


async def test_what_prefill_had_cached_is_told() -> None:
    usage = {"prompt_tokens_details": {"cached_tokens": 16}}
    engine = engine_that(choice([5], "length") | {"kv_transfer_params": {}, "usage": usage})
    told = await engine.prefill(a_work(Phase.PREFILL), lambda _: None)
    assert (told.token_ids, told.cached_tokens) == ((), 16)


async def test_a_server_without_the_connector_hands_nothing_over() -> None:
    engine = engine_that(choice([5], "length"), hand_off=False)
    assert engine.spec.hand_off is None
    with pytest.raises(Refused, match="without the NIXL connector"):
        await offers_of(engine)


@pytest.mark.parametrize(("server", "context"), [(64, 64), (1 << 20, None), (None, None)])
def test_the_shorter_context_limits(server: int | None, context: int | None) -> None:
    engine = engine_that({})
    engine._describe("0.32.0", _Model(id="m", max_model_len=server), "")
    card = engine._settings.card.context_tokens
    assert engine.spec.context_tokens == (context or card)
