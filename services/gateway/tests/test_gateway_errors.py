"""Every error has one answer."""

import json
from random import Random
from typing import Any

import pytest

from diptych_contracts.dead import Cause
from diptych_contracts.errors import (
    BusAway,
    Conflict,
    ContextOverflow,
    DiptychError,
    Expired,
    InvalidRequest,
    Permanent,
    Transient,
    UnknownModel,
)
from diptych_contracts.ids import RequestId
from diptych_contracts.journal import End, EndReason
from diptych_gateway.doors.envelope import Envelope
from diptych_gateway.errors import ApiError, from_end, from_error

TREE: list[tuple[DiptychError, int, str, str]] = [
    (InvalidRequest("x", param="p", code="c"), 400, "invalid_request_error", "c"),
    (InvalidRequest("x"), 400, "invalid_request_error", "invalid_value"),
    (UnknownModel("x"), 404, "invalid_request_error", "model_not_found"),
    (ContextOverflow("x"), 400, "invalid_request_error", "context_length_exceeded"),
    (BusAway("x"), 503, "server_error", "unavailable"),
    (Transient("x"), 503, "server_error", "unavailable"),
    (Expired("x"), 504, "server_error", "deadline_exceeded"),
    (Permanent("x"), 500, "server_error", "permanent_failure"),
    (Conflict("x"), 500, "server_error", "internal_error"),
    (ApiError(401, "x", code="no_key"), 401, "authentication_error", "no_key"),
]


@pytest.mark.parametrize(("err", "status", "kind", "code"), TREE, ids=repr)
def test_each_error_has_its_status(err: DiptychError, status: int, kind: str, code: str) -> None:
    found = from_error(err)
    error = json.loads(found.body)["error"]
    assert (found.status, error["type"], error["code"]) == (status, kind, code)


def test_what_nobody_foresaw_tells_nothing_of_itself() -> None:
    assert b"10.1.2.3" not in from_error(Conflict("at 10.1.2.3")).body


def test_within_a_stream_an_error_says_its_headers_too() -> None:
    said = json.loads(ApiError(503, "x", retry_after_s=2.0).late_body)["error"]
    assert said["headers"] == {"retry-after": "2"}
    assert "headers" not in json.loads(ApiError(500, "x").late_body)["error"]


@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        (EndReason.EXPIRED, 504, "expired"),
        (EndReason.CANCELLED, 503, "cancelled"),
        (EndReason.FAILED, 500, "failed"),
    ],
)
@pytest.mark.parametrize("produced", [True, False])
def test_an_answer_that_did_not_finish(
    reason: EndReason, status: int, code: str, *, produced: bool
) -> None:
    error = from_end(End(request_id=RequestId("r"), attempt=1, reason=reason), produced=produced)
    assert error is not None
    assert (error.status, error.code, error.should_retry) == (status, code, not produced)


def test_what_may_be_repeated_says_when() -> None:
    assert (b"retry-after", b"1") in from_error(BusAway("x")).headers
    assert (b"retry-after", b"3") in ApiError(429, "x", retry_after_s=2.1).headers


class Client:
    """A hand-written ASGI client."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


SCOPE = {"type": "http", "method": "GET", "path": "/x", "headers": []}


async def test_a_bug_in_a_handler_is_a_500_with_an_id() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("secret")

    client = Client()
    await Envelope(app, rng=Random(1), endpoint=str)(dict(SCOPE), client.receive, client.send)
    start, body = client.sent
    assert start["status"] == 500
    assert dict(start["headers"])[b"x-request-id"]
    assert b"internal error" in body["body"]
    assert b"secret" not in body["body"]


async def test_a_bug_after_the_first_byte_breaks_the_connection() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise KeyError("secret")

    client = Client()
    envelope = Envelope(app, rng=Random(1), endpoint=str)
    with pytest.raises(KeyError):
        await envelope(dict(SCOPE), client.receive, client.send)
    assert len(client.sent) == 1


@pytest.mark.parametrize("reason", [EndReason.FAILED, EndReason.EXPIRED])
def test_what_kills_its_workers_is_not_to_be_repeated(reason: EndReason) -> None:
    """Libraries repeat a 500 twice: that would take fifteen workers down, not five."""
    end = End(
        request_id=RequestId("r1"),
        attempt=5,
        reason=reason,
        detail="5 attempts were lost",
        cause=Cause.LOST_WORKERS,
    )
    error = from_end(end, produced=False)
    assert error is not None
    assert "5 attempts were lost" in str(error)
    assert (b"x-should-retry", b"false") in error.headers
