"""What the Triton adapter reads of a model, an error and a metrics page; without a server."""

from typing import Any

import pytest

from diptych_contracts.errors import EngineGone, Permanent, Refused
from diptych_engine.request_port import EngineStats
from diptych_engine.triton.failures import of_call, of_stream
from diptych_engine.triton.metrics import read_page
from diptych_engine.triton.served import (
    INFLIGHT_INPUTS,
    INFLIGHT_OUTPUTS,
    LLM_API_INPUTS,
    LLM_API_OUTPUTS,
    Flavour,
    Served,
    read_served,
)


def config(inputs: Any, outputs: Any, **parameters: str) -> dict[str, Any]:
    """As the server gives it."""
    return {
        "name": "m",
        "max_batch_size": 64,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": n, "data_type": f"TYPE_{k}"} for n, k in inputs.items()],
        "output": [{"name": n, "data_type": f"TYPE_{k}"} for n, k in outputs.items()],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


OUTPUTS = {**INFLIGHT_OUTPUTS, "context_phase_params": "UINT8"}


def inflight(**parameters: str) -> Served:
    return read_served(config(INFLIGHT_INPUTS, OUTPUTS, **parameters), "2.51.0")


def test_the_c_plus_plus_model_hands_over() -> None:
    served = inflight(enable_kv_cache_reuse="false")
    assert (served.flavour, served.hands_over, served.batched) == (Flavour.INFLIGHT, True, True)
    assert not served.reuses_kv
    assert "response_format" in served.unsupported


def test_kv_is_reused_unless_that_is_turned_off() -> None:
    """The engine's default, also where the template's gap was left open."""
    assert inflight().reuses_kv
    assert inflight(enable_kv_cache_reuse="${enable_kv_cache_reuse}").reuses_kv
    assert not inflight(enable_kv_cache_reuse="False").reuses_kv


def test_schemas_are_obeyed_where_the_engine_was_told_how() -> None:
    told = {"guided_decoding_backend": "xgrammar", "xgrammar_tokenizer_info_path": "/x.json"}
    assert "response_format" not in inflight(**told).unsupported
    assert "tool_choice" in inflight(**told).unsupported
    told["xgrammar_tokenizer_info_path"] = "${xgrammar_tokenizer_info_path}"
    assert "response_format" in inflight(**told).unsupported


def test_the_llm_api_s_model_only_does_both_phases() -> None:
    served = read_served(config(LLM_API_INPUTS, LLM_API_OUTPUTS), "2.51.0")
    assert (served.flavour, served.hands_over) == (Flavour.LLM_API, False)
    assert {"repetition_penalty", "ignore_eos", "min_p"} <= set(served.unsupported)


@pytest.mark.parametrize("name", ["input_lengths", "request_output_len", "streaming", "seed"])
@pytest.mark.parametrize("kind", ["INT64", None])
def test_a_changed_or_missing_input_is_named(name: str, kind: str | None) -> None:
    inputs = {**INFLIGHT_INPUTS, name: kind}
    inputs = {key: value for key, value in inputs.items() if value is not None}
    with pytest.raises(Permanent, match=f"expected input {name} of .*, got {kind or 'none'}"):
        read_served(config(inputs, OUTPUTS), "2.51.0")


@pytest.mark.parametrize("name", [*INFLIGHT_OUTPUTS])
def test_a_changed_output_is_named(name: str) -> None:
    with pytest.raises(Permanent, match=f"expected output {name} of INT32, got UINT8"):
        read_served(config(INFLIGHT_INPUTS, {**OUTPUTS, name: "UINT8"}), "2.51.0")


def test_a_model_without_the_blob_hands_nothing_over() -> None:
    served = read_served(config(INFLIGHT_INPUTS, INFLIGHT_OUTPUTS), "2.51.0")
    assert not served.hands_over


def test_a_model_that_cannot_stream_is_refused() -> None:
    told = config(INFLIGHT_INPUTS, OUTPUTS) | {"model_transaction_policy": {}}
    with pytest.raises(Permanent, match="expected decoupled: true"):
        read_served(told, "2.51.0")


def test_a_model_of_another_kind_is_refused() -> None:
    with pytest.raises(Permanent, match="expected input_ids"):
        read_served(config({"INPUT0": "FP32"}, {"OUTPUT0": "FP32"}), "2.51.0")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Request for unknown model: 'm' is not found", EngineGone),
        ("Stub process 'm_0_0' is not healthy.", EngineGone),
        ("unexpected shape for input 'end_id' for model 'm'", Permanent),
        ("Executor failed process requestId 7 due to the following error: Prompt length (9) "
         "exceeds maximum input length (8)", Permanent),
        ("Exceeds maximum queue size", Refused),
        ("Executor failed process requestId 7 due to the following error: CUDA error", Refused),
    ],
)  # fmt: skip
def test_errors_of_streams_are_told_apart_by_their_text(text: str, kind: type) -> None:
    assert type(of_stream(text)) is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("StatusCode.UNAVAILABLE", EngineGone),
        ("StatusCode.DEADLINE_EXCEEDED", EngineGone),
        ("StatusCode.RESOURCE_EXHAUSTED", Refused),
        ("StatusCode.INVALID_ARGUMENT", Permanent),
    ],
)
def test_errors_of_calls_have_a_status(code: str, kind: type) -> None:
    assert type(of_call(code, "why")) is kind


PAGE = """\
# TYPE nv_trt_llm_request_metrics gauge
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="other",request_type="scheduled",version="1"} 9
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 10
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 100
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64
nv_inference_request_success{model="m",version="1"} 100
"""


def test_the_metrics_page_says_how_full_an_engine_is() -> None:
    page = read_page(PAGE, "m")
    assert page.stats == EngineStats(running=3, waiting=2, kv_tokens_used=640)
    assert page.kv_tokens == 6400


def test_a_page_that_says_nothing_of_the_model_is_no_guess() -> None:
    page = read_page(PAGE, "another")
    assert (page.stats, page.kv_tokens) == (EngineStats(), None)
