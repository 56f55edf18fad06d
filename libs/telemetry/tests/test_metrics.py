import re

from prometheus_client.parser import text_string_to_metric_families

from diptych_telemetry import metrics, worker_metrics


def families() -> dict[str, str]:
    text = metrics.render().decode()
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def everything() -> None:
    for room in (metrics.process, metrics.gateway, metrics.scheduler, metrics.transfers):
        room()
    metrics.power()
    worker_metrics.steps()
    worker_metrics.vllm("m").cache_config(model_name="m", block_tokens=64, blocks=128)


def test_asking_twice_gives_the_same_families() -> None:
    assert metrics.gateway() is metrics.gateway()
    assert worker_metrics.vllm("m") is worker_metrics.vllm("m")
    assert worker_metrics.vllm("m").running is worker_metrics.vllm("m").running


def test_a_worker_speaks_vllm() -> None:
    worker_metrics.vllm("smollm2-135m").running.set(3)
    worker_metrics.vllm("smollm2-135m").kv_usage_frac.set(0.25)
    worker_metrics.vllm("smollm2-135m").first_token.observe(0.03)
    worker_metrics.vllm("smollm2-135m").prompt_tokens.inc(7)
    text = metrics.render().decode()
    for line in (
        'vllm:num_requests_running{model_name="smollm2-135m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="smollm2-135m"} 0.25',
        'vllm:time_to_first_token_seconds_bucket{le="0.04",model_name="smollm2-135m"} 1.0',
        'vllm:prompt_tokens_total{model_name="smollm2-135m"} 7.0',
    ):
        assert line in text


def test_what_is_measured_parses_and_names_its_unit() -> None:
    everything()
    ours = {name: kind for name, kind in families().items() if name.startswith("diptych_")}
    assert len(ours) > 20
    for name, kind in ours.items():
        if kind == "histogram":
            assert re.search(r"(_seconds|_bytes|_tokens)$", name), name


def test_no_label_could_hold_a_request_id() -> None:
    everything()
    labels = {
        label
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        for label in sample.labels
    }
    assert not {label for label in labels if "request" in label or label.endswith("_id")}
