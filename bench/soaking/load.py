"""The clients of a soak: streams, whole answers, clients that leave, clients that come back.

The `sim` engine's greedy answer is a function of the prompt alone, so every answer is compared with
the first one to the same question.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from diptych_testkit.live_stack import MODEL

TOKENS = 24
CLIENT_S = 30.0
MAX_IN_FLIGHT = 200
_SYSTEMS = [f"You are assistant {n}. " + f"Rule {n}: be kind and brief. " * 12 for n in range(8)]
_QUESTIONS = [f"Question {n}: tell me a story that nobody has told." for n in range(64)]
_KINDS = {"stream": 55, "whole": 10, "leave": 20, "response": 10, "resume": 5}


class Broken(Exception):
    """An answer is not what it should be."""


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    ended: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    expected: dict[str, str] = field(default_factory=dict)

    def answered(self, question: str, text: str) -> None:
        """`text` is the answer to `question`. Raises `Broken` if it was another before."""
        if self.expected.setdefault(question, text) != text:
            raise Broken("another text than before")
        self.tokens += TOKENS


class Clients:
    """Requests of every kind, against one gateway."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self.tally = Tally()
        self.in_flight = 0

    async def closed_loop(self, clients: int, seconds: float) -> float:
        """What the stack carries: `clients` ask again at once; gives requests per second."""
        loop = asyncio.get_running_loop()
        end_s, before = loop.time() + seconds, self.tally.ended

        async def one_client() -> None:
            while loop.time() < end_s:
                await self._one()

        await asyncio.gather(*(one_client() for _ in range(clients)))
        return (self.tally.ended - before) / (loop.time() - end_s + seconds)

    async def offer(self, rate_per_s: float, seconds: float) -> None:
        """Requests that arrive at random moments, `rate_per_s` on average."""
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        end_s = next_s + seconds
        async with asyncio.TaskGroup() as tasks:
            while next_s < end_s:
                await asyncio.sleep(max(0.0, next_s - loop.time()))
                if self.in_flight < MAX_IN_FLIGHT:
                    tasks.create_task(self._one())
                else:
                    self.tally.errors["the stack fell behind: not sent"] += 1
                next_s += self._rng.expovariate(rate_per_s)

    async def _one(self) -> None:
        (kind,) = self._rng.choices(list(_KINDS), weights=list(_KINDS.values()))
        system, question = self._rng.choice(_SYSTEMS), self._rng.choice(_QUESTIONS)
        self.in_flight += 1
        try:
            async with asyncio.timeout(CLIENT_S):
                await self._ask(kind, system, question)
        except TimeoutError:
            self.tally.errors[f"{kind}: no end within {CLIENT_S:g} s"] += 1
        except (Broken, OSError, asyncio.IncompleteReadError) as err:
            self.tally.errors[f"{kind}: {err}"] += 1
        finally:
            self.in_flight -= 1
            self.tally.ended += 1
            self.tally.kinds[kind] += 1

    async def _ask(self, kind: str, system: str, question: str) -> None:
        match kind:
            case "stream":
                self.tally.answered(system + question, await self._stream(system, question))
            case "leave":
                await self._stream(system, question, leave_after=self._rng.randrange(TOKENS))
            case "whole":
                self.tally.answered(system + question, await self._whole(system, question))
            case "response":
                self.tally.answered("r" + question, await self._response(system, question))
            case _:
                text = await self._response(system, question, drop_at=4 + self._rng.randrange(12))
                self.tally.answered("r" + question, text)

    async def _stream(self, system: str, question: str, leave_after: int | None = None) -> str:
        text, finish = "", None
        body = _chat(system, question, stream=True)
        async with _Exchange(self._port, "POST", "/v1/chat/completions", body) as answer:
            if leave_after == 0:
                return ""
            await answer.head()
            seen = 0
            async for data in answer.events():
                if data == b"[DONE]":
                    return _whole_text(text, finish)
                (choice,) = _parsed(data)["choices"]
                text += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
                seen += 1
                if seen == leave_after:
                    return ""
        raise Broken("the stream broke off")

    async def _whole(self, system: str, question: str) -> str:
        body = _chat(system, question, stream=False)
        async with _Exchange(self._port, "POST", "/v1/chat/completions", body) as answer:
            await answer.head()
            (choice,) = json.loads(await answer.whole())["choices"]
        return _whole_text(choice["message"]["content"], choice["finish_reason"])

    async def _response(self, system: str, question: str, drop_at: int | None = None) -> str:
        """A stored response, read in one go or in two."""
        seen = _Events()
        body = _stored(question)
        async with _Exchange(self._port, "POST", "/v1/responses", body) as answer:
            await answer.head()
            await seen.read(answer, until=drop_at)
        if drop_at is not None:
            path = f"/v1/responses/{seen.response_id}?stream=true&starting_after={seen.last}"
            async with _Exchange(self._port, "GET", path, None) as answer:
                await answer.head()
                await seen.read(answer)
        if not seen.over:
            raise Broken("the response broke off")
        return seen.text


class _Events:
    """The events of a response, in order and without a gap."""

    def __init__(self) -> None:
        self.last = -1
        self.text = ""
        self.response_id = ""
        self.over = False

    async def read(self, answer: "_Exchange", until: int | None = None) -> None:
        async for data in answer.events():
            if data == b"[DONE]":
                return
            event = _parsed(data)
            if event["sequence_number"] != self.last + 1:
                raise Broken(f"event {event['sequence_number']} after {self.last}")
            self.last += 1
            if event["type"] == "response.created":
                self.response_id = event["response"]["id"]
            elif event["type"] == "response.output_text.delta":
                self.text += event["delta"]
            elif event["type"] == "response.incomplete":
                self.over = True
            if self.last == until:
                return


class _Exchange:
    """One request on a connection of its own; as much HTTP as that takes."""

    def __init__(self, port: int, method: str, path: str, body: bytes | None) -> None:
        head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        self._port = port
        self._request = head.encode() + b"\r\n" + (body or b"")
        self._chunked = False

    async def __aenter__(self) -> "_Exchange":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(self._request)
        await self._writer.drain()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def head(self) -> None:
        """Read status and headers. Raises `Broken` unless all is well."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        self._chunked = b"transfer-encoding: chunked" in head.lower()
        status = head.split(b" ", 2)[1].decode()
        if status != "200":
            raise Broken(f"status {status}: {(await self.whole())[:120].decode(errors='replace')}")

    async def whole(self) -> bytes:
        """The rest of the body."""
        if not self._chunked:
            return await self._reader.read()
        return b"".join([part async for part in self._chunks()])

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event."""
        async for part in self._chunks():
            for event in part.split(b"\n\n"):
                data = [line for line in event.split(b"\n") if line.startswith(b"data: ")]
                if data:
                    yield data[0][6:]

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readline(), 16):
            part = await self._reader.readexactly(size)
            await self._reader.readexactly(2)
            yield part


def _parsed(data: bytes) -> dict[str, Any]:
    """An event. Raises `Broken` if it is an error."""
    event: dict[str, Any] = json.loads(data)
    if event.get("error"):
        raise Broken(f"error event: {str(event['error'])[:120]}")
    return event


def _chat(system: str, question: str, *, stream: bool) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    return json.dumps(body).encode()


def _stored(question: str) -> bytes:
    body = {
        "model": MODEL,
        "input": question,
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return json.dumps(body).encode()


def _whole_text(text: str, finish: str | None) -> str:
    if finish != "length":
        raise Broken(f"finish reason {finish!r}")
    return text
