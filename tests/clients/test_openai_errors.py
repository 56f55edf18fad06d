"""Every class of error that the stock client knows, as far as a gateway gives it; and retries."""

import json
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from diptych_testkit.live_stack import MODEL, LiveStack

pytestmark = pytest.mark.clients

HELLO: Any = [{"role": "user", "content": "Hello"}]
LONG: Any = {
    "model": MODEL,
    "messages": HELLO,
    "max_tokens": 1500,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}
OBEYED_S = 60
"""A longer `Retry-After` the library does not heed."""
ONE: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 1}


@pytest.fixture
def once(client: openai.OpenAI) -> openai.OpenAI:
    """A client that repeats nothing."""
    return client.with_options(max_retries=0)


def asked(seen: pytest.ExceptionInfo[openai.APIStatusError]) -> tuple[int, str | None, str | None]:
    """Status, code and parameter; every error says what it is, and of which request."""
    error = seen.value
    assert error.message
    assert error.type
    assert error.request_id
    return error.status_code, error.code, error.param


def hearing(status: int, act: Callable[[], object], heard: list[httpx.Response]) -> httpx.Client:
    """What a client sends with that does `act` at the first answer of that status."""

    def told(response: httpx.Response) -> None:
        if response.status_code == status:
            heard.append(response)
            if len(heard) == 1:
                act()

    return httpx.Client(event_hooks={"response": [told]}, timeout=240)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"temperature": 9}, "invalid_value", "temperature"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "invalid_value", "messages[0].role"),
        ({"max_tokens": "many"}, "invalid_type", "max_tokens"),
        ({"extra_body": {"nonsense": 1}}, "unknown_parameter", "nonsense"),
        ({"messages": openai.omit}, "missing_required_parameter", "messages"),
    ],
)
def test_400_names_the_parameter(
    once: openai.OpenAI, changes: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as seen:
        once.post("/chat/completions", body=_body(changes), cast_to=object)
    assert asked(seen) == (400, code, param)


def _body(changes: dict[str, Any]) -> dict[str, Any]:
    body = ONE | changes
    body |= body.pop("extra_body", {})
    return {name: value for name, value in body.items() if value is not openai.omit}


def test_400_a_context_that_is_too_long(once: openai.OpenAI) -> None:
    words = "word " * 20_000
    with pytest.raises(openai.BadRequestError) as seen:
        once.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": words}])
    assert asked(seen) == (400, "context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as seen:
        once.responses.create(model=MODEL, input=words)
    assert asked(seen) == (400, "context_length_exceeded", "input")


def test_404_a_model_a_response_a_path(once: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as seen:
        once.chat.completions.create(model="nobody", messages=HELLO)
    assert asked(seen) == (404, "model_not_found", "model")
    with pytest.raises(openai.NotFoundError) as seen:
        once.responses.retrieve("resp_nobody")
    assert asked(seen) == (404, "response_not_found", "response_id")
    with pytest.raises(openai.NotFoundError) as seen:
        once.moderations.create(input="Hello")
    assert asked(seen) == (404, "not_found", None)


def test_405_and_415(once: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as seen:
        once.get("/chat/completions", cast_to=object)
    assert asked(seen)[:2] == (405, "method_not_allowed")
    with pytest.raises(openai.APIStatusError) as seen:
        once.post(
            "/chat/completions",
            body=ONE,
            cast_to=object,
            options={"headers": {"content-type": "text/plain"}},
        )
    assert asked(seen)[:2] == (415, "unsupported_media_type")


def test_408_a_body_that_does_not_come(one_more_gateway: Callable[..., Any]) -> None:
    gateway = one_more_gateway(BODY_S="0.2")
    port = int(gateway.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=120) as line:
        line.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            b"content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
        )
        answer = b""
        while piece := line.recv(65536):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    assert json.loads(body)["error"]["code"] == "body_timeout"


def test_409_a_turn_on_a_response_that_still_runs(once: openai.OpenAI) -> None:
    """The library repeats it, and succeeds once the earlier one has ended."""
    running = once.responses.create(
        model=MODEL, input="Hello", max_output_tokens=1500, background=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    turn: Any = {
        "model": MODEL,
        "input": "Go on.",
        "previous_response_id": running.id,
        "max_output_tokens": 1,
    }
    with pytest.raises(openai.ConflictError) as seen:
        once.responses.create(**turn)
    assert asked(seen) == (409, "previous_response_in_progress", "previous_response_id")
    http = hearing(409, lambda: once.responses.cancel(running.id), [])
    with once.with_options(max_retries=6, http_client=http) as patient:
        raw = patient.responses.with_raw_response.create(**turn)
    assert raw.retries_taken >= 1
    assert raw.parse().previous_response_id == running.id


def test_413_a_body_that_is_too_large(once: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as seen:
        once.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * (9 * 1024 * 1024)}]
        )
    assert asked(seen) == (413, "body_too_large", None)


def test_429_and_its_retry_after_is_obeyed(one_more_gateway: Callable[..., Any]) -> None:
    """A gateway with one place, which is taken: the library waits as long as it is told."""
    gateway = one_more_gateway(MAX_IN_FLIGHT="1")
    heard: list[httpx.Response] = []
    http = hearing(429, lambda: holder.close(), heard)
    with gateway.client() as once, gateway.client(max_retries=8, http_client=http) as patient:
        holder = once.chat.completions.create(**LONG)
        next(iter(holder))
        with pytest.raises(openai.RateLimitError) as seen:
            once.chat.completions.create(**ONE)
        assert asked(seen) == (429, "rate_limit_exceeded", None)
        assert 1 <= int(seen.value.response.headers["retry-after"]) <= 120
        began_s = time.monotonic()
        raw = patient.chat.completions.with_raw_response.create(**ONE)
        assert raw.retries_taken >= 1
        took_s = time.monotonic() - began_s
        waits = [int(response.headers["retry-after"]) for response in heard]
        obeyed = [wait for wait in waits if wait <= OBEYED_S]
        assert took_s >= sum(obeyed), "not sooner"
        assert raw.parse().choices[0].finish_reason == "length"


def ask_until_refused(once: openai.OpenAI) -> None:
    for _ in range(200):
        once.chat.completions.create(**ONE)


def test_503_and_an_error_in_the_middle_of_a_stream(
    one_more_gateway: Callable[..., Any],
) -> None:
    """A gateway that shuts down takes nothing new, and tells those it cannot finish."""
    gateway = one_more_gateway(DRAIN_S="12")
    with gateway.client() as once:
        stream = once.chat.completions.create(**LONG | {"max_tokens": 3000})
        next(iter(stream))
        once.chat.completions.create(**ONE)  # whose connection stays open
        gateway.process.signal(signal.SIGTERM)
        with pytest.raises(openai.InternalServerError) as refused:
            ask_until_refused(once)
        assert asked(refused) == (503, "draining", None)
        assert int(refused.value.response.headers["retry-after"]) >= 1
        with pytest.raises(openai.APIError, match="shutting down") as seen:
            list(stream)
        assert seen.value.code == "draining"


def test_504_a_deadline_that_passed_is_not_repeated(one_more_gateway: Callable[..., Any]) -> None:
    """Its tokens were paid for: `x-should-retry: false` keeps the library from paying again."""
    gateway = one_more_gateway(TOTAL_S="4")
    with gateway.client(max_retries=3) as patient:
        with pytest.raises(openai.InternalServerError) as seen:
            patient.chat.completions.create(**LONG | {"stream": False})
        assert asked(seen) == (504, "expired", None)
        assert seen.value.response.headers["x-should-retry"] == "false"
        repeated = int(seen.value.response.request.headers["x-stainless-retry-count"])
        assert repeated < 3, "only what had no token yet, on a busy machine, is repeated"
        with pytest.raises(openai.APIError) as late:
            list(patient.chat.completions.create(**LONG))
        assert late.value.code == "expired"


def test_503_while_the_bus_is_away_and_then_it_heals(
    stack: LiveStack, one_more_gateway: Callable[..., Any]
) -> None:
    once = one_more_gateway(ACCEPT_S="2").client()
    stack.nats.freeze()
    try:
        with pytest.raises(openai.InternalServerError) as seen:
            once.chat.completions.create(**ONE)
    finally:
        stack.nats.thaw()
    assert asked(seen)[0] == 503
    assert int(seen.value.response.headers["retry-after"]) >= 1
    again = once.with_options(max_retries=10).chat.completions.create(**ONE)
    assert again.choices[0].finish_reason == "length"
    once.close()
