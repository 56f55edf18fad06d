"""Open Responses, strictly: what its schema says of each event and object, and what we add."""

import json
from typing import Any

import openresponses_types

EVENT_TYPES = {
    name: getattr(openresponses_types, kind)
    for name, kind in {
        "response.created": "ResponseCreatedStreamingEvent",
        "response.in_progress": "ResponseInProgressStreamingEvent",
        "response.output_item.added": "ResponseOutputItemAddedStreamingEvent",
        "response.content_part.added": "ResponseContentPartAddedStreamingEvent",
        "response.output_text.delta": "ResponseOutputTextDeltaStreamingEvent",
        "response.output_text.done": "ResponseOutputTextDoneStreamingEvent",
        "response.content_part.done": "ResponseContentPartDoneStreamingEvent",
        "response.reasoning.delta": "ResponseReasoningDeltaStreamingEvent",
        "response.reasoning.done": "ResponseReasoningDoneStreamingEvent",
        "response.function_call_arguments.delta": (
            "ResponseFunctionCallArgumentsDeltaStreamingEvent"
        ),
        "response.function_call_arguments.done": (
            "ResponseFunctionCallArgumentsDoneStreamingEvent"
        ),
        "response.output_item.done": "ResponseOutputItemDoneStreamingEvent",
        "response.completed": "ResponseCompletedStreamingEvent",
        "response.incomplete": "ResponseIncompleteStreamingEvent",
        "response.failed": "ResponseFailedStreamingEvent",
    }.items()
}
OURS = {"usage.diptych", "response.usage.diptych", "stream_id"}
"""What we add: everything else must be known to the schema."""


def check_conformity(data: Any) -> None:
    """Raise unless `data`, an event or a response, is strictly what the schema says."""
    kind = EVENT_TYPES.get(data.get("type"))
    if data.get("type") == "error":
        by_socket = "status" in data
        kind = (
            openresponses_types.WebSocketErrorEvent
            if by_socket
            else (openresponses_types.ErrorStreamingEvent)
        )
    parsed = (kind or openresponses_types.ResponseResource).model_validate_json(
        json.dumps(data), strict=True
    )
    assert set(_unknown(data, parsed.model_dump(mode="json", by_alias=True))) <= OURS


def _unknown(data: Any, known: Any, at: str = "") -> Any:
    if isinstance(data, dict) and isinstance(known, dict):
        for key, value in data.items():
            path = f"{at}.{key}".lstrip(".")
            if key in known:
                yield from _unknown(value, known[key], path)
            else:
                yield path
    elif isinstance(data, list) and isinstance(known, list):
        for ours, theirs in zip(data, known, strict=True):
            yield from _unknown(ours, theirs, at)
