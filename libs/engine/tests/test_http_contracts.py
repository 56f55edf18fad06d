"""Change one field of a contract, and the adapter no longer works with the server built from it."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from diptych_contracts.errors import DiptychError
from diptych_contracts.fleet import Role
from diptych_engine.over_http.contract import Contract, Field, faults
from diptych_engine.port import Phase
from diptych_engine.sglang.contract import CONTRACT as SGLANG
from diptych_engine.sglang.engine import SglangEngine
from diptych_engine.sglang.options import SglangOptions
from diptych_engine.vllm.contract import CONTRACT as VLLM
from diptych_engine.vllm.engine import VllmEngine
from diptych_engine.vllm.options import VllmOptions
from diptych_testkit.fake_engines.sglang import FakeBootstrap, FakeSglang, SglangHabits
from diptych_testkit.fake_engines.vllm import FakeNixl, FakeVllm, VllmHabits
from diptych_testkit.fake_engines.works import a_work, adapter_settings, answer_of, handed_over
from diptych_testkit.toy_engine import GREEDY, toy_answer

PROMPT = tuple(range(1, 50))
EXPECTED = toy_answer(PROMPT, 4)
ASKED = msgspec.structs.replace(GREEDY, top_logprobs=1)


def _call(contract: Contract, name: str, **changes: Any) -> Contract:
    call = replace(contract.calls[name], **changes)
    return replace(contract, calls={**contract.calls, name: call})


def without(call: str, side: str, path: str) -> Callable[[Contract], Contract]:
    """The field is gone."""

    def mutated(contract: Contract) -> Contract:
        fields = dict(getattr(contract.calls[call], side))
        del fields[path]
        return _call(contract, call, **{side: fields})

    return mutated


def instead(call: str, side: str, path: str, field: Field) -> Callable[[Contract], Contract]:
    """The field is another one."""

    def mutated(contract: Contract) -> Contract:
        fields = {**getattr(contract.calls[call], side), path: field}
        return _call(contract, call, **{side: fields})

    return mutated


def moved(call: str, path: str) -> Callable[[Contract], Contract]:
    """It is asked somewhere else."""
    return lambda contract: _call(contract, call, path=path)


async def _vllm(contract: Contract, *, token_level: bool) -> list[str]:
    nixl, habits = FakeNixl(), VllmHabits(token_level=token_level)
    servers = [FakeVllm(nixl, habits, contract) for _ in range(2)]
    for server in servers:
        server.start()
    engines = [
        VllmEngine(adapter_settings("vllm", server.url), VllmOptions(start_s=0.1, silence_s=5.0))
        for server in servers
    ]
    try:
        for engine in engines:
            await engine.start()
        work = a_work(Phase.PREFILL, sampling=ASKED, max_tokens=4, tenant="t")
        offer = await handed_over(engines[0], work)
        answer = await answer_of(engines[1], replace(work, phase=Phase.DECODE, hand_off=offer))
        assert answer == EXPECTED
        assert engines[0].counts.nothing_to_pull == 0
        assert engines[1].counts.recomputed == 0
    finally:
        for engine in engines:
            await engine.close()
        for server in servers:
            server.stop()
    return [fault for server in servers for fault in server.faults]


async def _sglang(contract: Contract) -> list[str]:
    bootstrap = FakeBootstrap()
    servers = [
        FakeSglang(bootstrap, SglangHabits(mode=mode), contract) for mode in ("prefill", "decode")
    ]
    for server in (bootstrap, *servers):
        server.start()
    engines = [
        SglangEngine(
            adapter_settings("sglang", server.url, role=role),
            SglangOptions(start_s=0.1, silence_s=5.0),
        )
        for server, role in zip(servers, (Role.PREFILL, Role.DECODE), strict=True)
    ]
    try:
        for engine in engines:
            await engine.start()
        work = a_work(Phase.PREFILL, sampling=ASKED, max_tokens=4, tenant="t")
        offers: asyncio.Queue[Any] = asyncio.Queue()
        leg = asyncio.create_task(engines[0].prefill(work, offers.put_nowait))
        decode = replace(work, phase=Phase.DECODE, hand_off=await offers.get())
        try:
            assert await answer_of(engines[1], decode) == EXPECTED
            await leg
        finally:
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)
    finally:
        for engine in engines:
            await engine.close()
        for server in (bootstrap, *servers):
            server.stop()
    return [fault for server in (bootstrap, *servers) for fault in server.faults]


async def _is_red(run: Any) -> bool:
    try:
        return bool(await run)
    except (DiptychError, AssertionError):
        return True


COMPLETIONS = [
    without("completions", "request", "return_token_ids"),
    without("completions", "request", "kv_transfer_params"),
    instead("completions", "request", "prompt", Field(str, required=True)),
    instead("completions", "request", "kv_load_policy", Field(str, required=True)),
    without("completions", "response", "choices[].token_ids"),
    without("completions", "response", "choices[].finish_reason"),
    without("completions", "response", "kv_transfer_params"),
    without("completions", "response", "choices[].logprobs.tokens"),
    without("version", "response", "version"),
    moved("completions", "/v2/completions"),
    lambda contract: replace(contract, versions=("99.0", "99.0")),
]
TOKEN_LEVEL = [
    without("generate", "request", "token_ids"),
    instead("generate", "request", "sampling_params.logit_bias", Field(dict, required=True)),
    instead("generate", "request", "sampling_params.max_tokens", Field(str, required=True)),
    without("generate", "response", "choices[].logprobs.content[].token"),
    without("generate", "response", "choices[].token_ids"),
]
LEGS = [
    without("generate", "request", "bootstrap_room"),
    instead("generate", "request", "bootstrap_room", Field(str)),
    without("generate", "request", "sampling_params.stop_token_ids"),
    instead("generate", "request", "disagg_prefill_dp_rank", Field(int, required=True)),
    without("generate", "response", "output_ids"),
    without("generate", "response", "meta_info.completion_tokens"),
    without("generate", "response", "meta_info.finish_reason"),
    without("generate", "response", "meta_info.output_token_logprobs"),
    without("server_info", "response", "disaggregation_mode"),
    moved("server_info", "/get_server_information"),
]


async def test_unchanged_contracts_are_kept() -> None:
    assert await _vllm(VLLM, token_level=False) == []
    assert await _vllm(VLLM, token_level=True) == []
    assert await _sglang(SGLANG) == []


@pytest.mark.parametrize("mutation", COMPLETIONS, ids=range(len(COMPLETIONS)))
async def test_a_changed_field_of_vllm_is_seen(mutation: Any, monkeypatch: Any) -> None:
    contract = mutation(VLLM)
    monkeypatch.setattr("diptych_engine.vllm.engine.CONTRACT", contract)
    assert await _is_red(_vllm(contract, token_level=False))


@pytest.mark.parametrize("mutation", TOKEN_LEVEL, ids=range(len(TOKEN_LEVEL)))
async def test_a_changed_field_of_vllms_tokens_is_seen(mutation: Any) -> None:
    assert await _is_red(_vllm(mutation(VLLM), token_level=True))


@pytest.mark.parametrize("mutation", LEGS, ids=range(len(LEGS)))
async def test_a_changed_field_of_sglang_is_seen(mutation: Any) -> None:
    assert await _is_red(_sglang(mutation(SGLANG)))


def test_a_leg_without_a_room_is_no_request() -> None:
    body = {"input_ids": [1], "rid": "r", "stream": True, "sampling_params": {}}
    assert list(faults(SGLANG.calls["generate"].request, body)) == [
        "missing field sampling_params.max_new_tokens"
    ]
