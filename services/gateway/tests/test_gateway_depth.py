"""JSON nested deeper than anybody means it, at every place a body has."""

import json
from typing import Any

import pytest
from websockets.asyncio.client import connect

DEEP = 100_000
"""Of a reader that calls itself per level, the stack of a thread would be used up."""
PATHS = {
    "/v1/chat/completions": '{"model":"tiny","messages":[{"role":"user","content":"a"}],%s}',
    "/v1/responses": '{"model":"tiny","input":"a",%s}',
    "/tokenize": '{"model":"tiny","prompt":"a",%s}',
    "/v1/embeddings": '{"model":"tiny","input":"a",%s}',
}


def nested(depth: int, kind: str) -> str:
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("field", ["tools", "metadata", "response_format", "text", "unknown"])
async def test_a_deep_value_is_refused(stack: Any, path: str, kind: str, field: str) -> None:
    for depth in (500, 5000, DEEP):
        body = PATHS[path] % f'"{field}":{nested(depth, kind)}'
        response = await stack.client.post(path, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await stack.chat()).status_code == 200
    assert stack.gateway.admission.in_flight == 0


@pytest.mark.parametrize("text", [nested(DEEP, "list"), nested(DEEP, "object")])
async def test_a_body_of_depth_alone_is_refused(stack: Any, text: str) -> None:
    for path in PATHS:
        response = await stack.client.post(path, content=text)
        assert response.status_code == 400


@pytest.mark.parametrize("path", ["responses", "chat/completions"])
async def test_a_deep_frame_is_refused(stack: Any, path: str) -> None:
    url = stack.base_url.replace("http", "ws") + f"/{path}"
    async with connect(url) as connection:
        for frame in (
            nested(DEEP, "list"),
            f'{{"type":"response.create","stream_id":{nested(DEEP, "list")}}}',
            f'{{"type":"response.create","model":"a","input":"a","tools":{nested(DEEP, "list")}}}',
            f'{{"type":"response.create","model":"tiny","input":[{nested(DEEP, "object")}]}}',
            f'{{"model":"tiny","messages":[{{"role":"user","content":{nested(DEEP, "list")}}}]}}',
        ):
            await connection.send(frame)
            event = json.loads(await connection.recv())
            assert (event["type"], event["status"]) == ("error", 400)
