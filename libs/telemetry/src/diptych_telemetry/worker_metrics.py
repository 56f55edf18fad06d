"""A worker's metrics under vLLM's names, label `model_name`.

So vLLM's Grafana board, the Gateway API's endpoint pickers and KEDA's samples read our workers
unmodified. Our own families of a worker stand beside them.
"""

from functools import cache

from prometheus_client import Counter, Gauge, Histogram

from diptych_telemetry.metrics import (
    DURATION_BUCKETS_S,
    FIRST_TOKEN_BUCKETS_S,
    PER_TOKEN_BUCKETS_S,
    REGISTRY,
    gauge,
    histogram,
)


class VllmMetrics:
    """The families of one model."""

    def __init__(self, model_name: str) -> None:
        families = _families()
        self.running = families.running.labels(model_name)
        self.waiting = families.waiting.labels(model_name)
        self.kv_usage_frac = families.kv_usage.labels(model_name)
        self.prompt_tokens = families.prompt_tokens.labels(model_name)
        self.generation_tokens = families.generation_tokens.labels(model_name)
        self.prefix_queries = families.prefix_queries.labels(model_name)
        self.prefix_hits = families.prefix_hits.labels(model_name)
        self.drafts = families.drafts.labels(model_name)
        self.accepted_drafts = families.accepted_drafts.labels(model_name)
        self.first_token = families.first_token.labels(model_name)
        self.inter_token = families.inter_token.labels(model_name)
        self.end_to_end = families.end_to_end.labels(model_name)
        self.queue = families.queue.labels(model_name)
        self.prefill = families.prefill.labels(model_name)
        self.decode = families.decode.labels(model_name)

    def cache_config(self, *, model_name: str, block_tokens: int, blocks: int) -> None:
        """Tell the KV cache's shape."""
        _families().cache_config.labels(model_name, str(block_tokens), str(blocks)).set(1)


class StepMetrics:
    """The engine loop, in our own names."""

    def __init__(self) -> None:
        self.duration = histogram(
            "engine_step_duration_seconds",
            "One step of the engine.",
            "phase",
            buckets=PER_TOKEN_BUCKETS_S,
        )
        self.batch_tokens = histogram(
            "engine_batch_tokens",
            "Tokens computed in one step.",
            buckets=tuple(float(2**n) for n in range(12)),
        )
        self.gone = gauge("engine_gone", "1 while the engine behind the worker does not answer.")


@cache
def vllm(model_name: str) -> VllmMetrics:
    """Families under vLLM's names, for `model_name`."""
    return VllmMetrics(model_name)


@cache
def steps() -> StepMetrics:
    """The engine loop's families."""
    return StepMetrics()


class _Families:
    def __init__(self) -> None:
        self.running = _gauge("num_requests_running", "Sequences in the engine.")
        self.waiting = _gauge("num_requests_waiting", "Jobs accepted but not started.")
        self.kv_usage = _gauge("kv_cache_usage_perc", "KV cells held, 0 to 1.")
        self.cache_config = _gauge(
            "cache_config_info", "Shape of the KV cache.", "block_size", "num_gpu_blocks"
        )
        self.prompt_tokens = _counter("prompt_tokens_total", "Prompt tokens prefilled.")
        self.generation_tokens = _counter("generation_tokens_total", "Tokens generated.")
        self.prefix_queries = _counter(
            "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
        )
        self.prefix_hits = _counter(
            "prefix_cache_hits_total", "Prompt tokens whose KV was in the prefix cache."
        )
        self.drafts = _counter(
            "spec_decode_num_draft_tokens_total", "Draft tokens looked at, where it is said."
        )
        self.accepted_drafts = _counter(
            "spec_decode_num_accepted_tokens_total", "Tokens generated that were drafted."
        )
        self.first_token = _histogram(
            "time_to_first_token_seconds", "From a job's arrival to its first token."
        )
        self.inter_token = _histogram("inter_token_latency_seconds", "Between two tokens.")
        self.end_to_end = _histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self.queue = _histogram("request_queue_time_seconds", "Waiting for the engine.")
        self.prefill = _histogram("request_prefill_time_seconds", "Prefilling.")
        self.decode = _histogram("request_decode_time_seconds", "Decoding.")


@cache
def _families() -> _Families:
    return _Families()


_BUCKETS_S = {
    "time_to_first_token_seconds": FIRST_TOKEN_BUCKETS_S,
    "inter_token_latency_seconds": PER_TOKEN_BUCKETS_S,
}


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"vllm:{name}", text, ("model_name", *labels), registry=REGISTRY)


def _counter(name: str, text: str) -> Counter:
    return Counter(f"vllm:{name}", text, ("model_name",), registry=REGISTRY)


def _histogram(name: str, text: str) -> Histogram:
    buckets = _BUCKETS_S.get(name, DURATION_BUCKETS_S)
    return Histogram(f"vllm:{name}", text, ("model_name",), registry=REGISTRY, buckets=buckets)
