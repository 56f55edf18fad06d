"""What the gateway's spans say of a request and its answer; what was written only if so set."""

import msgspec
from opentelemetry.trace import Span

from diptych_contracts.requests import Request
from diptych_gateway.answering.streams import AnswerStream
from diptych_gateway.judging.checking import Call
from diptych_telemetry import names

LEFT = "cancelled"
UNFINISHED = "failed"
_MAX_CONTENT_CHARS = 65_536


def describe_request(span: Span, request: Request, call: Call) -> None:
    """Set the attributes of an accepted request."""
    sampling = request.sampling
    span.set_attributes(
        {
            names.REQUEST_ID: request.request_id,
            names.TENANT: request.tenant,
            names.OPERATION: names.OPERATION_CHAT,
            names.PROVIDER: names.PROVIDER_NAME,
            names.REQUEST_MODEL: request.model,
            names.REQUEST_MAX_TOKENS: request.stopping.max_tokens,
            names.REQUEST_TEMPERATURE: sampling.temperature,
            names.REQUEST_TOP_P: sampling.top_p,
            names.REQUEST_TOP_K: sampling.top_k,
            names.INPUT_TOKENS: request.prompt_tokens,
        }
    )
    if call.seeded:
        span.set_attribute(names.REQUEST_SEED, sampling.seed)


def describe_prompt(span: Span, call: Call) -> None:
    """Set what was written: an operator has asked for it."""
    said = [
        {"role": message["role"], "parts": [{"type": "text", "content": message["content"]}]}
        for message in call.messages
    ]
    content = msgspec.json.encode(said).decode()[:_MAX_CONTENT_CHARS]
    span.set_attribute(names.INPUT_MESSAGES, content)


def describe_answer(span: Span, stream: AnswerStream, answer_id: str) -> None:
    """Set the attributes of an answer that is over; `answer_id` is what clients call it."""
    reason = end_reason(stream)
    span.set_attributes(
        {
            names.REQUEST_ID: stream.request.request_id,
            names.OPERATION: names.OPERATION_CHAT,
            names.PROVIDER: names.PROVIDER_NAME,
            names.RESPONSE_ID: answer_id,
            names.RESPONSE_MODEL: stream.request.model,
            names.RESPONSE_FINISH_REASONS: [reason],
            names.OUTPUT_TOKENS: stream.tokens,
            names.ATTEMPT: stream.attempt,
            names.END_REASON: reason,
        }
    )
    if stream.end is None or not stream.end.reason.is_finish:
        span.set_attribute(names.ERROR_TYPE, reason)


def end_reason(stream: AnswerStream) -> str:
    """How it ended, as far as this gateway knows."""
    if stream.end is not None:
        return stream.end.reason.value
    if stream.failure is not None:
        return stream.failure.code or UNFINISHED
    return LEFT if stream.gone else UNFINISHED
