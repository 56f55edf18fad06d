"""The contract with TensorRT-LLM: held by the fake, kept by the adapter, and each mutation seen."""

import dataclasses
import tomllib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from pydantic import create_model

from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Role
from diptych_contracts.handoffs import EngineHandOff
from diptych_contracts.sampling import Grammar, Sampling
from diptych_engine.port import Phase
from diptych_engine.tensorrt_llm.checking import check
from diptych_engine.tensorrt_llm.contract import (
    Contract,
    contract_text,
    shipped_contract,
)
from diptych_engine.tensorrt_llm.package import load_package
from diptych_engine.tensorrt_llm.versions import Version, in_range
from diptych_testkit import fake_tensorrt_llm as fake
from diptych_testkit.fake_tensorrt_llm.installed import Installed
from diptych_testkit.recording_engine import RecordingEngine
from diptych_testkit.request_engines import trtllm, work

VERSIONS = ("1.2.1", "1.3.0rc29", "1.3.0")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fake_keeps_to_the_contract(version: str) -> None:
    assert check(shipped_contract(), version, fake.at(version).importer) == []


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_adapter_uses_nothing_but_the_contract(version: str) -> None:
    installed = fake.at(version)
    recording = RecordingEngine(installed.importer)
    await _use_all(recording.importer)
    assert recording.names.beyond(shipped_contract(), Version.of(version)) == []
    used = recording.names.used
    assert {"context_only", "temperature"} & used["SamplingParams"] == {"temperature"}
    assert {"abort", "aresult", "outputs", "finished", "__anext__"} <= used["RequestOutput"]
    assert "generate_async(disaggregated_params)" in used["LLM"]
    assert installed.world.misuse == []


async def _use_all(importer: Any) -> None:
    """Everything that the adapter does with an engine."""
    options = {"guided": "xgrammar", "host_cache_bytes": 1 << 30, "expert_parallel": 2}
    prefill = trtllm(importer, Role.PREFILL, tokens_per_block=4, **options)
    decode = trtllm(importer, Role.DECODE, tokens_per_block=4, **options)
    for engine in (prefill, decode):
        await engine.start()
    sampling = Sampling(
        temperature=0.7,
        min_p=0.01,
        seed=7,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        top_logprobs=2,
        grammar=Grammar(kind="json_schema", text="{}"),
    )
    offers: list[EngineHandOff] = []
    prompt = list(range(1, 14))
    asked = work(prompt, phase=Phase.PREFILL, sampling=sampling, tenant="acme")
    first = await prefill.prefill(asked, offers.append)
    asked = work(
        prompt,
        phase=Phase.DECODE,
        answer_ids=first.token_ids,
        sampling=sampling,
        tenant="acme",
        hand_off=offers[0],
    )
    async for _ in decode.generate(asked):
        pass
    closed = decode.generate(work(prompt, max_tokens=50))
    await anext(closed)
    await closed.aclose()
    await prefill.stats()
    events = prefill.kv_events()
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    for engine in (prefill, decode):
        await engine.health()
        await engine.close()


def _renamed(cls: str, old: str, new: str) -> Callable[[Installed], None]:
    def change(installed: Installed) -> None:
        found = installed.names[cls]
        fields = {
            (new if field.name == old else field.name): field
            for field in dataclasses.fields(found)
            if field.init
        }
        installed.names[cls] = _dataclass(cls, fields)

    return change


def _retyped(cls: str, name: str, kind: Any) -> Callable[[Installed], None]:
    def change(installed: Installed) -> None:
        fields = {f.name: f for f in dataclasses.fields(installed.names[cls]) if f.init}
        made = _dataclass(cls, fields)
        made.__annotations__[name] = kind
        made.__dataclass_fields__[name].type = kind
        installed.names[cls] = made

    return change


def _dataclass(cls: str, fields: dict[str, Any]) -> Any:
    told = [
        (
            name,
            field.type,
            dataclasses.field(default=field.default)
            if field.default is not dataclasses.MISSING
            else dataclasses.field(default_factory=field.default_factory)
            if field.default_factory is not dataclasses.MISSING
            else dataclasses.field(),
        )
        for name, field in fields.items()
    ]
    return dataclasses.make_dataclass(cls, told, kw_only=True)


def _dropped_model_field(cls: str, name: str) -> Callable[[Installed], None]:
    def change(installed: Installed) -> None:
        found = installed.names[cls]
        fields = {
            key: (field.annotation, field)
            for key, field in found.model_fields.items()
            if key != name
        }
        installed.names[cls] = create_model(cls, **fields)

    return change


def _method(name: str, made: Any) -> Callable[[Installed], None]:
    def change(installed: Installed) -> None:
        installed.names["LLM"] = type("LLM", (installed.names["LLM"],), {name: made})

    return change


def _generate_without_salt(
    self: Any,
    inputs: list[int],
    sampling_params: Any = None,
    streaming: bool = False,
    disaggregated_params: Any = None,
) -> Any: ...


def _generate_with_prompt(
    self: Any,
    prompt: list[int],
    sampling_params: Any = None,
    streaming: bool = False,
    disaggregated_params: Any = None,
    cache_salt: str | None = None,
) -> Any: ...


def _generate_streaming(
    self: Any,
    inputs: list[int],
    sampling_params: Any = None,
    streaming: bool = True,
    disaggregated_params: Any = None,
    cache_salt: str | None = None,
) -> Any: ...


ENGINE_CHANGES: dict[str, tuple[Callable[[Installed], None], str]] = {
    "a field of the hand-off renamed": (
        _renamed("DisaggregatedParams", "opaque_state", "state"),
        "DisaggregatedParams.opaque_state",
    ),
    "a field of the hand-off retyped": (
        _retyped("DisaggregatedParams", "opaque_state", str | None),
        "DisaggregatedParams.opaque_state",
    ),
    "the id of both legs retyped": (
        _retyped("DisaggregatedParams", "ctx_request_id", str | None),
        "DisaggregatedParams.ctx_request_id",
    ),
    "a sampling parameter renamed": (
        _renamed("SamplingParams", "max_tokens", "max_new_tokens"),
        "SamplingParams.max_tokens",
    ),
    "outputs renamed": (
        _renamed("CompletionOutput", "token_ids", "ids"),
        "CompletionOutput.token_ids",
    ),
    "a logprob renamed": (_renamed("Logprob", "logprob", "value"), "Logprob.logprob"),
    "no events of the cache": (
        _dropped_model_field("KvCacheConfig", "event_buffer_max_size"),
        "KvCacheConfig.event_buffer_max_size",
    ),
    "no time-out of a transfer": (
        _dropped_model_field("CacheTransceiverConfig", "kv_transfer_timeout_ms"),
        "CacheTransceiverConfig.kv_transfer_timeout_ms",
    ),
    "no chunked prefill": (
        _dropped_model_field("TorchLlmArgs", "enable_chunked_prefill"),
        "TorchLlmArgs.enable_chunked_prefill",
    ),
    "a parameter dropped": (
        _method("generate_async", _generate_without_salt),
        "LLM.generate_async(cache_salt)",
    ),
    "the prompt renamed": (
        _method("generate_async", _generate_with_prompt),
        "LLM.generate_async(inputs)",
    ),
    "another default": (
        _method("generate_async", _generate_streaming),
        "LLM.generate_async(streaming)",
    ),
    "a method dropped": (_method("get_stats_async", None), "LLM.get_stats_async"),
    "a class dropped": (lambda installed: installed.names.pop("RequestError"), "RequestError"),
}


@pytest.mark.parametrize("change", ENGINE_CHANGES)
@pytest.mark.parametrize("version", ["1.2.1", "1.3.0"])
def test_an_engine_that_differs_is_seen(change: str, version: str) -> None:
    installed = fake.at(version)
    mutate, where = ENGINE_CHANGES[change]
    mutate(installed)
    problems = check(shipped_contract(), version, installed.importer)
    assert [problem.where for problem in problems] == [where]


CONTRACT_CHANGES: dict[str, tuple[str, str]] = {
    "first_gen_tokens": ("first_gen_tokens = {", "first_tokens = {"),
    "end_id": ('end_id = { kind = "int"', 'end_id = { kind = "bytes"'),
    "the transceiver's values": ('"DEFAULT", "UCX", "NIXL"', '"default", "UCX", "NIXL"'),
    "request types": ('"context_only", "generation_only"', '"prefill", "generation_only"'),
    "a default": ("default = 0 }\ndtype", "default = 64 }\ndtype"),
    "finish reasons": ('"stop", "length", "timeout"', '"eos", "length", "timeout"'),
    "a method": ("LLM.methods.shutdown.", "LLM.methods.stop."),
    "a path": ("tensorrt_llm.executor.result:Logprob", "tensorrt_llm.executor.result:LogProb"),
    "a place": ('inputs = { kind = "list", place = 0', 'inputs = { kind = "list", place = 1'),
    "the versions": ('">=1.2,<1.4"', '">=1.4,<1.5"'),
    "a member": ('"GUARANTEED_NO_EVICT", "MAX', '"NO_EVICT", "MAX'),
    "an attribute": ('["outputs", "finished"]', '["outputs", "done"]'),
}  # fmt: skip


@pytest.mark.parametrize("change", CONTRACT_CHANGES)
def test_a_contract_that_differs_is_seen(change: str) -> None:
    old, new = CONTRACT_CHANGES[change]
    assert contract_text().count(old) == 1
    changed = msgspec.convert(tomllib.loads(contract_text().replace(old, new)), Contract)
    assert len(check(changed, "1.3.0", fake.at("1.3.0").importer)) == 1


USED_FIELDS = [
    ("SamplingParams", "end_id"),
    ("SamplingParams", "seed"),
    ("KvCacheConfig", "event_buffer_max_size"),
    ("CacheTransceiverConfig", "kv_transfer_timeout_ms"),
    ("TorchLlmArgs", "disable_overlap_scheduler"),
    ("DisaggregatedParams", "disagg_request_id"),
    ("CompletionOutput", "finish_reason"),
    ("GuidedDecodingParams", "json"),
]


@pytest.mark.parametrize(("owner", "name"), USED_FIELDS)
async def test_a_use_beyond_the_contract_is_seen(owner: str, name: str) -> None:
    """As if the adapter had begun to use a name that the contract does not have."""
    told = tomllib.loads(contract_text())
    del told["classes"][owner]["fields"][name]
    smaller = msgspec.convert(told, Contract)
    recording = RecordingEngine(fake.at("1.3.0").importer)
    await _use_all(recording.importer)
    assert recording.names.beyond(smaller, Version.of("1.3.0")) == [f"{owner}.{name}"]


def test_a_worker_does_not_start_on_an_engine_that_differs() -> None:
    installed = fake.at("1.3.0")
    ENGINE_CHANGES["a sampling parameter renamed"][0](installed)
    with pytest.raises(
        Permanent,
        match=r"TensorRT-LLM 1\.3\.0 is not what this adapter is written for .*"
        r"SamplingParams\.max_tokens: expected a field, got none of that name",
    ):
        load_package(installed.importer)


@pytest.mark.parametrize("version", ["1.1.0", "1.4.0rc4", "2.0", "odd"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    installed = fake.at("1.3.0")
    installed.version = version
    with pytest.raises(Permanent, match=version):
        load_package(installed.importer)


def test_no_engine_is_told_with_what_to_do() -> None:
    def importer(name: str, /) -> Any:
        raise OSError("libcuda.so.1: cannot open shared object file")

    with pytest.raises(Permanent, match=r"libcuda.*its own image or venv"):
        load_package(importer)


def test_features_are_found_by_looking() -> None:
    old = load_package(fake.at("1.2.1").importer)[1]
    new = load_package(fake.at("1.3.0").importer)[1]
    assert (old.disagg_request_id, old.health_check, old.process_ids) == (False, False, False)
    assert (new.disagg_request_id, new.health_check, new.process_ids) == (True, True, True)
    assert "one request id on both legs: yes, bits: node 8, process 6, counter 10" in new.report()


@pytest.mark.parametrize(
    ("version", "inside"),
    [("1.2.0", True), ("1.2.0rc1", True), ("1.3.0rc29", True), ("1.4.0rc1", False), ("1.1", False)],
)
def test_ranges(version: str, inside: bool) -> None:
    assert in_range(Version.of(version), ">=1.2,<1.4") is inside


def test_the_installed_engine_keeps_to_the_contract() -> None:
    """What keeps the fake honest: runs where TensorRT-LLM is, which is on GPU machines only."""
    try:
        import tensorrt_llm  # type: ignore[import-not-found]
    except (ImportError, OSError, RuntimeError) as err:  # its libraries want CUDA at import
        pytest.skip(f"TensorRT-LLM is not here: {err}")
    problems = check(shipped_contract(), tensorrt_llm.__version__)
    assert [str(problem) for problem in problems if problem.fatal] == []
