"""A chat stream goes on after any of its events, at any gateway, until its window has passed."""

import asyncio
from typing import Any

import msgspec
import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import EndReason
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_contracts.streams import REQUEST_RECORDS
from diptych_gateway.doors.routes import CHAT_COMPLETIONS

TEXT = "Hello world and all the rest of it ##"
OTHER = "gateway-00000000cccc"
RESUME = {"x-diptych-resume": "1"}


class Scheduler:
    """Keeps a record, says half the answer, and the rest when it is told to go on."""

    def __init__(self) -> None:
        self.going_on = asyncio.Event()
        self.closed = asyncio.Event()

    async def __call__(self, fleet: Any, request: Any) -> None:
        bucket = fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        record = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("scheduler-1"),
            gateway=request.gateway,
            state=RecordState.ROUTED,
            request_seq=7,
            head=request.head,
        )
        revision = await bucket.create(request.request_id, record)
        ids = fleet.ids(TEXT)
        for index, token in enumerate(ids[:3]):
            fleet.say(request, [token], index=index)
        await self.going_on.wait()
        fleet.say(request, ids[3:], index=3, end=EndReason.STOP)
        await fleet.bus.flush(2)
        end_seq = await fleet.bus.last_seq(request.gateway)
        ended = msgspec.structs.replace(record, state=RecordState.CLOSED, journal_end_seq=end_seq)
        await bucket.update(request.request_id, ended, revision)
        self.closed.set()


def body(stack: Any) -> dict[str, Any]:
    options = {"include_usage": True}
    changed: dict[str, Any] = stack.body(stream=True, stream_options=options, stop="###")
    return changed


def events(text: str) -> list[tuple[str, str]]:
    """Every event as (id, data)."""
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        fields = dict(line.split(": ", 1) for line in lines)
        if "data" in fields:
            found.append((fields.get("id", ""), fields["data"]))
    return found


async def begun(stack: Any) -> str:
    """A stream whose client has left after the second token; the request's id."""
    request = stack.client.stream("POST", CHAT_COMPLETIONS, json=body(stack), headers=RESUME)
    async with request as response:
        async for line in response.aiter_lines():
            if line.startswith("id: ") and line.endswith(":1"):
                break
        request_id: str = response.headers["x-request-id"]
        return request_id


async def again(client: Any, request_id: str, after: int, **params: str) -> list[tuple[str, str]]:
    path = f"{CHAT_COMPLETIONS}/chatcmpl-{request_id}"
    headers = {"last-event-id": f"{request_id}:{after}"}
    asked = {"stream": "true", "include_usage": "true", **params}
    response = await client.get(path, params=asked, headers=headers)
    assert response.status_code == 200, response.text
    return events(response.text)


async def test_it_goes_on_after_any_event_at_any_gateway(run_stack: Any) -> None:
    story = Scheduler()
    async with run_stack(story) as stack, stack.another(OTHER) as other:
        request_id = await begun(stack)
        live = asyncio.create_task(again(other, request_id, 1))
        await asyncio.sleep(0.1)
        story.going_on.set()
        rest = await live
        await story.closed.wait()
        for client in (stack.client, other):
            path = f"{CHAT_COMPLETIONS}/{request_id}"
            params = {"stream": "true", "include_usage": "true"}
            whole = events((await client.get(path, params=params)).text)
            indices = [int(event_id.split(":")[1]) for event_id, _ in whole[:-1]]
            assert indices == sorted(set(indices)), "every event can be told from all others"
            texts = [
                msgspec.json.decode(data)["choices"][0]["delta"]["content"]
                for _, data in whole[:-3]
            ]
            assert "".join(texts) == TEXT
            assert (
                rest[:-2]
                == [event for event, i in zip(whole, indices, strict=False) if i > 1][
                    : len(rest) - 2
                ]
            )
            for position, index in enumerate(indices):
                later = await again(client, request_id, index)
                assert [e for e, _ in later] == [e for e, _ in whole[position + 1 :]]


async def test_a_repeated_post_goes_on_too(run_stack: Any) -> None:
    story = Scheduler()
    story.going_on.set()
    async with run_stack(story) as stack:
        request_id = await begun(stack)
        await story.closed.wait()
        headers = {"last-event-id": f"{request_id}:1"}
        answer = await stack.client.post(CHAT_COMPLETIONS, json=body(stack), headers=headers)
        by_get = await again(stack.client, request_id, 1)
        assert [e for e, _ in events(answer.text)] == [e for e, _ in by_get]
        assert len(stack.fleet.requests) == 1, "it was not asked again"


async def test_the_whole_answer_can_be_fetched(run_stack: Any) -> None:
    story = Scheduler()
    story.going_on.set()
    async with run_stack(story) as stack, stack.another(OTHER) as other:
        request_id = await begun(stack)
        await story.closed.wait()
        answer = (await other.get(f"{CHAT_COMPLETIONS}/chatcmpl-{request_id}")).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        assert answer["id"] == f"chatcmpl-{request_id}"


async def test_a_late_reader_reads_no_further_than_the_end(run_stack: Any) -> None:
    story = Scheduler()
    story.going_on.set()
    async with run_stack(story) as stack, stack.another(OTHER) as other:
        request_id = await begun(stack)
        await story.closed.wait()
        request = stack.fleet.requests[0]
        for _ in range(500):
            stack.fleet.fence(request, 1)
        await stack.fleet.bus.flush(2)
        read = []
        streams = type(stack.fleet.bus)
        plain = streams.read

        async def counted(self: Any, gateway: Any, **limits: Any) -> Any:
            async for item in plain(self, gateway, **limits):
                read.append(item.seq)
                yield item

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "read", counted)
            await again(other, request_id, 1)
        record = await stack.fleet.record(request)
        assert max(read) == record.journal_end_seq
        assert len(read) < 20


@pytest.mark.parametrize("method", ["get", "post"])
async def test_after_the_window_it_is_gone(run_stack: Any, method: str) -> None:
    story = Scheduler()
    story.going_on.set()
    async with run_stack(story) as stack:
        request_id = await begun(stack)
        await story.closed.wait()
        await stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).delete(request_id)
        headers = {"last-event-id": f"{request_id}:1"}
        if method == "get":
            path, asked = f"{CHAT_COMPLETIONS}/{request_id}", {"params": {"stream": "true"}}
        else:
            path, asked = CHAT_COMPLETIONS, {"json": body(stack)}
        answer = await stack.client.request(method, path, headers=headers, **asked)
        assert answer.status_code == 410
        assert answer.json()["error"]["code"] == "resume_window_passed"
        assert "resume window has passed" in answer.json()["error"]["message"]


async def test_a_journal_whose_beginning_has_aged_is_gone(run_stack: Any) -> None:
    story = Scheduler()
    async with run_stack(story) as stack, stack.another(OTHER) as other:
        request_id = await begun(stack)
        stream = stack.broker.streams["TOKENS"]
        stream.erase(1)
        path = f"{CHAT_COMPLETIONS}/{request_id}"
        answer = await other.get(path, params={"stream": "true"})
        assert answer.status_code == 410
        story.going_on.set()


async def test_without_intent_there_is_nothing_to_come_back_to(run_stack: Any) -> None:
    story = Scheduler()
    async with run_stack(story) as stack:
        async with stack.stream() as response:
            request_id = response.headers["x-request-id"]
            answer = await stack.client.get(f"{CHAT_COMPLETIONS}/{request_id}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "not_resumable")
        record = await stack.until(lambda: stack.fleet.record(stack.fleet.requests[0]))
        await stack.until(lambda: record is not None)
        story.going_on.set()


@pytest.mark.parametrize(
    ("path", "params", "last_seen", "status"),
    [
        ("x", {}, "", 404),
        ("0" * 32, {"n": "1"}, "", 400),
        ("0" * 32, {"stream": "true"}, "1", 400),
        ("0" * 32, {"stream": "true"}, f"{'1' * 32}:0", 400),
        ("0" * 32, {"starting_after": "3"}, "", 400),
        ("0" * 32, {"stream": "yes"}, "", 400),
    ],
)
async def test_what_is_asked_wrongly_is_told(
    stack: Any, path: str, params: dict[str, str], last_seen: str, status: int
) -> None:
    headers = {"last-event-id": last_seen} if last_seen else {}
    answer = await stack.client.get(f"{CHAT_COMPLETIONS}/{path}", params=params, headers=headers)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
