"""SGLang's HTTP interface as far as the adapter uses it: read in 0.5.1 to 0.5.23, not run.

Until 0.5.10 `extra_key` never reaches its cache: tenants would share it, and not be told.
"""

from typing import Any

from diptych_engine.over_http.contract import OBJECT, Call, Contract, Field

Ids = list[int]

CONTRACT = Contract(
    engine="sglang",
    versions=("0.5.11", "0.5.23"),
    calls={
        "server_info": Call(
            "GET",
            "/get_server_info",
            response={
                "version": Field(str, required=True),
                "model_path": Field(str, required=True),
                "disaggregation_mode": Field(str, required=True),
                "disaggregation_bootstrap_port": Field(int),
                "disaggregation_transfer_backend": Field(str),
                "context_length": Field(int | None),
                "max_total_num_tokens": Field(int | None),
                "page_size": Field(int | None),
                "kv_cache_dtype": Field(str),
                "enable_deterministic_inference": Field(bool),
            },
        ),
        "health": Call("GET", "/health"),
        "model_info": Call("GET", "/get_model_info"),
        "health_generate": Call("GET", "/health_generate"),
        "metrics": Call("GET", "/metrics"),
        "abort_request": Call("POST", "/abort_request", request={"rid": Field(str, required=True)}),
        "generate": Call(
            "POST",
            "/generate",
            request={
                "input_ids": Field(Ids, required=True),
                "rid": Field(str, required=True),
                "stream": Field(bool, required=True),
                "bootstrap_host": Field(str),
                "bootstrap_port": Field(int),
                "bootstrap_room": Field(int),
                "return_logprob": Field(bool),
                "logprob_start_len": Field(int),
                "top_logprobs_num": Field(int),
                "extra_key": Field(str),
                "sampling_params": Field(OBJECT, required=True),
                "sampling_params.max_new_tokens": Field(int, required=True),
                "sampling_params.temperature": Field(float),
                "sampling_params.top_p": Field(float),
                "sampling_params.top_k": Field(int),
                "sampling_params.min_p": Field(float),
                "sampling_params.presence_penalty": Field(float),
                "sampling_params.frequency_penalty": Field(float),
                "sampling_params.repetition_penalty": Field(float),
                "sampling_params.sampling_seed": Field(int),
                "sampling_params.logit_bias": Field(dict[str, float]),
                "sampling_params.stop_token_ids": Field(Ids),
                "sampling_params.ignore_eos": Field(bool),
                "sampling_params.json_schema": Field(str),
            },
            response={
                "text": Field(str | None),
                "output_ids": Field(Ids, required=True),
                "meta_info": Field(OBJECT, required=True),
                "meta_info.id": Field(str, required=True),
                "meta_info.finish_reason": Field(dict[str, Any] | None, required=True),
                "meta_info.prompt_tokens": Field(int),
                "meta_info.completion_tokens": Field(int, required=True),
                "meta_info.cached_tokens": Field(int),
                "meta_info.output_token_logprobs": Field(list[list[Any]]),
                "meta_info.output_top_logprobs": Field(list[list[list[Any]] | None]),
                "meta_info.output_token_logprobs_length": Field(int),
            },
        ),
    },
)
BOOTSTRAP = Contract(
    engine="sglang bootstrap",
    versions=CONTRACT.versions,
    calls={"health": Call("GET", "/health"), "route": Call("GET", "/route")},
)
