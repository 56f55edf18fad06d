"""Server-sent events of an engine. `[DONE]` says that no more come, not that all went well."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from diptych_contracts.errors import EngineGone
from diptych_engine.over_http.reading import from_json
from diptych_engine.over_http.refusals import refusal

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""A longer event is none an engine sends: 20 logprobs of a token are some 2 kB."""
_DONE = b"[DONE]"


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each event up to the end or `[DONE]`.

    Args:
        chunks: The body as it comes.

    Raises:
        Refused, Permanent, EngineGone: an event tells of an error, as engines do once the status
            200 is out; or an event is longer than `MAX_EVENT_BYTES`.
    """
    async for data in events_of(chunks):
        see_error(data)
        yield data


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The same, whatever the events say. Raises `EngineGone` for one that is too long.

    A line ends with a line feed and nothing else: U+2028 and its kind stand within JSON.
    """
    rest, size = b"", 0
    lines: list[bytes] = []
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
                size += len(line)
            elif not line and lines:
                data, lines, size = b"\n".join(lines), [], 0
                if data == _DONE:
                    return
                yield data
        if size + len(rest) > MAX_EVENT_BYTES:
            raise EngineGone(f"an event of more than {MAX_EVENT_BYTES} bytes")


def see_error(data: bytes) -> None:
    """Raise what an answer or an event tells of, if it is an error, whatever its status was."""
    if b'"error"' not in data:
        return
    try:
        event: Any = from_json(data)
    except msgspec.DecodeError as err:
        raise EngineGone(f"an answer that is no JSON: {err}") from err
    if not isinstance(event, dict):
        return
    if event.get("error") is not None or event.get("object") == "error":
        raise refusal(500, data)
