"""`/openapi.json` and `/docs`: every route is there, and nothing else; methods and HEAD."""

import re
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from starlette.routing import Route, WebSocketRoute

from diptych_gateway.batches.room import BatchRoom
from diptych_gateway.doors import schemas
from diptych_gateway.doors.docs_page import page
from diptych_gateway.doors.endpoints import ENDPOINTS
from diptych_gateway.doors.openapi import described
from diptych_gateway.doors.routes import endpoint, routes
from diptych_gateway.tenancy.administering import Administering

HANDLERS = MagicMock()
HANDLERS.batch_room = BatchRoom(files=MagicMock(), batches=MagicMock(), runner=MagicMock())
ADMIN = Administering(MagicMock(), MagicMock(), MagicMock())
ROUTES = [*routes(HANDLERS, MagicMock(), reasons=list), *ADMIN.routes()]


def test_every_route_is_described_and_nothing_else() -> None:
    served = {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in ROUTES
        if isinstance(route, Route)
        for method in set(route.methods or ()) - {"HEAD"}
    }
    assert served == {(e.method, e.path) for e in ENDPOINTS}
    assert len(ENDPOINTS) == len(served)
    paths = described()["paths"]
    assert served == {(m.upper(), path) for path, methods in paths.items() for m in methods}


def test_every_websocket_is_described() -> None:
    served = {route.path for route in ROUTES if isinstance(route, WebSocketRoute)}
    assert served == {e.path for e in ENDPOINTS if e.socket}


def test_every_reference_has_its_object() -> None:
    document = described()
    text = msgspec.json.encode(document).decode()
    found = set(re.findall(r'"#/components/(\w+)/(\w+)"', text))
    known = {(kind, name) for kind, names in document["components"].items() for name in names}
    assert found <= known
    assert {name for kind, name in known - found} <= {"key"}


def test_a_body_says_what_is_required_and_that_no_more_is_known() -> None:
    body = described()["components"]["schemas"]["ChatBody"]
    assert body["required"] == ["model", "messages"]
    assert body["additionalProperties"] is False
    assert body["properties"]["stream"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}]}


def test_two_types_of_one_name_are_refused() -> None:
    one = msgspec.defstruct("Same", [("a", int)])
    two = msgspec.defstruct("Same", [("a", str)])
    with pytest.raises(ValueError, match="two types are called Same"):
        schemas.components([one, two])
    with pytest.raises(TypeError, match="no JSON schema"):
        schemas.components([msgspec.defstruct("Odd", [("a", complex)])])


def test_links_say_what_can_be_done_with_an_answer() -> None:
    answer = described()["paths"]["/v1/responses"]["post"]["responses"]["200"]
    assert set(answer["links"]) == {
        "getV1ResponsesResponseId",
        "deleteV1ResponsesResponseId",
        "postV1ResponsesResponseIdCancel",
        "getV1ResponsesResponseIdInputItems",
    }


async def test_the_document_is_served(stack: Any) -> None:
    response = await stack.client.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    assert response.json() == described()


async def test_the_page_is_whole_by_itself(stack: Any) -> None:
    response = await stack.client.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert response.content == page()
    html = response.text
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", html)
    assert set(re.findall(r"href='([^']*)'", html)) >= {"/openapi.json", "#ChatBody"}
    assert not [link for link in re.findall(r"href='([^#'][^']*)'", html) if link[0] != "/"]
    for described_path in {e.path for e in ENDPOINTS}:
        assert f"<code>{described_path}</code>" in html
    ids = set(re.findall(r"id='(\w+)'", html))
    assert set(re.findall(r"href='#(\w+)'", html)) <= ids


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/x", "/v1/chat/completions/{completion_id}"),
        ("/v1/responses/x", "/v1/responses/{response_id}"),
        ("/v1/responses/x/cancel", "/v1/responses/{response_id}/cancel"),
        ("/v1/responses/x/input_items", "/v1/responses/{response_id}/input_items"),
        ("/v1/responses/x/y", "other"),
        ("/v1/models/tiny", "/v1/models/{model}"),
        ("/tokenize", "/tokenize"),
        ("/nowhere", "other"),
    ],
)
def test_metrics_know_paths_by_few_names(path: str, name: str) -> None:
    assert endpoint(path) == name


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", {"POST"}),
        ("/v1/responses/resp_1", {"DELETE", "GET", "HEAD"}),
        ("/v1/models", {"GET", "HEAD"}),
        ("/tokenize", {"POST"}),
    ],
)
async def test_another_method_is_told_which_there_are(
    stack: Any, path: str, allowed: set[str]
) -> None:
    for method in ("PUT", "OPTIONS", "PATCH", "TRACE"):
        response = await stack.client.request(method, path)
        assert response.status_code == 405
        assert set(response.headers["allow"].split(", ")) == allowed
        assert response.json()["error"]["code"] == "method_not_allowed"


async def test_a_head_is_a_get_without_its_body(stack: Any) -> None:
    for path in ("/v1/models", "/health/live", "/openapi.json", "/docs", "/metrics"):
        head, get = await stack.client.head(path), await stack.client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
