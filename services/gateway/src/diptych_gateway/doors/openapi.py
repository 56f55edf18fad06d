"""`/openapi.json`: made from `endpoints` and the types it names, once."""

from functools import cache
from http import HTTPStatus
from re import findall, sub
from typing import Any

import msgspec

from diptych_gateway.doors.endpoints import ALWAYS, ENDPOINTS, TAGS, Endpoint
from diptych_gateway.doors.schemas import components, ref
from diptych_gateway.errors import ErrorBody

Json = dict[str, Any]

_ABOUT = """\
OpenAI's API, served by prefill and decode workers apart. Every answer has an `x-request-id`; every
refusal is one error object, with `Retry-After` where it makes sense to ask again.

**Streams.** With `"stream": true` the answer is server-sent events. Chat sends one chunk object per
event and then `[DONE]`; Responses send numbered events and then `[DONE]`. An error after the first
byte is one event with an `error`, and the end.

**WebSockets.** `GET /v1/responses` with an upgrade is the Responses API's WebSocket mode: frames
`{"type": "response.create", ...}` with the fields of the body, answered by the same events as over
SSE, one per text frame. `GET /v1/chat/completions` with an upgrade takes the body of a chat
completion per text frame, and answers with what `data:` holds over SSE, one per text frame, up to
`[DONE]`. Errors are frames `{"type": "error", "status", "error"}`, and the socket stays open."""

_SOCKET = """

Also a WebSocket (`GET` with an upgrade): one such object per text frame, `stream` implied."""
_SAYS = {
    400: "The request is wrong: `param` names where, `message` says what was expected and seen.",
    401: "No API key, or one that is not known.",
    403: "The API key may not do this.",
    404: "There is no such model, answer or path.",
    408: "The head or the body of the request took too long.",
    409: "Another request has the idempotency key, or the response before it still runs.",
    410: "What was asked for has expired.",
    413: "The body is too large.",
    415: "The body is not JSON in UTF-8, or it is compressed.",
    429: "Too many requests, or a queue is full: `Retry-After` says when to come back.",
    431: "The head of the request is too large.",
    500: "The request failed.",
    503: "It is not served at the moment: `Retry-After` says when to come back.",
    504: "A deadline passed.",
}


@cache
def document() -> bytes:
    """The document as JSON."""
    return msgspec.json.encode(described())


@cache
def described() -> Json:
    """The document."""
    kinds = [kind for endpoint in ENDPOINTS for kind in _kinds(endpoint)]
    paths: dict[str, Json] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Diptych",
            "version": "1.0.0",
            "description": _ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"key": []}],
        "tags": [{"name": name, "description": says} for name, says in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": components([*kinds, ErrorBody]),
            "responses": {f"Refused{status}": _refusal(status) for status in _SAYS},
            "headers": {
                "RequestId": {
                    "description": "Names the request, in logs and traces too.",
                    "schema": {"type": "string"},
                },
                "RetryAfter": {
                    "description": "Seconds after which to ask again.",
                    "schema": {"type": "integer"},
                },
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _kinds(endpoint: Endpoint) -> list[type[msgspec.Struct]]:
    events = endpoint.events if isinstance(endpoint.events, type) else None
    found = (endpoint.body, endpoint.answer, events, endpoint.unready)
    return [kind for kind in found if kind is not None]


def _operation(endpoint: Endpoint) -> Json:
    operation: Json = {
        "operationId": _name(endpoint),
        "tags": [endpoint.tag],
        "summary": endpoint.says,
        "description": endpoint.says + (_SOCKET if endpoint.socket else ""),
        "responses": _responses(endpoint),
    }
    parameters = [_in_path(name) for name in findall(r"{(\w+)}", endpoint.path)]
    parameters += [
        {"name": q.name, "in": "query", "description": q.says, "schema": q.schema}
        for q in endpoint.query
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(endpoint.body)}
    if endpoint.form is not None:
        content = {"multipart/form-data": {"schema": endpoint.form}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _name(endpoint: Endpoint) -> str:
    words = sub(r"\W+", " ", f"{endpoint.method.lower()} {endpoint.path}").split()
    return words[0] + "".join(word.title().replace("_", "") for word in words[1:])


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _responses(endpoint: Endpoint) -> Json:
    responses: Json = {}
    if content := _content(endpoint):
        responses["200"] = {
            "description": "As asked.",
            "headers": {"x-request-id": {"$ref": "#/components/headers/RequestId"}},
            "content": content,
        }
        if links := _links(endpoint):
            responses["200"]["links"] = links
    for status in sorted({*ALWAYS, *endpoint.refusals}):
        responses[str(status)] = {"$ref": f"#/components/responses/Refused{status}"}
    if endpoint.unready is not None:
        responses["503"] = {"description": "Not ready.", "content": _json(endpoint.unready)}
    return responses


def _links(endpoint: Endpoint) -> Json:
    """What can be done with the answer of a `POST`, by its id."""
    if endpoint.method != "POST":
        return {}
    return {
        _name(other): {"operationId": _name(other), "parameters": {names[0]: "$response.body#/id"}}
        for other in ENDPOINTS
        if other.path.startswith(f"{endpoint.path}/{{")
        and len(names := findall(r"{(\w+)}", other.path)) == 1
    }


def _content(endpoint: Endpoint) -> Json:
    if endpoint.media_type:
        return {endpoint.media_type: {"schema": {}}}
    content = {} if endpoint.answer is None else _json(endpoint.answer)
    if endpoint.events:
        data: Json = {"type": "string", "contentMediaType": "application/json"}
        if isinstance(endpoint.events, type):
            data["contentSchema"] = ref(endpoint.events)
        properties = {"data": data, "event": {"type": "string"}, "id": {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": ["data"]}
        content["text/event-stream"] = {"schema": schema}
    return content


def _json(kind: type) -> Json:
    return {"application/json": {"schema": ref(kind)}}


def _refusal(status: int) -> Json:
    headers = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
    if status in (429, 503):
        headers["retry-after"] = {"$ref": "#/components/headers/RetryAfter"}
    return {
        "description": f"{HTTPStatus(status).phrase}. {_SAYS[status]}",
        "headers": headers,
        "content": _json(ErrorBody),
    }
