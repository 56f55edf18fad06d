"""`/v1/files` and `/v1/batches` against a scripted fleet."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from diptych_bus.memory import MemoryBus
from diptych_bus.port import Kept
from diptych_contracts.batches import BatchRecord
from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import PriorityClass
from diptych_contracts.streams import BATCH_RESULTS, FILE_PARTS
from diptych_gateway.batches.lines import TooLong, lines

CHAT = "/v1/chat/completions"


def line(number: int, **changes: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": [{"role": "user", "content": f"Hello {number}"}]}
    body |= changes.pop("body", {})
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body} | changes


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def upload(stack: Any, data: bytes, **headers: str) -> httpx.Response:
    answer: httpx.Response = await stack.client.post(
        "/v1/files",
        files={"file": ("in.jsonl", data)},
        data={"purpose": "batch"},
        headers=headers,
    )
    return answer


async def start(stack: Any, data: bytes, **changes: Any) -> dict[str, Any]:
    file = await upload(stack, data)
    assert file.status_code == 200, file.text
    body = {
        "input_file_id": file.json()["id"],
        "endpoint": CHAT,
        "completion_window": "24h",
    } | changes
    answer = await stack.client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def over(stack: Any, batch_id: str, *states: str, client: Any = None) -> dict[str, Any]:
    wanted = states or ("completed", "failed", "expired", "cancelled")
    async with asyncio.timeout(60):
        while True:
            answer = await (client or stack.client).get(f"/v1/batches/{batch_id}")
            if answer.json()["status"] in wanted:
                found: dict[str, Any] = answer.json()
                return found
            await asyncio.sleep(0.02)


async def content(stack: Any, file_id: str) -> list[dict[str, Any]]:
    answer = await stack.client.get(f"/v1/files/{file_id}/content")
    assert answer.status_code == 200
    return [json.loads(each) for each in answer.text.splitlines()]


async def test_a_batch_is_what_its_lines_answer(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        made = await start(stack, jsonl(*(line(n) for n in range(20))), metadata={"who": "me"})
        assert made["status"] == "validating"
        assert made["metadata"] == {"who": "me"}
        done = await over(stack, made["id"])
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert done["error_file_id"] is None
        lines = await content(stack, done["output_file_id"])
        assert [each["custom_id"] for each in lines] == [f"c{n}" for n in range(20)]
        texts = {each["response"]["body"]["choices"][0]["message"]["content"] for each in lines}
        assert texts == {"Hello world"}
        assert {each["response"]["status_code"] for each in lines} == {200}
        assert len({each["id"] for each in lines}) == 20
        assert len(stack.fleet.requests) == 20
        assert {r.priority_class for r in stack.fleet.requests} == {PriorityClass.BATCH}
        await stack.until(lambda: not stack.broker.bucket(BATCH_RESULTS).values)


async def test_the_stock_client_runs_a_batch(run_stack: Any, hello: Any) -> None:
    async with (
        run_stack(hello) as stack,
        openai.AsyncOpenAI(base_url=stack.base_url, api_key="none", max_retries=0) as client,
    ):
        file = await client.files.create(file=("in.jsonl", jsonl(line(1))), purpose="batch")
        assert (file.bytes, file.filename) == (len(jsonl(line(1))), "in.jsonl")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        await over(stack, batch.id)
        batch = await client.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        text = (await client.files.content(batch.output_file_id)).text
        assert json.loads(text)["custom_id"] == "c1"
        assert [b.id async for b in client.batches.list()] == [batch.id]
        names = [f.id async for f in client.files.list()]
        assert names == [batch.output_file_id, file.id]
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_responses_run_in_batches_too(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        one = {
            "custom_id": "r",
            "method": "POST",
            "url": "/v1/responses",
            "body": {"model": "tiny", "input": "Hello"},
        }
        made = await start(stack, jsonl(one), endpoint="/v1/responses")
        done = await over(stack, made["id"])
        (answer,) = await content(stack, done["output_file_id"])
        body = answer["response"]["body"]
        assert body["output"][0]["content"][0]["text"] == "Hello world"
        again = await stack.client.get(f"/v1/responses/{body['id']}")
        assert again.json()["status"] == "completed"


async def test_every_fault_of_a_file_is_told_by_its_line(run_stack: Any, hello: Any) -> None:
    bad = [
        b"not json",
        json.dumps(line(2)).encode(),
        json.dumps(line(2)).encode(),
        b"",
        json.dumps(line(5, method="GET")).encode(),
        json.dumps(line(6, url="/v1/responses")).encode(),
        json.dumps(line(7, body={"temperature": 9})).encode(),
        json.dumps(line(8, body={"stream": True})).encode(),
        json.dumps(line(9, more=1)).encode(),
        json.dumps(line(10, custom_id="")).encode(),
    ]
    async with run_stack(hello) as stack:
        made = await start(stack, b"\n".join(bad))
        done = await over(stack, made["id"])
        assert done["status"] == "failed"
        faults = [(f["line"], f["code"], f["param"]) for f in done["errors"]["data"]]
        assert faults == [
            (1, "invalid_json", None),
            (3, "duplicate_custom_id", "custom_id"),
            (5, "invalid_value", "method"),
            (6, "mismatched_endpoint", "url"),
            (7, "invalid_value", "temperature"),
            (8, "invalid_value", "body.stream"),
            (9, "unknown_parameter", "more"),
            (10, "invalid_value", "custom_id"),
        ]
        assert not stack.fleet.requests


async def forever(fleet: Any, request: Any) -> None:
    """Say nothing."""


async def test_a_tenant_has_so_many_batches_that_are_not_over(run_stack: Any) -> None:
    async with run_stack(forever, max_open_batches=1) as stack:
        board = stack.gateway.batch_room.batches.board
        far_unix_ms = stack.fleet.bus.unix_ms() + 3_600_000
        another = BatchRecord(
            batch_id="batch_rival",
            tenant="rival",
            endpoint=CHAT,
            input_file_id="file-rival",
            owner=Incarnation("gateway-2"),
            owned_until_unix_ms=far_unix_ms,
            created_unix_ms=0,
            expires_unix_ms=far_unix_ms,
        )
        board.note(Kept(another.batch_id, another, 1))
        first = await start(stack, jsonl(line(1)))
        body = {name: first[name] for name in ("input_file_id", "endpoint", "completion_window")}
        refused = await stack.client.post("/v1/batches", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "60")
        await stack.client.post(f"/v1/batches/{first['id']}/cancel")
        await over(stack, first["id"], "cancelled")
        assert (await stack.client.post("/v1/batches", json=body)).status_code == 200


@pytest.mark.parametrize("data", [b"", b"\n\n \n"])
async def test_an_empty_file_fails(run_stack: Any, hello: Any, data: bytes) -> None:
    async with run_stack(hello) as stack:
        done = await over(stack, (await start(stack, data))["id"])
        assert [f["code"] for f in done["errors"]["data"]] == ["empty_file"]


@pytest.mark.parametrize("end", [b"", b"\n"])
async def test_a_line_may_be_as_long_as_the_limit(end: bytes) -> None:
    async def content(size: int) -> AsyncIterator[bytes]:
        yield b"a\n" + b"b" * size + end

    whole = [found async for found in lines(content(5), max_bytes=5)]
    assert whole == [(1, b"a"), (2, b"bbbbb")]
    with pytest.raises(TooLong, match="2"):
        _ = [found async for found in lines(content(6), max_bytes=5)]


async def test_too_many_and_too_long_lines_fail(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, max_batch_lines=2, max_body_bytes=2000) as stack:
        many = await over(stack, (await start(stack, jsonl(*map(line, range(3)))))["id"])
        assert [(f["line"], f["code"]) for f in many["errors"]["data"]] == [(3, "too_many_lines")]
        long = jsonl(line(1), line(2, custom_id="x" * 3000))
        done = await over(stack, (await start(stack, long))["id"])
        assert [(f["line"], f["code"]) for f in done["errors"]["data"]] == [(2, "line_too_long")]


async def test_what_a_line_is_refused_for_is_in_the_error_file(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        made = await start(stack, jsonl(line(1), line(2, body={"max_tokens": 10**6})))
        done = await over(stack, made["id"])
        assert done["status"] == "completed"
        assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert [e["custom_id"] for e in await content(stack, done["output_file_id"])] == ["c1"]
        (bad,) = await content(stack, done["error_file_id"])
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("c2", 400)
        assert bad["response"]["body"]["error"]["code"] == "context_length_exceeded"


async def test_a_line_whose_request_fails_once_is_tried_again(run_stack: Any) -> None:
    seen: list[int] = []

    async def script(fleet: Any, request: Any) -> None:
        seen.append(1)
        reason = EndReason.FAILED if len(seen) == 1 else EndReason.STOP
        fleet.say(request, fleet.ids("fine"), end=reason)

    async with run_stack(script) as stack:
        done = await over(stack, (await start(stack, jsonl(line(1))))["id"])
        assert done["request_counts"]["completed"] == 1
        assert len(seen) == 2


async def test_a_cancelled_batch_keeps_what_is_done(run_stack: Any) -> None:
    async def script(fleet: Any, request: Any) -> None:
        if fleet.requests.index(request) < 3:
            fleet.say(request, fleet.ids("fine"), end=EndReason.STOP)

    async with run_stack(script, batch_in_flight=2) as stack:
        made = await start(stack, jsonl(*(line(n) for n in range(10))))
        await stack.until(lambda: len(stack.fleet.requests) == 5)
        answer = await stack.client.post(f"/v1/batches/{made['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        done = await over(stack, made["id"])
        assert done["status"] == "cancelled"
        assert done["request_counts"] == {"total": 10, "completed": 3, "failed": 7}
        assert len(await content(stack, done["output_file_id"])) == 3
        left = await content(stack, done["error_file_id"])
        assert {each["error"]["code"] for each in left} == {"batch_cancelled"}
        assert {each["response"] for each in left} == {None}
        for request in stack.fleet.requests[3:5]:
            record = await stack.until(lambda r=request: stack.fleet.record(r))
            assert record.cancel_reason == "its batch has stopped"
        again = await stack.client.post(f"/v1/batches/{made['id']}/cancel")
        assert again.json()["status"] == "cancelled"


async def test_a_batch_expires_with_what_is_done(
    run_stack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_ms, unix_ms = 0, MemoryBus.unix_ms
    monkeypatch.setattr(MemoryBus, "unix_ms", lambda bus: unix_ms(bus) + later_ms)

    async def script(fleet: Any, request: Any) -> None:
        if fleet.requests.index(request) == 0:
            fleet.say(request, fleet.ids("fine"), end=EndReason.STOP)

    async with run_stack(script, batch_in_flight=1) as stack:
        made = await start(stack, jsonl(line(1), line(2), line(3)))
        await stack.until(lambda: len(stack.fleet.requests) == 2)
        later_ms = 24 * 3600 * 1000
        done = await over(stack, made["id"])
        assert done["status"] == "expired"
        assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
        left = await content(stack, done["error_file_id"])
        assert {each["error"]["code"] for each in left} == {"batch_expired"}


async def test_no_more_lines_run_at_once_than_the_setting_says(run_stack: Any) -> None:
    most = 0

    async def script(fleet: Any, request: Any) -> None:
        nonlocal most
        running.append(request)
        most = max(most, len(running))
        if len(running) == 3:
            full.set()
        await full.wait()
        await asyncio.sleep(0.05)  # a fourth would come
        running.remove(request)
        fleet.say(request, fleet.ids("fine"), end=EndReason.STOP)

    running: list[Any] = []
    full = asyncio.Event()
    async with run_stack(script, batch_in_flight=3) as stack:
        done = await over(stack, (await start(stack, jsonl(*map(line, range(12)))))["id"])
        assert done["request_counts"]["completed"] == 12
        assert most == 3


async def test_a_stopped_gateway_hands_its_batch_over(run_stack: Any) -> None:
    going_on = asyncio.Event()

    async def script(fleet: Any, request: Any) -> None:
        if fleet.requests.index(request) > 1:
            await going_on.wait()
        fleet.say(request, fleet.ids("fine"), end=EndReason.STOP)

    async with run_stack(script, batch_in_flight=2, drain_s=0.1) as stack:
        made = await start(stack, jsonl(*map(line, range(6))))
        await stack.until(lambda: len(stack.fleet.requests) == 4)
        async with stack.another("gateway-00000000dddd") as other:
            stack.member.stopping.set()
            going_on.set()
            done = await over(stack, made["id"], client=other)
        assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert len(stack.fleet.requests) == 6


async def test_a_large_file_comes_back_as_it_was(run_stack: Any, hello: Any) -> None:
    data = bytes(range(256)) * 4096 * 5 + b"end"
    async with run_stack(hello) as stack:
        file = (await upload(stack, data)).json()
        assert file["bytes"] == len(data)
        names = [name for bucket, name in stack.broker.objects if bucket == FILE_PARTS]
        assert len(names) == 6
        answer = await stack.client.get(f"/v1/files/{file['id']}/content")
        assert answer.content == data
        assert (await stack.client.delete(f"/v1/files/{file['id']}")).json()["deleted"]
        assert not [name for bucket, name in stack.broker.objects if bucket == FILE_PARTS]


async def test_a_file_that_is_too_large_leaves_nothing(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello, max_file_bytes=2 * 1024 * 1024) as stack:

        async def endless() -> Any:
            yield (b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n')
            for _ in range(60):
                yield b"x" * 65536

        answer = await stack.client.post(
            "/v1/files",
            content=endless(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "file_too_large"
        assert not [name for bucket, name in stack.broker.objects if bucket == FILE_PARTS]
        assert (await upload(stack, b"x" * 3 * 1024 * 1024)).status_code == 413


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"data": {"purpose": "batch"}}, "file"),
        ({"files": {"file": ("x", b"y")}}, "purpose"),
        ({"files": {"file": ("x", b"y")}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"file": ("x", b"y")}, "data": {"purpose": "batch", "what": "?"}}, "what"),
        ({"files": {"file": ("x", b"y")}, "data": {"purpose": "b" * 2000}}, "purpose"),
        (
            {
                "files": {"file": ("x", b"y")},
                "data": {
                    "purpose": "batch",
                    "expires_after[anchor]": "created_at",
                    "expires_after[seconds]": "7",
                },
            },
            "expires_after[seconds]",
        ),
    ],
)
async def test_a_form_that_is_wrong_is_told_so(
    run_stack: Any, hello: Any, form: Any, param: str
) -> None:
    async with run_stack(hello) as stack:
        if "files" not in form:
            form = form | {"files": {"other": (None, b"y")}}
        answer = await stack.client.post("/v1/files", **form)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] in (param, "other")
        assert not stack.broker.objects.keys() - {("models", "tiny")}


@pytest.mark.parametrize(
    "body", [b"", b"--b--\r\n", b"garbage", b"--b\r\nContent-Disposition: form-data\r\n\r\nx"]
)
async def test_what_is_no_form_is_refused(run_stack: Any, hello: Any, body: bytes) -> None:
    async with run_stack(hello) as stack:
        headers = {"content-type": "multipart/form-data; boundary=b"}
        answer = await stack.client.post("/v1/files", content=body, headers=headers)
        assert answer.status_code == 400
        plain = await stack.client.post("/v1/files", content=body)
        assert plain.status_code == 415


async def test_the_same_key_makes_the_same_file_and_batch(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        key = {"Idempotency-Key": "k"}
        data = jsonl(line(1))
        one, two = await upload(stack, data, **key), await upload(stack, data, **key)
        assert one.json() == two.json()
        other = await upload(stack, data + b"\n", **key)
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_in_use")
        assert len([n for bucket, n in stack.broker.objects if bucket == FILE_PARTS]) == 1
        body = {
            "input_file_id": one.json()["id"],
            "endpoint": CHAT,
            "completion_window": "24h",
        }
        made = [await stack.client.post("/v1/batches", json=body, headers=key) for _ in range(2)]
        assert made[0].json()["id"] == made[1].json()["id"]
        body["metadata"] = {"a": "b"}  # type: ignore[assignment]
        conflict = await stack.client.post("/v1/batches", json=body, headers=key)
        assert conflict.status_code == 409
        await over(stack, made[0].json()["id"])


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": "file-" + "0" * 32}, 404, "input_file_id"),
        ({"input_file_id": "../x"}, 404, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"more": 1}, 400, "more"),
    ],
)
async def test_a_batch_that_is_wrong_is_told_so(
    run_stack: Any, hello: Any, changes: Any, status: int, param: str
) -> None:
    async with run_stack(hello) as stack:
        file = (await upload(stack, jsonl(line(1)))).json()
        body = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        answer = await stack.client.post("/v1/batches", json=body | changes)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["param"].startswith(param)


async def test_lists_come_in_pages(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        made = [(await start(stack, jsonl(line(n))))["id"] for n in range(3)]
        first = (await stack.client.get("/v1/batches?limit=2")).json()
        assert [b["id"] for b in first["data"]] == [made[2], made[1]]
        assert first["has_more"]
        rest = (await stack.client.get(f"/v1/batches?limit=2&after={first['last_id']}")).json()
        assert [b["id"] for b in rest["data"]] == [made[0]]
        assert not rest["has_more"]
        for query in ("limit=0", "limit=101", "limit=x", "after=nothing", "what=1"):
            answer = await stack.client.get(f"/v1/batches?{query}")
            assert answer.status_code == 400, query
        for batch_id in made:
            await over(stack, batch_id)
        files = (await stack.client.get("/v1/files?purpose=batch&order=asc")).json()["data"]
        assert len(files) == 3
        assert files == sorted(files, key=lambda f: f["created_at"])


async def test_completions_run_in_batches_too(run_stack: Any, hello: Any) -> None:
    async with run_stack(hello) as stack:
        url = "/v1/completions"
        one = line(1) | {"url": url, "body": {"model": "tiny", "prompt": "Hello", "n": 3}}
        done = await over(stack, (await start(stack, jsonl(one), endpoint=url))["id"])
        (answer,) = await content(stack, done["output_file_id"])
        assert len(answer["response"]["body"]["choices"]) == 3
        assert {r.priority_class for r in stack.fleet.requests} == {PriorityClass.BATCH}
        assert all(r.background for r in stack.fleet.requests)
