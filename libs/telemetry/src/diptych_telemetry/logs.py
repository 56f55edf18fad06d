"""Structured logs: one line per fact, on standard error.

An event is a snake_case fact, its values are keys. Every line carries `ts`, `level`, `service` and
`incarnation`, and `trace_id` while a span is active. What a user wrote never reaches a log: values
of the keys in `PRIVATE` are replaced, and of a traceback only what repeats nothing is shown.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import structlog
from opentelemetry import trace
from structlog.typing import FilteringBoundLogger, Processor

from diptych_contracts.tracebacks import told

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

PRIVATE = frozenset({"prompt", "prompt_ids", "text", "messages", "content", "token_ids"})
_HIDDEN = "<private>"
_FIRST = ("ts", "level", "event")
_IDENTITY = ("service", "incarnation")

_encoder = msgspec.json.Encoder(enc_hook=repr)

Event = MutableMapping[str, Any]


def logger(name: str) -> FilteringBoundLogger:
    """Lines of one module; made once, at its top. Works before `setup`, too."""
    made: FilteringBoundLogger = structlog.get_logger(module=name)
    return made


def context(**values: Any) -> AbstractContextManager[None]:
    """Bind `values` to every line logged inside the `with`, in this task and its children."""
    return structlog.contextvars.bound_contextvars(**values)


def configure(*, level: str, text: bool, identity: Mapping[str, str]) -> None:
    """Set the process's log format.

    Raises:
        ValueError: if `level` is not one of `LEVELS`.
    """
    if level not in LEVELS:
        raise ValueError(f"log level: expected one of {', '.join(LEVELS)}, got {level!r}")
    structlog.configure(
        processors=_processors(text=text, identity=dict(identity)),
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    _adopt_libraries()


def render_text(event: Mapping[str, Any]) -> str:
    """One line a person can read: time, level, fact, values; a traceback follows it."""
    rest = {k: v for k, v in event.items() if k not in (*_FIRST, *_IDENTITY, "module")}
    trace_back = rest.pop("exception", None)
    time_of_day = str(event.get("ts", ""))[11:23]
    head = f"{time_of_day} {event.get('level', '')!s:<7} {event.get('event', '')}"
    line = " ".join([head, *(f"{key}={_shown(value)}" for key, value in rest.items())])
    return f"{line}\n{trace_back}" if trace_back else line


def _shown(value: Any) -> str:
    if not isinstance(value, str):
        return str(value)
    return repr(value) if not value or " " in value or "\n" in value else value


def _processors(*, text: bool, identity: dict[str, str]) -> list[Processor]:
    def identify(_: Any, __: str, event: Event) -> Event:
        return {**identity, **event}

    def to_text(_: Any, __: str, event: Event) -> str:
        return render_text(event)

    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        identify,
        _add_trace,
        structlog.processors.ExceptionRenderer(lambda info: told(info[1])),
        _hide_private,
        to_text if text else _to_json,
    ]


def _add_trace(_: Any, __: str, event: Event) -> Event:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = f"{span.trace_id:032x}"
    return event


def _hide_private(_: Any, __: str, event: Event) -> Event:
    for key in PRIVATE.intersection(event):
        event[key] = _HIDDEN
    return event


def _to_json(_: Any, __: str, event: Event) -> str:
    first = {key: event.pop(key) for key in _FIRST if key in event}
    return _encoder.encode({**first, **event}).decode("utf-8")


_REPEATING = ("opentelemetry.baggage", "opentelemetry.trace")
"""They warn of headers that are none, and repeat what a client wrote into them."""
_SHOWING_ERRORS = ("asyncio",)
"""Its second line shows a task with its exception, whatever that says."""


class _LibraryHandler(logging.Handler):
    """Lines of foreign libraries (standard `logging`), as events of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        name = record.levelname.lower()
        message = record.getMessage()
        if record.name in _SHOWING_ERRORS:
            message = message.partition("\n")[0]
        values: dict[str, Any] = {"module": record.name, "message": message}
        if record.exc_info:
            values["exc_info"] = record.exc_info
        log = structlog.get_logger()
        getattr(log, name if name in LEVELS else "error")("library_said", **values)


def _adopt_libraries() -> None:
    """Warnings of libraries belong in our log; their chatter does not."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _LibraryHandler)]:
        root.removeHandler(handler)
    root.addHandler(_LibraryHandler(level=logging.WARNING))
    logging.captureWarnings(True)
    for name in _REPEATING:
        logging.getLogger(name).setLevel(logging.ERROR)
