"""What an operator may set for TensorRT-LLM, in the file that `ENGINE_OPTIONS` names."""

from typing import Any, Literal

import msgspec

from diptych_engine.over_http.limits import Count, Fraction, Millis, Pause, Seconds, Size


class KvOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both forms are told of KV."""

    kv_transfer_timeout_ms: Millis = 60_000
    """After so long prefill frees KV that nobody fetched."""
    kv_dtype: str = "auto"
    """Of the KV cache: equal on both sides."""
    tokens_per_block: Count = 32
    machine_id: int | None = None
    """Of this worker in the ids of hand-offs: unique in the fleet. None draws one."""


class LlmOptions(KvOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine inside the worker."""

    checkpoint: str = ""
    """Folder or name of the weights; empty: the worker's `MODEL_PATH`. Prefill and decode may have
    it in different precisions (NVFP4, FP8): only what follows here about KV must be equal."""
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count | None = None
    attention_dp: bool = False
    max_num_tokens: Count = 8192
    """Most tokens in one step; prompts are computed in chunks of at most so many."""
    transceiver: Literal["DEFAULT", "UCX", "NIXL"] = "NIXL"
    """What carries KV between engines. `MPI` would need both in one world."""
    kv_memory_frac: Fraction = 0.9
    """Of the GPU memory that is free after the weights."""
    host_cache_bytes: Size | None = None
    block_reuse: bool = True
    event_buffer: Size = 4096
    """KV events kept for us; 0: none are told, and routing does not know this worker's cache."""
    guided: Literal["xgrammar", "llguidance"] | None = None
    """What follows JSON schemas; none: requests with one are refused."""
    scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    overlap_scheduler: bool = True
    """Off on prefill workers in any case: the vendor does not support it there."""
    speculative: dict[str, Any] | None = None
    """The engine's `speculative_config`, by its own words."""
    trust_remote_code: bool = False
    start_s: Pause = 1800.0
    """Deadline of loading the weights."""
    abort_s: Seconds = 30.0
    """Deadline of an abort; after it the engine counts as dead."""
    probe_s: Seconds = 60.0
    """Deadline of the token that a health probe asks for."""


class ServeOptions(KvOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine behind `trtllm-serve`. What it was started with is said here again."""

    block_reuse: bool = False
    """Whether the server keeps KV of prompts. Its completions know no salt, so tenants would share
    it: with it on, the server answers one tenant only, the first that comes."""
    events: bool = False
    """Whether this worker reads its KV events: nobody else may, reading takes them away."""
    guided: bool = False
    """Whether the server was started with a `guided_decoding_backend`."""
    start_s: Pause = 1800.0
    """How long to wait for the server, which loads weights for minutes."""
    connect_s: Seconds = 5.0
    stall_s: Seconds = 120.0
    """Longest silence of a stream, the first token's included."""
    poll_s: Seconds = 1.0
    """Pause between two readings of its KV events."""
