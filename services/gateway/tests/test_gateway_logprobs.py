"""Logprobs on their way out: beside the text they belong to, whatever holds that back."""

import json
from typing import Any

import msgspec
import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.journal import Chances, EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord
from diptych_contracts.responses import StoredResponse
from diptych_contracts.streams import REQUEST_RECORDS, RESPONSES
from diptych_gateway.answering.chance_trail import ChanceTrail
from diptych_gateway.answering.logprob_objects import completion_logprobs, token_logprobs
from diptych_testkit.tiny_gguf import EOS_ID, tiny_card
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

CODEC = TextCodec.from_card(tiny_card())


def ids(text: str) -> list[int]:
    return CODEC.encode(text, add_bos=False)


def chances(token: int) -> Chances:
    """Half likely, beside the end of text and one more."""
    return ((token, -0.5), (EOS_ID, -1.25), (token + 1, -2.0))


def pieces(token_ids: list[int], *stop: str) -> list[tuple[str, list[int]]]:
    """What is shown of an answer, and the tokens told with it."""
    text, trail, found = AnswerText(CODEC, stop), ChanceTrail(CODEC), []
    for token in token_ids:
        trail.push(token, chances(token))
        if shown := text.push((token,)):
            found.append((shown, [c.chances[0][0] for c in trail.shown(shown)]))
    rest = text.finish()
    told = () if text.stopped else trail.rest()
    if rest or told:
        found.append((rest, [c.chances[0][0] for c in told]))
    return found


def test_half_a_character_is_told_with_its_whole() -> None:
    emoji = ids("🙂")
    assert len(emoji) > 1
    assert pieces([*ids("Hi"), *emoji])[-1] == ("🙂", emoji)


def test_what_a_stop_string_may_begin_in_is_told_when_it_is_shown() -> None:
    token_ids = ids("Yes #") + ids(" no")
    found = pieces(token_ids, "###")
    assert "".join(text for text, _ in found) == "Yes # no"
    assert [token for _, told in found for token in told] == token_ids
    assert all(told for _, told in found)


def test_a_stop_string_is_not_told() -> None:
    before, stop = ids("Yes "), ids("###")
    assert [t for _, told in pieces([*before, *stop, *ids("no")], "###") for t in told] == before


def test_every_token_is_told_at_the_end_even_if_it_came_to_no_text() -> None:
    half = ids("🙂")[:-1]
    token_ids = [*ids("Hi"), *half, EOS_ID]
    assert [t for _, told in pieces(token_ids) for t in told] == token_ids


def test_bytes_are_exact_where_a_token_is_no_whole_character() -> None:
    emoji = ids("🙂")
    trail = ChanceTrail(CODEC)
    for token in emoji:
        trail.push(token, ((token, -1.0),))
    told = token_logprobs(CODEC, trail.shown("🙂"))
    assert bytes(b for token in told for b in token.bytes) == "🙂".encode()
    assert "�" in told[0].token
    old = completion_logprobs(CODEC, trail_of(emoji))
    assert old.tokens[0].startswith("bytes:\\x")


def trail_of(token_ids: list[int]) -> Any:
    trail = ChanceTrail(CODEC)
    for token in token_ids:
        trail.push(token, ((token, -1.0),))
    return trail.rest()


def test_control_tokens_have_a_name_and_no_bytes() -> None:
    (told,) = token_logprobs(CODEC, [tokens_of(EOS_ID)])
    assert told.token
    assert (told.token, told.bytes) == (CODEC.control_text(EOS_ID), [])


def tokens_of(token: int) -> Any:
    (told,) = trail_of([token])
    return told


async def hello(fleet: Any, request: Request) -> None:
    """Hello world, with as many logprobs as were asked for."""
    token_ids, top = fleet.ids("Hello world"), request.sampling.top_logprobs
    for index, token in enumerate(token_ids):
        end = EndReason.STOP if index == len(token_ids) - 1 else None
        told = () if top is None else (chances(token)[: 1 + top],)
        fleet.say(request, [token], index=index, end=end, logprobs=told)


def expected(token: int, top: int) -> dict[str, Any]:
    """What chat says of one token."""
    text = CODEC.token_bytes(token)
    ranked = [
        {"token": CODEC.control_text(EOS_ID), "logprob": -1.25, "bytes": []},
        {
            "token": CODEC.token_bytes(token + 1).decode("utf-8", "replace"),
            "logprob": -2.0,
            "bytes": list(CODEC.token_bytes(token + 1)),
        },
    ]
    return {
        "token": text.decode(),
        "logprob": -0.5,
        "bytes": list(text),
        "top_logprobs": ranked[:top],
    }


async def test_a_whole_chat_answer_tells_its_logprobs(run_stack: Any) -> None:
    async with run_stack(hello) as stack:
        answer = (await stack.chat(logprobs=True, top_logprobs=2)).json()
        plain = (await stack.chat(logprobs=False, top_logprobs=0)).json()
        chosen = (await stack.chat(logprobs=True)).json()
    (choice,) = answer["choices"]
    assert choice["logprobs"] == {
        "content": [expected(token, 2) for token in ids("Hello world")],
        "refusal": None,
    }
    assert plain["choices"][0]["logprobs"] is None
    assert [t["top_logprobs"] for t in chosen["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_a_chat_stream_tells_them_chunk_by_chunk(run_stack: Any) -> None:
    async with run_stack(hello) as stack:
        events = await stack.events(logprobs=True, top_logprobs=2)
        plain = await stack.events()
    chunks = [data["choices"][0] for _, data in events if data != "[DONE]"]
    told = [c for c in chunks if c["delta"].get("content")]
    assert [c["logprobs"]["content"] for c in told] == [
        [expected(token, 2)] for token in ids("Hello world")
    ]
    assert [c["logprobs"] for c in chunks if c not in told] == [None, None]
    assert [c["choices"][0]["logprobs"] for _, c in plain[:-1]] == [None] * 4


async def test_a_resumed_stream_tells_the_same(run_stack: Any) -> None:
    """By Last-Event-ID: the rest of the events are those of the undisturbed stream."""
    async with run_stack(hello) as stack:
        asked = stack.body(stream=True, logprobs=True, top_logprobs=1)
        header = {"x-diptych-resume": "1"}
        path = "/v1/chat/completions"
        first = await stack.client.post(path, json=asked, headers=header)
        events = first.text.split("\n\n")
        (request,) = stack.fleet.requests
        record = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("s1"),
            gateway=request.gateway,
            state=RecordState.CLOSED,
            request_seq=1,
            head=request.head,
        )
        bucket = stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord)
        await bucket.put(request.request_id, record)
        last_seen = {"last-event-id": f"{request.request_id}:0"}
        again = await stack.client.post(path, json=asked, headers=last_seen)
    assert again.status_code == 200, again.text
    assert again.text.split("\n\n") == events[2:]
    assert '"logprobs":{"content":[{' in again.text


async def test_biased_tokens_travel_with_the_request_and_must_exist(run_stack: Any) -> None:
    vocab = tiny_card().vocab_size
    async with run_stack(hello) as stack:
        good = await stack.chat(logit_bias={"5": -100, "7": 2.5, "8": 0})
        bad = await stack.chat(logit_bias={str(vocab): 1})
        (request,) = stack.fleet.requests
    assert good.status_code == 200
    assert request.sampling.logit_bias == ((5, -100.0), (7, 2.5))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "logit_bias")
    assert f"below {vocab}, saw {vocab}" in bad.json()["error"]["message"]


INCLUDE = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


async def test_a_response_tells_its_logprobs_whole_streamed_and_stored(
    run_stack: Any, conforms: Any
) -> None:
    async with run_stack(hello) as stack:
        whole = (await stack.respond(**INCLUDE)).json()
        path = f"/v1/responses/{whole['id']}"
        stored = (await stack.client.get(path)).json()
        replayed = await stack.read(path)
        streamed = await stack.respond(stream=True, **INCLUDE)
        chosen = (await stack.respond(include=INCLUDE["include"])).json()
        plain = (await stack.respond()).json()
    conforms(whole)
    assert stored == whole
    told = [expected(token, 2) for token in ids("Hello world")]
    assert whole["output"][0]["content"][0]["logprobs"] == told
    assert whole["top_logprobs"] == 2
    for events in (replayed, parse(streamed.text)):
        for _, event in events:
            if event != "[DONE]":
                conforms(event)
        deltas = [e for _, e in events if e != "[DONE]" and e["type"].endswith("text.delta")]
        assert [d["logprobs"] for d in deltas] == [[one] for one in told]
        (done,) = [e for _, e in events if e != "[DONE]" and e["type"].endswith("text.done")]
        assert done["logprobs"] == told
    first = chosen["output"][0]["content"][0]["logprobs"]
    assert first == [{**one, "top_logprobs": []} for one in told]
    assert plain["output"][0]["content"][0]["logprobs"] == []


def parse(text: str) -> list[tuple[str | None, Any]]:
    found = []
    for block in filter(None, text.split("\n\n")):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line)
        data = fields["data"]
        found.append((fields.get("id"), data if data == "[DONE]" else json.loads(data)))
    return found


async def test_a_response_made_from_the_journal_tells_the_same(run_stack: Any) -> None:
    """Its gateway archived nothing: another reads the journal, as after a death."""
    async with run_stack(hello) as stack:
        whole = (await stack.respond(**INCLUDE)).json()
        bucket = stack.fleet.bus.bucket(RESPONSES, StoredResponse)
        kept = await bucket.get(whole["id"])
        running = msgspec.structs.replace(kept.value, answer=None)
        await bucket.put(whole["id"], running)
        request = stack.fleet.requests[0]
        record = RequestRecord(
            request_id=request.request_id,
            owner=Incarnation("s1"),
            gateway=request.gateway,
            state=RecordState.CLOSED,
            request_seq=1,
        )
        await stack.fleet.bus.bucket(REQUEST_RECORDS, RequestRecord).put(request.request_id, record)
        async with stack.another("gateway-00000000cccc") as other:
            again = (await other.get(f"/v1/responses/{whole['id']}")).json()
    for answer in (whole, again):
        answer.pop("completed_at")
    assert again == whole


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"include": ["message.input_image.image_url"]}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": ["x"] * 17}, "include"),
        ({"include": [7]}, "include[0]"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": "3"}, "top_logprobs"),
    ],
)
async def test_what_cannot_be_included_is_refused_by_name(
    run_stack: Any, changes: dict[str, Any], param: str
) -> None:
    async with run_stack(hello) as stack:
        answer = await stack.respond(**changes)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
