"""The keywords that the engine is made with. Its models are strict: an unknown one is an error."""

from typing import Any

from diptych_contracts.fleet import Role
from diptych_engine.tensorrt_llm.options import LlmOptions
from diptych_engine.tensorrt_llm.package import Package


def llm_keywords(
    package: Package,
    options: LlmOptions,
    *,
    role: Role,
    context_tokens: int,
    max_sequences: int,
    kv_tokens: int,
) -> dict[str, Any]:
    """Everything but the model.

    Args:
        package: The engine.
        options: What the operator set.
        role: Whose engine it is.
        context_tokens: Longest prompt plus answer; the transceiver's buffer holds one.
        max_sequences: Requests that run at once.
        kv_tokens: Most tokens of KV; 0: what the GPU's memory holds.
    """
    policy = getattr(package.CapacitySchedulerPolicy, options.scheduler_policy)
    keywords: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "backend": "pytorch",
        "tensor_parallel_size": options.tensor_parallel,
        "pipeline_parallel_size": options.pipeline_parallel,
        "trust_remote_code": options.trust_remote_code,
        "kv_cache_config": package.KvCacheConfig(**_kv_fields(options, kv_tokens)),
        "cache_transceiver_config": package.CacheTransceiverConfig(
            backend=options.transceiver,
            max_tokens_in_buffer=context_tokens,
            kv_transfer_timeout_ms=options.kv_transfer_timeout_ms,
        ),
        "scheduler_config": package.SchedulerConfig(capacity_scheduler_policy=policy),
        "max_batch_size": max_sequences,
        "max_num_tokens": options.max_num_tokens,
        "max_seq_len": context_tokens,
        "max_beam_width": 1,
        "enable_chunked_prefill": True,
        "disable_overlap_scheduler": role is Role.PREFILL or not options.overlap_scheduler,
        "stream_interval": 1,
        "enable_iter_perf_stats": True,
        "enable_attention_dp": options.attention_dp,
    }
    asked = {
        "moe_expert_parallel_size": options.expert_parallel,
        "guided_decoding_backend": options.guided,
        "speculative_config": options.speculative,
    }
    return keywords | {name: value for name, value in asked.items() if value is not None}


def _kv_fields(options: LlmOptions, kv_tokens: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "enable_block_reuse": options.block_reuse,
        "free_gpu_memory_fraction": options.kv_memory_frac,
        # Zero means none at all; and without reuse the engine has none to tell.
        "event_buffer_max_size": options.event_buffer if options.block_reuse else 0,
        "dtype": options.kv_dtype,
        "tokens_per_block": options.tokens_per_block,
    }
    if kv_tokens:
        fields["max_tokens"] = kv_tokens
    if options.host_cache_bytes is not None:
        fields["host_cache_size"] = options.host_cache_bytes
    return fields
