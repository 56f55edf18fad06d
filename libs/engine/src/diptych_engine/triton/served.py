"""What a served model is, read from the configuration that the server gives of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from diptych_contracts.errors import Permanent


class Flavour(StrEnum):
    """Which of TensorRT-LLM's models it is."""

    INFLIGHT = "inflight"
    """`tensorrt_llm` of `inflight_batcher_llm`: token ids."""
    LLM_API = "llm_api"
    """`tensorrt_llm` of `llmapi`: text."""


INFLIGHT_INPUTS: Mapping[str, str] = {
    "input_ids": "INT32",
    "input_lengths": "INT32",
    "request_output_len": "INT32",
    "streaming": "BOOL",
    "end_id": "INT32",
    "pad_id": "INT32",
    "temperature": "FP32",
    "runtime_top_k": "INT32",
    "runtime_top_p": "FP32",
    "seed": "UINT64",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "repetition_penalty": "FP32",
    "stop_words_list": "INT32",
    "exclude_input_in_output": "BOOL",
    "stop": "BOOL",
    "context_phase_params": "UINT8",
    "guided_decoding_guide_type": "STRING",
    "guided_decoding_guide": "STRING",
}
INFLIGHT_OUTPUTS = {"output_ids": "INT32", "sequence_length": "INT32"}
LLM_API_INPUTS: Mapping[str, str] = {
    "text_input": "STRING",
    "streaming": "BOOL",
    "sampling_param_top_k": "INT32",
    "sampling_param_max_tokens": "INT32",
    "sampling_param_temperature": "FP32",
    "sampling_param_top_p": "FP32",
    "sampling_param_frequency_penalty": "FP32",
    "sampling_param_presence_penalty": "FP32",
    "sampling_param_seed": "UINT64",
    "sampling_param_exclude_input_from_output": "BOOL",
    "return_finish_reason": "BOOL",
    "stop": "BOOL",
}
LLM_API_OUTPUTS = {"text_output": "STRING", "finish_reason": "STRING"}
_MAY_LACK = frozenset(
    ("context_phase_params", "guided_decoding_guide_type", "guided_decoding_guide", "stop")
)
_NEVER = ("logit_bias", "logprobs", "top_logprobs", "min_p", "tool_choice")
"""Its vocabulary's padded size is not told, likely tokens beside the chosen one are not given, and
nothing is like `min_p` or a grammar in Lark's form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One model of one server."""

    name: str
    flavour: Flavour
    server_version: str
    batched: bool
    """Whether tensors have a leading dimension for the batch."""
    inputs: frozenset[str]
    hands_over: bool
    """Whether its context and its generation may run in two places."""
    guided: bool
    """Whether it obeys JSON schemas."""
    reuses_kv: bool
    """Whether KV that one request left is used for another: the engine's default."""

    @property
    def unsupported(self) -> tuple[str, ...]:
        """Parameters it cannot obey, as clients spell them."""
        if self.flavour is Flavour.LLM_API:
            return (*_NEVER, "response_format", "repetition_penalty", "ignore_eos")
        return _NEVER if self.guided else (*_NEVER, "response_format")


def read_served(config: Mapping[str, Any], server_version: str) -> Served:
    """What the configuration (as JSON, of `get_model_config`) says.

    Raises:
        Permanent: it is no such model, or one that cannot stream; says what was expected.
    """
    name = config["name"]
    inputs, outputs = _tensors(config, "input"), _tensors(config, "output")
    if "input_ids" in inputs:
        flavour = Flavour.INFLIGHT
        _check(name, "input", inputs, INFLIGHT_INPUTS)
        _check(name, "output", outputs, INFLIGHT_OUTPUTS)
    elif "text_input" in inputs and "sampling_param_max_tokens" in inputs:
        flavour = Flavour.LLM_API
        _check(name, "input", inputs, LLM_API_INPUTS)
        _check(name, "output", outputs, LLM_API_OUTPUTS)
    else:
        raise Permanent(
            f"model {name!r} is none that is known: expected input_ids (TensorRT-LLM's C++ "
            f"backend) or text_input and sampling_param_max_tokens (its LLM API), got inputs "
            f"{', '.join(sorted(inputs))}"
        )
    if not config.get("model_transaction_policy", {}).get("decoupled", False):
        raise Permanent(f"model {name!r} cannot stream: expected decoupled: true in its config")
    told = {key: value.get("string_value", "") for key, value in _parameters(config).items()}
    both = inputs.get("context_phase_params"), outputs.get("context_phase_params")
    return Served(
        name=name,
        flavour=flavour,
        server_version=server_version,
        batched=int(config.get("max_batch_size", 0)) > 0,
        inputs=frozenset(inputs),
        hands_over=flavour is Flavour.INFLIGHT and both == ("UINT8", "UINT8"),
        guided=_is_set(told, "guided_decoding_backend")
        and _is_set(told, "xgrammar_tokenizer_info_path")
        and "guided_decoding_guide" in inputs,
        reuses_kv=told.get("enable_kv_cache_reuse", "").lower() not in ("false", "0"),
    )


def _tensors(config: Mapping[str, Any], side: str) -> dict[str, str]:
    tensors = config.get(side, ())
    return {t.get("name", ""): t.get("data_type", "").removeprefix("TYPE_") for t in tensors}


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]]:
    found: Mapping[str, Mapping[str, str]] = config.get("parameters", {})
    return found


def _is_set(told: Mapping[str, str], key: str) -> bool:
    """Whether a parameter has a value, and not the gap of the template it was made from."""
    value = told.get(key, "")
    return bool(value) and not value.startswith("${")


def _check(name: str, side: str, got: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for tensor, kind in expected.items():
        if tensor not in got and tensor in _MAY_LACK:
            continue
        if got.get(tensor) != kind:
            raise Permanent(
                f"model {name!r}: expected {side} {tensor} of {kind}, got {got.get(tensor, 'none')}"
            )
