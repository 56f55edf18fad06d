"""`diptych chat`: a conversation in the terminal, with any OpenAI-compatible server."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from diptych_cli.answers import Event, Taken, Usage, events, summary
from diptych_cli.asking import Server
from diptych_cli.failing import CliError

_PROMPT = "\n> "
_NEW = "/new"
_HELLO = "Ctrl-C stops an answer, /new starts over, Ctrl-D leaves."
_SHOWN_CONTROLS = "\n\t"
_HIDDEN = {n: None for n in (*range(32), 127, *range(128, 160)) if chr(n) not in _SHOWN_CONTROLS}
"""What a model writes must not steer the terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How to ask."""

    model: str | None
    system: str
    temperature: float | None
    max_tokens: int | None


@dataclass(slots=True)
class Answer:
    """One answer while it comes."""

    asked_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    last_s: float = 0.0
    text: str = ""
    usage: Usage | None = None
    finish_reason: str = ""

    def take(self, event: Event) -> str:
        """Add an event; gives the text it brought."""
        if event.error is not None:
            raise CliError(event.error.message or "the answer failed")
        self.usage = event.usage or self.usage
        self.finish_reason = event.finish_reason or self.finish_reason
        if event.text:
            self.last_s = time.monotonic()
            self.first_s = self.first_s or self.last_s
            self.text += event.text
        return event.text

    @property
    def summary(self) -> str:
        """How it went."""
        taken = Taken(self.first_s - self.asked_s, self.last_s - self.first_s)
        return summary(self.usage, taken, self.finish_reason)


class Conversation:
    """Turns that follow one another.

    Args:
        server: Who answers.
        model: The model's id there.
        options: How to ask.
    """

    def __init__(self, server: Server, model: str, options: ChatOptions) -> None:
        self._server = server
        self._model = model
        self._options = options
        self._turns: list[dict[str, str]] = []

    def restart(self) -> None:
        """Forget every turn."""
        self._turns.clear()

    def ask(self, question: str) -> Answer:
        """Print the answer as it comes; Ctrl-C stops it, and what came stays in the conversation.

        Raises:
            CliError: there is none; the question is forgotten.
        """
        self._turns.append({"role": "user", "content": question})
        answer = Answer()
        try:
            with self._server.chat(self._body()) as lines:
                for event in _events(lines):
                    _print(answer.take(event))
        except KeyboardInterrupt:
            answer.finish_reason = "stopped"
        except CliError:
            self._turns.pop()
            raise
        finally:
            _print("\n")
        self._turns.append({"role": "assistant", "content": answer.text})
        return answer

    def _body(self) -> dict[str, Any]:
        options = self._options
        system = [{"role": "system", "content": options.system}] if options.system else []
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [*system, *self._turns],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        wishes = {"temperature": options.temperature, "max_tokens": options.max_tokens}
        return body | {name: value for name, value in wishes.items() if value is not None}


def chat(server: Server, options: ChatOptions, question: str) -> int:
    """One question, or a conversation until the input ends.

    Raises:
        CliError: the server cannot be reached; in one-question mode also when it refuses.
    """
    conversation = Conversation(server, options.model or _only_model(server), options)
    if question:
        _tell(conversation.ask(question))
        return 0
    talking = sys.stdin.isatty()
    if talking:
        _dim(_HELLO)
    failures = 0
    for line in _typed() if talking else sys.stdin:
        failures += _turn(conversation, line.strip(), talking=talking)
    return 1 if failures else 0


def _turn(conversation: Conversation, question: str, *, talking: bool) -> int:
    """One line of the input; gives 1 where it failed."""
    if question == _NEW:
        conversation.restart()
    elif question:
        try:
            _tell(conversation.ask(question))
        except CliError as err:
            sys.stderr.write(f"diptych: {err}\n")
            if talking:
                _dim(f"{_NEW} starts over")
            return 1
    return 0


def _typed() -> Iterator[str]:
    """What the user types, until Ctrl-D, or Ctrl-C where no answer comes."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # makes `input` editable
    while True:
        try:
            yield input(_PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _only_model(server: Server) -> str:
    models = server.models()
    if not models:
        raise CliError(f"{server.base_url} serves no model at the moment")
    return models[0]


def _events(lines: Iterator[bytes]) -> Iterator[Event]:
    try:
        yield from events(lines)
    except msgspec.DecodeError as err:
        raise CliError(f"the server sent something that is no event: {err}") from err


def _tell(answer: Answer) -> None:
    if answer.finish_reason == "stopped":
        _dim("stopped")
    elif answer.text:
        _dim(answer.summary)


def _print(text: str) -> None:
    sys.stdout.write(text.translate(_HIDDEN))
    sys.stdout.flush()


def _dim(text: str) -> None:
    """For the reader beside the answer, not part of it."""
    start, end = ("\x1b[2m", "\x1b[0m") if sys.stderr.isatty() else ("", "")
    sys.stderr.write(f"{start}{text}{end}\n")
    sys.stderr.flush()
