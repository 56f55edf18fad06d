"""What an OpenAI-compatible server sends: its events, as types, and how an answer went."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

_DONE = b"[DONE]"


class Delta(msgspec.Struct):
    content: str | None = None


class Choice(msgspec.Struct):
    delta: Delta = msgspec.field(default_factory=Delta)
    finish_reason: str | None = None


class Joules(msgspec.Struct):
    total: float = 0.0


class PathTaken(msgspec.Struct):
    """Diptych's own words about an answer."""

    mode: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    link: str = ""
    attempt: int = 1
    ttft_ms: float = 0.0
    joules: Joules = msgspec.field(default_factory=Joules)
    energy_source: str = ""


class Usage(msgspec.Struct):
    completion_tokens: int = 0
    diptych: PathTaken | None = None


class Problem(msgspec.Struct):
    message: str = ""


class Event(msgspec.Struct):
    """One chunk of a streamed answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Problem | None = None

    @property
    def text(self) -> str:
        """What it adds to the answer."""
        return "".join(choice.delta.content or "" for choice in self.choices)

    @property
    def finish_reason(self) -> str:
        """Why the answer ends with it; empty if it goes on."""
        return next((c.finish_reason for c in self.choices if c.finish_reason), "")


@dataclass(frozen=True, slots=True)
class Taken:
    """How long an answer took, as seen from here."""

    first_s: float
    """Until the first text."""
    rest_s: float
    """From there to the last."""


def events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events in the lines of an event stream.

    Raises:
        msgspec.DecodeError: the server sent something else.
    """
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == _DONE:
            return
        yield msgspec.json.decode(data, type=Event)


def summary(usage: Usage | None, taken: Taken, finish_reason: str) -> str:
    """One line about how an answer came about; other servers tell less than Diptych."""
    path = usage.diptych if usage else None
    parts = _way(path) if path else []
    ttft_ms = path.ttft_ms if path else taken.first_s * 1000
    parts.append(f"first token {ttft_ms:.0f} ms")
    if usage and usage.completion_tokens > 1 and taken.rest_s > 0:
        parts.append(f"{(usage.completion_tokens - 1) / taken.rest_s:.1f} tokens/s")
    if usage:
        parts.append(f"{usage.completion_tokens} tokens")
    if path:
        parts.append(f"{path.joules.total:.1f} J ({path.energy_source})")
    if finish_reason == "length":
        parts.append("cut at its longest")
    return " · ".join(parts)


def _way(path: PathTaken) -> list[str]:
    workers = path.decode_worker
    if path.prefill_worker and path.prefill_worker != path.decode_worker:
        workers = f"{path.prefill_worker} → {path.decode_worker}"
    if path.link:
        workers += f" over {path.link}"
    again = [f"attempt {path.attempt}"] if path.attempt > 1 else []
    return [path.mode, workers, *again]
