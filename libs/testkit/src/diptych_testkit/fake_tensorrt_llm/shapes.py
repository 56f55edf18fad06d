"""The engine's data: dataclasses with slots, and pydantic models that know no other field."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class RequestError(RuntimeError):
    """One request failed; the engine goes on."""


class CppExecutorError(RuntimeError):
    """The executor has died."""


class CapacitySchedulerPolicy(Enum):
    MAX_UTILIZATION = "MAX_UTILIZATION"
    GUARANTEED_NO_EVICT = "GUARANTEED_NO_EVICT"
    STATIC_BATCH = "STATIC_BATCH"


class DisaggScheduleStyle(IntEnum):
    CONTEXT_FIRST = 0
    GENERATION_FIRST = 1


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class SchedulerConfig(StrictModel):
    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


class KvCacheConfig(StrictModel):
    enable_block_reuse: bool = True
    max_tokens: int | None = None
    free_gpu_memory_fraction: float = 0.9
    host_cache_size: int | None = None
    event_buffer_max_size: int = 0
    attention_dp_events_gather_period_ms: int = 5
    enable_partial_reuse: bool = True
    dtype: str = "auto"
    tokens_per_block: int = 32


class CacheTransceiverConfig12(StrictModel):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MPI"] | None = None
    max_tokens_in_buffer: int | None = None
    kv_transfer_timeout_ms: int | None = None


class CacheTransceiverConfig13(CacheTransceiverConfig12):
    backend: Literal["DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"] | None = None  # type: ignore[assignment]
    kv_transfer_timeout_ms: int | None = 60_000
    transceiver_runtime: Literal["CPP", "PYTHON", "auto"] | None = None
    kv_transfer_poll_interval_ms: int | None = None


class TorchLlmArgs(StrictModel):
    model: str
    skip_tokenizer_init: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    moe_expert_parallel_size: int | None = None
    trust_remote_code: bool = False
    backend: str | None = None
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)
    cache_transceiver_config: CacheTransceiverConfig12 | None = None
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    speculative_config: dict[str, Any] | None = None
    max_batch_size: int | None = 2048
    max_num_tokens: int | None = 8192
    max_seq_len: int | None = None
    max_beam_width: int | None = 1
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    stream_interval: int = 1
    enable_iter_perf_stats: bool = False
    enable_attention_dp: bool = False
    guided_decoding_backend: Literal["xgrammar", "llguidance"] | None = None


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: str | list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: object = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    exclude_input_from_output: bool = True
    return_perf_metrics: bool = False
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


_REQUEST_TYPES = ("context_only", "generation_only", "context_and_generation")


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams12:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None

    def __post_init__(self) -> None:
        if self.request_type is not None:
            self.request_type = self.request_type.lower()
            if self.request_type not in _REQUEST_TYPES:
                raise ValueError(f"Unknown request type: {self.request_type}")


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams13(DisaggregatedParams12):
    first_gen_log_probs: list[Any] | None = None
    first_gen_logits: list[Any] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: DisaggScheduleStyle | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int
    text: str = ""
    token_ids: list[int] | None = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] | None = field(default_factory=list)
    finish_reason: Literal["stop", "length", "timeout", "cancelled", "not_finished"] | None = None
    stop_reason: int | str | None = None
    disaggregated_params: Any = None
    _last: int = field(default=0, init=False, repr=False)

    @property
    def length(self) -> int:
        return len(self.token_ids or ())

    @property
    def token_ids_diff(self) -> list[int]:
        """As the vendor's: since the last response handled, not since it was looked at."""
        return (self.token_ids or [])[self._last :]
