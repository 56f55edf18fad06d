"""Clients of the stack: they stream, leave, cancel, and come back at another gateway."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from diptych_testkit.chaos.asking import (
    Api,
    Ask,
    Leaving,
    Prompt,
    chat_body,
    response_body,
)
from diptych_testkit.chaos.checking import Outcome, Piece, Told

LIMIT_S = 150.0
"""A request that has no terminal event after this is called hung."""
SILENCE_S = 25.0
"""A live gateway sends a keep-alive every 10 s; frozen ones thaw after 8 s."""
FLOWING_S = 2.0
_LOOK_S = 0.1
_PAUSE_S = 0.2
_FIRST_DELTA = 4
"""The number of a response's first piece of text: see docs/responses.md."""
_NOT_ACCEPTED = frozenset({"unavailable", "draining", "rate_limit_exceeded", "overloaded"})
_GONE = frozenset({404, 410})


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    id: str
    data: dict[str, Any] | None
    """None: the end mark."""


class Left(Exception):
    """The client hangs up."""


async def events(lines: AsyncIterator[str]) -> AsyncIterator[Event]:
    """The events in a body's lines; comments are passed over."""
    event_id = ""
    async for line in lines:
        if line.startswith("id: "):
            event_id = line[4:]
        elif line == "data: [DONE]":
            yield Event(event_id, None)
        elif line.startswith("data: "):
            yield Event(event_id, json.loads(line[6:]))


class Clients:
    """Makes requests at any of several gateways.

    Args:
        urls: One per gateway replica, up to `/v1`.
        model: Whose answers.
        prompts: The catalogue.
    """

    def __init__(self, urls: Sequence[str], model: str, prompts: Sequence[Prompt]) -> None:
        self._urls = urls
        self._model = model
        self._prompts = prompts
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(SILENCE_S, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )
        self._telling: dict[int, Told] = {}

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()

    @property
    def in_flight(self) -> int:
        """Requests being made or answered."""
        return len(self._telling)

    @property
    def flowing(self) -> bool:
        """Whether every answer that has begun had a piece of text lately."""
        now_s = time.monotonic()
        began = [told for told in self._telling.values() if told.times_s]
        return all(now_s - told.times_s[-1] < FLOWING_S for told in began)

    async def until_flowing(self, timeout_s: float) -> None:
        """Wait for `flowing`, `timeout_s` at most."""
        for _ in range(round(timeout_s / _LOOK_S)):
            if self.flowing:
                return
            await asyncio.sleep(_LOOK_S)

    async def tell(self, ask: Ask, gateway: int) -> Told:
        """Make one request, to its end or the client's."""
        told = Told(ask, time.monotonic(), gateway % len(self._urls))
        self._telling[id(told)] = told
        try:
            async with asyncio.timeout(LIMIT_S):
                await self._with_patience(told)
        except TimeoutError:
            told.outcome, told.detail = Outcome.HUNG, f"nothing ended it in {LIMIT_S:g} s"
        finally:
            del self._telling[id(told)]
            told.ended_s = time.monotonic()
        return told

    async def _with_patience(self, told: Told) -> None:
        ask = told.ask
        early_s = ask.after_s if ask.leaving is Leaving.EARLY else None
        try:
            async with asyncio.timeout(early_s):
                await (self._chat if ask.api is Api.CHAT else self._response)(told)
        except Left:
            told.outcome = Outcome.CANCELLED
        except TimeoutError:
            if early_s is None:
                raise
            told.outcome = Outcome.CANCELLED

    # Chat

    async def _chat(self, told: Told) -> None:
        ask = told.ask
        body = chat_body(ask, self._prompts[ask.prompt], self._model)
        headers = {"x-diptych-resume": "1"} if ask.resume else {}
        try:
            async with self._http.stream(
                "POST", f"{self._urls[told.gateway]}/chat/completions", json=body, headers=headers
            ) as answer:
                told.request_id = answer.headers.get("x-request-id", "")
                if answer.status_code != httpx.codes.OK:
                    _turned_down(told, answer.status_code, await answer.aread())
                    return
                async for event in events(answer.aiter_lines()):
                    _chat_event(told, event)
                    _leave_midway(told)
        except httpx.ConnectError as err:
            told.outcome, told.detail = Outcome.REFUSED, repr(err)
            return
        except httpx.ReadTimeout as err:
            told.outcome, told.detail = Outcome.HUNG, f"{SILENCE_S:g} s of silence: {err!r}"
            return
        except httpx.TransportError as err:
            _broken_off(told, repr(err))
        if not told.ends:
            _broken_off(told, "the stream ended in the middle")

    # Responses

    async def _response(self, told: Told) -> None:
        ask = told.ask
        body = response_body(ask, self._prompts[ask.prompt], self._model)
        await self._read(told, "POST", f"{self._urls[told.gateway]}/responses", json=body)
        at = told.gateway
        while not told.ends and told.outcome is not Outcome.REFUSED:
            if not told.request_id:
                _broken_off(told, told.detail)
                return
            at += 1
            told.resumed += 1
            await asyncio.sleep(_PAUSE_S)
            after = {"stream": "true"} | _starting_after(told)
            url = f"{self._urls[at % len(self._urls)]}/responses/resp_{told.request_id}"
            await self._read(told, "GET", url, params=after)

    async def _read(self, told: Told, method: str, url: str, **asked: Any) -> None:
        """Read what one connection brings. Without an end `told.detail` says why."""
        try:
            async with self._http.stream(method, url, **asked) as answer:
                if answer.status_code != httpx.codes.OK:
                    body = await answer.aread()
                    if method == "POST" or answer.status_code in _GONE:
                        _turned_down(told, answer.status_code, body)
                    told.detail = f"{answer.status_code}: {body[:200]!r}"
                    return
                async for event in events(answer.aiter_lines()):
                    _response_event(told, event)
                    await self._leave_response(told)
        except httpx.ConnectError as err:
            told.detail = repr(err)
            if method == "POST":
                told.outcome = Outcome.REFUSED
        except httpx.TransportError as err:
            told.detail = repr(err)

    async def _leave_response(self, told: Told) -> None:
        _leave_midway(told)
        ask = told.ask
        if ask.leaving is Leaving.CANCEL and len(told.pieces) == ask.after_pieces:
            url = f"{self._urls[told.gateway]}/responses/resp_{told.request_id}/cancel"
            with contextlib.suppress(httpx.TransportError):
                await self._http.post(url)


def _starting_after(told: Told) -> dict[str, str]:
    if not told.pieces:
        return {}
    return {"starting_after": str(told.pieces[-1].place + _FIRST_DELTA)}


def _leave_midway(told: Told) -> None:
    ask = told.ask
    if ask.leaving is Leaving.MIDWAY and len(told.pieces) >= ask.after_pieces:
        raise Left


def _turned_down(told: Told, status: int, body: bytes) -> None:
    told.detail = f"{status}: {body[:300].decode(errors='replace')}"
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        code = ""
    if code in _NOT_ACCEPTED:
        told.outcome = Outcome.REFUSED
        return
    _end(told, Outcome.FAILED)


def _broken_off(told: Told, detail: str) -> None:
    told.outcome, told.detail = Outcome.BROKEN, detail


def _end(told: Told, outcome: Outcome) -> None:
    told.ends += 1
    told.outcome = outcome


def _chat_event(told: Told, event: Event) -> None:
    if event.data is None:
        _end(told, Outcome.FINISHED)
        return
    if error := event.data.get("error"):
        told.detail = str(error)
        _end(told, Outcome.FAILED)
        return
    for choice in event.data["choices"]:
        text = choice["delta"].get("content")
        if text:
            place = int(event.id.rpartition(":")[2])
            told.say(Piece(place, text), time.monotonic())
        told.finish = choice["finish_reason"] or told.finish


def _response_event(told: Told, event: Event) -> None:
    if event.data is None:
        return
    kind = event.data["type"]
    if kind == "response.output_text.delta":
        place = event.data["sequence_number"] - _FIRST_DELTA
        told.say(Piece(place, event.data["delta"]), time.monotonic())
    elif kind == "response.created":
        told.request_id = event.data["response"]["id"].removeprefix("resp_")
    elif kind == "response.completed":
        told.finish = "stop"
        _end(told, Outcome.FINISHED)
    elif kind == "response.incomplete":
        cancelled = event.data["response"]["status"] == "cancelled"
        told.finish = "length"
        _end(told, Outcome.CANCELLED if cancelled else Outcome.FINISHED)
    elif kind == "response.failed":
        told.detail = str(event.data["response"].get("error"))
        _end(told, Outcome.FAILED)
    elif kind == "error":
        told.detail = str(event.data)
