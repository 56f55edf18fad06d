"""What crosses between us and `trtllm-serve`: only what we read, since servers add fields."""

from collections.abc import Mapping
from typing import Any

import msgspec

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_engine.over_http.reading import from_json
from diptych_engine.port import SequenceWork
from diptych_engine.tensorrt_llm.asking import sampling_fields, tokens_of
from diptych_engine.tensorrt_llm.cursors import BROKEN


class CachedTokens(msgspec.Struct, frozen=True):
    """Part of `Usage`."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    """How many tokens so far."""

    completion_tokens: int | None = None
    prompt_tokens_details: CachedTokens | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice, whole or a part."""

    token_ids: list[int] | None = None
    finish_reason: str | None = None
    disaggregated_params: dict[str, Any] | None = None


class Completion(msgspec.Struct, frozen=True):
    """An answer, or a part of a streamed one. Errors come in its place, after status 200 too."""

    choices: list[Choice] = []
    usage: Usage | None = None
    object: str = ""
    message: str = ""
    error: Any = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens whose KV the engine had."""
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens if details else None

    @property
    def failure(self) -> str | None:
        """What went wrong, if it did."""
        if self.object == "error" or self.error is not None:
            return f"{self.message or self.error}"[:300]
        return None


def body_of(
    work: SequenceWork,
    *,
    model: str,
    eos_ids: tuple[int, ...],
    params: Mapping[str, Any] | None,
    stream: bool,
) -> dict[str, Any]:
    """The request's body. The server knows the model's own end; it takes no `end_id`."""
    fields = sampling_fields(work, eos_ids)
    for name in ("end_id", "pad_id", "exclude_input_from_output"):
        del fields[name]
    body: dict[str, Any] = {"model": model, "prompt": tokens_of(work), "stream": stream, **fields}
    if stream:  # the count in each part says where its tokens belong
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if work.sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in work.sampling.logit_bias}
    if (grammar := work.sampling.grammar) is not None:
        body["response_format"] = {"type": "json", "schema": _schema(grammar.text)}
    if params is not None:
        body["disaggregated_params"] = dict(params)
    return body


def _schema(text: str) -> msgspec.Raw:
    """The schema, as it was written. Raises `Permanent` if the server cannot take it."""
    try:
        from_json(text, dict[str, msgspec.Raw])
    except msgspec.DecodeError as err:
        raise Permanent(f"grammar: TensorRT-LLM takes schemas that are objects: {err}") from err
    return msgspec.Raw(text.encode())


def read(data: bytes | str) -> Completion:
    """A body. Raises `Refused` if it is none."""
    try:
        told: Completion = from_json(data, Completion)
    except msgspec.DecodeError as err:
        raise Refused(BROKEN, f"trtllm-serve answers what is no completion: {err}") from err
    return told


def failure_of(status: int, data: bytes) -> DiptychError:
    """What a status other than 200 means.

    The server answers 400 to whatever an engine says against a request, a failed transfer too. Only
    a body that its schema refuses, which has another form, is the request's own fault.
    """
    try:
        told: Completion = from_json(data, Completion)
        says = told.failure or ""
        by_schema = told.object != "error" and told.error is not None
    except msgspec.DecodeError:
        says, by_schema = data[:200].decode(errors="replace"), False
    text = f"trtllm-serve answers {status}: {says}"
    if status == 422 or (status == 400 and by_schema):
        return Permanent(text)
    if status == 503:
        return EngineGone(text)
    return Refused(BROKEN, text)
