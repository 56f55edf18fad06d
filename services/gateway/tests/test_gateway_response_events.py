"""Events are a function of (response, tokens, end): numbers never depend on who asks, or when."""

import json
from typing import Any

import pytest

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import End, EndReason, Report
from diptych_contracts.responses import StoredAnswer, StoredMessage, StoredResponse
from diptych_contracts.sampling import Sampling
from diptych_gateway.keeping.archive import deltas
from diptych_gateway.responses.events import Event, ResponseEvents
from diptych_gateway.responses.objects import shown
from diptych_gateway.responses.part_events import replayed
from diptych_testkit.tiny_gguf import tiny_card
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

CODEC = TextCodec.from_card(tiny_card())
STORED = StoredResponse(
    request_id=RequestId("0" * 32),
    gateway=Incarnation("gateway-1"),
    journal_seq=7,
    model="tiny",
    created_unix_ms=1_700_000_000_123,
    deadline_unix_ms=1_700_003_600_123,
    prompt_tokens=3,
    sampling=Sampling(temperature=0.5),
    input=(StoredMessage(role="user", text="Hi"),),
    metadata=(("a", "b"),),
)
HEAD = ["response.created", "response.in_progress"]
OPENING = ["response.output_item.added", "response.content_part.added"]
CLOSING = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]
DELTA = "response.output_text.delta"


def answer(*pieces: str, reason: EndReason = EndReason.STOP, tokens: int = 5) -> StoredAnswer:
    end = End(request_id=STORED.request_id, attempt=1, reason=reason, report=Report(mode="local"))
    return StoredAnswer(deltas=pieces, tokens=tokens, end=end, ended_unix_s=1_700_000_009)


def made(given: StoredAnswer, *, after: int = -1, **options: Any) -> list[Event]:
    events = ResponseEvents(STORED, after=after, **options)
    out = events.start()
    for piece in given.deltas:
        out += events.delta(piece)
    return out + events.finish(given)


@pytest.mark.parametrize(
    ("given", "types"),
    [
        (answer("a", "b"), [*HEAD, *OPENING, DELTA, DELTA, *CLOSING, "response.completed"]),
        (
            answer("a", reason=EndReason.LENGTH),
            [*HEAD, *OPENING, DELTA, *CLOSING, "response.incomplete"],
        ),
        (answer(), [*HEAD, *OPENING, *CLOSING, "response.completed"]),
        (
            answer("a", reason=EndReason.CANCELLED),
            [*HEAD, *OPENING, DELTA, *CLOSING, "response.incomplete"],
        ),
        (
            answer("a", reason=EndReason.FAILED),
            [*HEAD, *OPENING, DELTA, *CLOSING, "response.failed"],
        ),
        (answer(reason=EndReason.EXPIRED), [*HEAD, "response.failed"]),
        (answer(tokens=0), [*HEAD, "response.completed"]),
    ],
)
def test_the_order_of_events(given: StoredAnswer, types: list[str], conforms: Any) -> None:
    events = made(given)
    assert [event.type for event in events] == types
    assert [event.number for event in events] == list(range(len(events)))
    for event in events:
        data = json.loads(event.data)
        assert (data["type"], data["sequence_number"]) == (event.type, event.number)
        conforms(data)


@pytest.mark.parametrize("after", range(-1, 12))
def test_going_on_after_a_number_gives_the_rest_byte_for_byte(after: int) -> None:
    given = answer("Hello", " ", "world")
    assert made(given, after=after) == made(given)[after + 1 :]


def test_a_replay_says_what_was_said_live() -> None:
    given = answer("Hello", " ", "world")
    assert [event for events in replayed(STORED, given) for event in events] == made(given)


@pytest.mark.parametrize("text", ["Hello world", "grüße 🙂 the end", "", "🙂"])
def test_the_pieces_of_a_whole_answer_are_those_of_its_tokens(text: str) -> None:
    ids = CODEC.encode(text, add_bos=False)
    one_by_one = AnswerText(CODEC)
    live = [piece for token in ids if (piece := one_by_one.push((token,)))]
    rest = one_by_one.finish()
    assert list(deltas(AnswerText(CODEC), ids)) == live + ([rest] if rest else [])
    assert "".join(live) + rest == text


def test_a_lane_is_echoed_by_every_event(conforms: Any) -> None:
    for event in made(answer("a"), stream_id="left"):
        data = json.loads(event.data)
        assert data["stream_id"] == "left"
        conforms(data)


def test_text_that_looks_like_an_event_stays_data() -> None:
    text = '","sequence_number":99}\n\ndata: [DONE]\u2028"'
    events = made(answer(text))
    data = json.loads(events[4].data)
    assert (data["delta"], data["sequence_number"]) == (text, 4)
    assert b"\n" not in events[4].data


@pytest.mark.parametrize(
    ("reason", "status", "why"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("cancelled", "cancelled", "cancelled"),
        ("failed", "failed", None),
        ("expired", "failed", None),
    ],
)
def test_the_status_of_an_ended_response(reason: str, status: str, why: str | None) -> None:
    import msgspec

    ended = msgspec.structs.replace(STORED, answer=answer("a", reason=EndReason(reason)))
    response = shown(ended)
    assert response.status == status
    assert (response.incomplete_details.reason if response.incomplete_details else None) == why
    assert (response.error is not None) == (status == "failed")
    assert (response.completed_at is not None) == (status == "completed")
    assert response.output[0].content[0].text == "a"
    assert response.usage is not None
    assert response.usage.total_tokens == 8
