"""What comes over the bus: messages, the journal's fold, subjects and headers."""

import importlib
import pkgutil
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from random import Random
from typing import Any

import msgspec

import diptych_contracts
from diptych_bus.sizes import message_bytes
from diptych_bus.tracing import context_of
from diptych_contracts import subjects
from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.journal import JournalEntry, TokenFrame
from diptych_contracts.keys import KeyEntry
from diptych_contracts.wire import Message, decode, encode
from diptych_policy.journal import RequestView, parts
from diptych_testkit.builders import REQUEST, an_end, tokens
from diptych_testkit.fuzzing.bending import (
    NUMBERS,
    TEXTS,
    WHOLE_TEXTS,
    bent_bytes,
    bent_text,
    bent_tree,
)
from diptych_testkit.fuzzing.cases import Parser

_BYTE_BENT = 0.5


def parsers() -> list[Parser]:
    """All of them."""
    return [
        Parser(name="messages", make=_bytes, read=_read, cases=12_000),
        Parser(name="journal", make=_journal, read=_fold, cases=4000),
        Parser(name="subjects", make=_name, read=_subject, cases=12_000),
        Parser(name="bus-headers", make=_headers, read=_context, cases=6000),
    ]


@cache
def message_kinds() -> Mapping[str, type[Message]]:
    """Every message there is, by its tag."""
    for module in pkgutil.iter_modules(diptych_contracts.__path__, "diptych_contracts."):
        importlib.import_module(module.name)
    found = {str(kind.__struct_config__.tag): kind for kind in Message.__subclasses__()}
    return dict(sorted(found.items()))


@cache
def samples() -> Mapping[str, bytes]:
    """One of each, every field set."""
    return {tag: encode(_sample(kind)) for tag, kind in message_kinds().items()}


def _sample(kind: type[Message]) -> Message:
    return kind(**{f.name: _value(f.type, f.name) for f in msgspec.structs.fields(kind)})


def _value(hint: Any, name: str) -> Any:
    hint = getattr(hint, "__supertype__", hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _value(next(a for a in arguments if a is not types.NoneType), name)
    if origin is typing.Annotated:
        return _value(arguments[0], name)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        several = [a for a in arguments if a is not Ellipsis]
        return tuple(_value(a, name) for a in several)
    if origin in (dict, Mapping):
        return {_value(arguments[0], name): _value(arguments[1], name)}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next(iter(hint))
    if isinstance(hint, type) and issubclass(hint, Message):
        return _sample(hint)
    plain = {bool: True, int: 7, float: 0.5, bytes: b"xyz", str: f"{name}-1"}
    return plain[hint]


@cache
def _names() -> tuple[str, ...]:
    kinds = message_kinds()
    fields = {f for kind in kinds.values() for f in kind.__struct_fields__}
    return (*sorted(fields), *kinds)


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, UnicodeEncodeError, msgspec.MsgspecError):
        return b"\xdf\xff\xff\xff\xff"


def bent_message(rng: Random, tag: str) -> bytes:
    """A message of that type, bent."""
    data = samples()[tag]
    if rng.random() < _BYTE_BENT:
        return bent_bytes(rng, data, list(samples().values()))
    return _packed(bent_tree(rng, msgspec.msgpack.decode(data), _names()))


def _bytes(rng: Random) -> tuple[str, bytes]:
    tag = rng.choice(list(message_kinds()))
    return rng.choice((tag, tag, tag, "journal", "keys")), bent_message(rng, tag)


def _read(case: tuple[str, bytes]) -> None:
    """What is read is the type that was asked for, and means the same when written again."""
    tag, data = case
    unions: dict[str, Any] = {"journal": JournalEntry, "keys": KeyEntry}
    kind = unions.get(tag) or message_kinds()[tag]
    message = decode(data, kind)
    assert isinstance(message, kind)
    again = decode(encode(message), kind)
    assert repr(again) == repr(message)  # NaN is not equal to itself


def _journal(rng: Random) -> list[Any]:
    made: list[Any] = []
    for _ in range(rng.randrange(1, 40)):
        index = rng.choice((0, 1, 2, 3, 5, 8, -3, 2**40))
        attempt = rng.choice((1, 1, 1, 2, 3, 0, -1, 2**63 - 1))
        ids = tuple(rng.choice((1, 2, -5, 2**63 - 1)) for _ in range(rng.randrange(4)))
        match rng.randrange(6):
            case 0 | 1 | 2:
                made.append(tokens(*ids, index=index, attempt=attempt))
            case 3:
                count = rng.choice((None, 0, 2, 5, -1, 2**60))
                made.append(an_end(attempt=attempt, tokens=count))
            case 4:
                made.append(TokenFrame(worker=Incarnation("w")))
            case _:
                made.append(_of_union(rng))
    return made


def _of_union(rng: Random) -> Any:
    kinds = [kind.__struct_config__.tag for kind in typing.get_args(JournalEntry)]
    try:
        return decode(bent_message(rng, rng.choice(kinds)), JournalEntry)
    except DiptychError:
        return TokenFrame(worker=Incarnation("w"))


def _fold(entries: list[Any]) -> None:
    """An answer only grows, and nothing counts after its end."""
    view = RequestView(RequestId(REQUEST), logprobs=[])
    told: list[int] = []
    ends = 0
    for entry in entries:
        for part in parts(entry):
            change = view.apply(part)
            told += change.new_ids
            ends += change.end is not None
            assert told == view.token_ids
            assert view.logprobs is not None
            assert len(view.logprobs) == len(told)
    assert ends <= 1


def _name(rng: Random) -> str:
    text = "".join(rng.choice(TEXTS) for _ in range(rng.randrange(4)))
    return bent_text(rng, text, ("*", ">", ".", " ", "\t", "\r\n", "=", "=4", "\x00", "$JS.API"))


def _subject(name: str) -> None:
    """A name is one token, of plain characters, and comes back."""
    try:
        token = subjects.escape(name)
    except ValueError:
        assert not name or not _is_text(name)
        return
    assert set(token) <= set("=-_") | set(map(chr, range(48, 123))) - set(":;<>?@[\\]^`"), token
    assert subjects.unescape(token) == name
    assert subjects.request("interactive", name).count(".") == 2


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


_TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _headers(rng: Random) -> dict[str, str]:
    made = {"traceparent": _TRACE, "tracestate": "a=b,c=d", "baggage": "x=y"}
    chosen = rng.sample(sorted(made), rng.randrange(1, 4))
    return {
        name: bent_text(rng, made[name], WHOLE_TEXTS).replace("\ud800", "\ufffd") for name in chosen
    } | {rng.choice(WHOLE_TEXTS): str(rng.choice(NUMBERS)) for _ in range(rng.randrange(3))}


def _context(headers: dict[str, str]) -> None:
    context_of(headers)
    message_bytes(b"x", headers)
