"""Server-sent events of an engine. `[DONE]` says that no more come, not that all went well."""

from collections.abc import AsyncIterator
from typing import Any

import msgspec

from diptych_contracts.errors import EngineGone
from diptych_engine.over_http.refusals import refusal

MAX_EVENT_BYTES = 4 * 1024 * 1024
"""A longer event is none an engine sends: 20 logprobs of a token are some 2 kB."""
_DONE = b"[DONE]"


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each event up to the end or `[DONE]`.

    Args:
        chunks: The body as it comes.

    Raises:
        Refused, Permanent, EngineGone: an event tells of an error, as engines do once the status
            200 is out; or an event is longer than `MAX_EVENT_BYTES`.
    """
    rest = b""
    lines: list[bytes] = []
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        if len(rest) > MAX_EVENT_BYTES:
            raise EngineGone(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in whole:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif not line and lines:
                data, lines = b"\n".join(lines), []
                if data == _DONE:
                    return
                _see_error(data)
                yield data


def _see_error(data: bytes) -> None:
    if b'"error"' not in data:
        return
    try:
        event: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as err:
        raise EngineGone(f"an event that is no JSON: {err}") from err
    if not isinstance(event, dict):
        return
    if event.get("error") is not None or event.get("object") == "error":
        raise refusal(500, data)
