"""`GET /v1/responses/{id}/input_items`: pages of what a response was asked."""

from typing import Any

import openai
import openresponses_types
import pytest

INPUT = [
    {"role": "user", "content": "One"},
    {"role": "assistant", "content": "Two"},
    {"role": "developer", "content": [{"type": "input_text", "text": "Three"}]},
]


async def items(stack: Any, response_id: str, **query: Any) -> Any:
    return await stack.client.get(f"/v1/responses/{response_id}/input_items", params=query)


@pytest.fixture
async def response_id(stack: Any) -> str:
    made: str = (await stack.respond(input=INPUT)).json()["id"]
    return made


def texts(page: Any) -> list[str]:
    return [item["content"][0]["text"] for item in page["data"]]


async def test_they_come_newest_first_unless_asked_otherwise(stack: Any, response_id: str) -> None:
    page = (await items(stack, response_id)).json()
    assert texts(page) == ["Three", "Two", "One"]
    assert (page["object"], page["has_more"]) == ("list", False)
    assert page["first_id"] == page["data"][0]["id"]
    assert page["last_id"] == page["data"][-1]["id"]
    oldest = (await items(stack, response_id, order="asc")).json()
    assert texts(oldest) == ["One", "Two", "Three"]
    for item in page["data"]:
        openresponses_types.Message.model_validate(item, strict=False)
        assert set(item) == {"type", "id", "status", "role", "content"}


async def test_pages_follow_one_another(stack: Any, response_id: str) -> None:
    seen, after = [], {}
    for more in (True, True, False):
        page = (await items(stack, response_id, limit=1, order="asc", **after)).json()
        assert page["has_more"] is more
        seen += texts(page)
        after = {"after": page["last_id"]}
    assert seen == ["One", "Two", "Three"]
    beyond = (await items(stack, response_id, order="asc", **after)).json()
    assert (beyond["data"], beyond["first_id"], beyond["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": "0"}, "limit"),
        ({"limit": "101"}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "msg_none"}, "after"),
        ({"mood": "1"}, "mood"),
    ],
)
async def test_a_bad_query_is_named(
    stack: Any, response_id: str, query: dict[str, str], param: str
) -> None:
    response = await items(stack, response_id, **query)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_an_unknown_response_has_none(stack: Any) -> None:
    assert (await items(stack, "resp_unknown")).status_code == 404


async def test_a_large_input_is_read_from_where_it_is(stack: Any) -> None:
    parts = [{"role": "user", "content": "word " * 300}] * 250
    made = await stack.respond(input=parts, max_output_tokens=1)
    assert made.status_code == 400  # beyond the context: nothing is stored
    stored = (await stack.respond(input=[{"role": "user", "content": ""}] * 150)).json()
    page = (await items(stack, stored["id"], limit=100)).json()
    assert (len(page["data"]), page["has_more"]) == (100, True)


async def test_the_stock_client_walks_them(stack: Any, response_id: str) -> None:
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key="none") as client:
        found = [
            item.content[0].text  # type: ignore[union-attr]
            async for item in client.responses.input_items.list(response_id, limit=2, order="asc")
        ]
    assert found == ["One", "Two", "Three"]


async def test_calls_results_and_thoughts_come_as_they_were_sent(stack: Any) -> None:
    sent = [
        {"type": "message", "role": "user", "content": "How warm is it?"},
        {"type": "reasoning", "summary": [], "content": [
            {"type": "reasoning_text", "text": "I must ask."}]},
        {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "21"},
    ]  # fmt: skip
    made = (await stack.respond(input=sent)).json()
    page = (await items(stack, made["id"], order="asc")).json()
    assert [item["type"] for item in page["data"]] == [item["type"] for item in sent]
    for found, given in zip(page["data"][1:], sent[1:], strict=True):
        assert {name: found[name] for name in given} == given
