"""vLLM's HTTP interface as far as the adapter uses it (`docs/engines/vllm.md`)."""

from typing import Any

from diptych_engine.over_http.contract import OBJECT, OBJECTS, Call, Contract, Field

Ids = list[int]
_SAMPLING = {
    "temperature": Field(float),
    "top_p": Field(float),
    "top_k": Field(int),
    "min_p": Field(float),
    "seed": Field(int),
    "presence_penalty": Field(float),
    "frequency_penalty": Field(float),
    "repetition_penalty": Field(float),
    "logit_bias": Field(dict[str, float]),
    "logprobs": Field(int),
    "max_tokens": Field(int, required=True),
    "min_tokens": Field(int),
    "ignore_eos": Field(bool),
    "stop_token_ids": Field(Ids),
    "structured_outputs": Field(OBJECT),
    "structured_outputs.json": Field(str | dict[str, Any]),
    "structured_outputs.grammar": Field(str),
}
_STREAMED = {
    "stream": Field(bool, required=True),
    "stream_options": Field(OBJECT),
    "stream_options.include_usage": Field(bool),
    "cache_salt": Field(str),
    "kv_transfer_params": Field(dict[str, Any]),
    "model": Field(str, required=True),
}
_USAGE = {
    "usage": Field(OBJECT),
    "usage.prompt_tokens": Field(int),
    "usage.completion_tokens": Field(int),
    "usage.total_tokens": Field(int),
    "usage.prompt_tokens_details": Field(OBJECT),
    "usage.prompt_tokens_details.cached_tokens": Field(int),
}
_CHOICE = {
    "choices": Field(OBJECTS, required=True),
    "choices[].index": Field(int, required=True),
    "choices[].token_ids": Field(Ids, required=True),
    "choices[].finish_reason": Field(str | None, required=True),
    "choices[].stop_reason": Field(int | str | None),
}
_COMPLETION_LOGPROBS = {
    "choices[].logprobs": Field(OBJECT),
    "choices[].logprobs.tokens": Field(list[str]),
    "choices[].logprobs.token_logprobs": Field(list[float | None]),
    "choices[].logprobs.top_logprobs": Field(list[dict[str, float] | None]),
    "choices[].logprobs.text_offset": Field(Ids),
}
_TOKEN_LOGPROBS = {
    "choices[].logprobs": Field(OBJECT),
    "choices[].logprobs.content": Field(OBJECTS),
    "choices[].logprobs.content[].token": Field(str),
    "choices[].logprobs.content[].logprob": Field(float),
    "choices[].logprobs.content[].top_logprobs": Field(OBJECTS),
    "choices[].logprobs.content[].top_logprobs[].token": Field(str),
    "choices[].logprobs.content[].top_logprobs[].logprob": Field(float),
}

CONTRACT = Contract(
    engine="vllm",
    versions=("0.11.0", "0.33.0"),
    calls={
        "version": Call("GET", "/version", response={"version": Field(str, required=True)}),
        "health": Call("GET", "/health"),
        "metrics": Call("GET", "/metrics"),
        "models": Call(
            "GET",
            "/v1/models",
            response={
                "data": Field(OBJECTS, required=True),
                "data[].id": Field(str, required=True),
                "data[].root": Field(str, required=True),
                "data[].max_model_len": Field(int, required=True),
            },
        ),
        "completions": Call(
            "POST",
            "/v1/completions",
            request={
                "prompt": Field(Ids, required=True),
                "return_token_ids": Field(bool, required=True),
                "return_tokens_as_token_ids": Field(bool),
                **_SAMPLING,
                **_STREAMED,
            },
            response={
                "id": Field(str, required=True),
                "kv_transfer_params": Field(dict[str, Any] | None),
                "choices[].text": Field(str),
                "choices[].prompt_token_ids": Field(Ids | None),
                **_CHOICE,
                **_COMPLETION_LOGPROBS,
                **_USAGE,
            },
        ),
        "generate": Call(
            "POST",
            "/inference/v1/generate",
            # Until 0.19 it does not stream, until 0.28 it drops `kv_transfer_params`, until 0.29 it
            # swallows an end without tokens.
            since="0.30.0",
            request={
                "token_ids": Field(Ids, required=True),
                "request_id": Field(str),
                "sampling_params": Field(OBJECT, required=True),
                **{f"sampling_params.{name}": field for name, field in _SAMPLING.items()},
                **_STREAMED,
            },
            response={
                "request_id": Field(str, required=True),
                "kv_transfer_params": Field(dict[str, Any] | None),
                **_CHOICE,
                **_TOKEN_LOGPROBS,
                **_USAGE,
            },
        ),
    },
)
