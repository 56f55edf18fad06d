"""Structured output: `response_format` of chat and completions, `text` of Responses.

What is asked for becomes a `Grammar` that the engine obeys token by token; nothing is added to the
prompt. Shapes are judged here; whether a schema can be obeyed is a matter of milliseconds and
judged off the event loop (`GrammarChecks`), before anything is accepted.
"""

import asyncio
import hashlib
import re
from collections import OrderedDict
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_gateway.judging.bodies import ABSENT, as_text, decode_as
from diptych_gateway.judging.harmless import only, shown
from diptych_text.grammars import MAX_GRAMMAR_BYTES, check_grammar
from diptych_text.schemas import check_schema

ANY_OBJECT = Grammar(kind="json_schema", text='{"type":"object"}')
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_DESCRIPTION_CHARS = 16 * 1024
_MAX_KNOWN = 1024
"""Grammars remembered as good, by their hash."""
_KINDS = "'text', 'json_object' or 'json_schema'"


class Structure(NamedTuple):
    """The form an answer is to have."""

    grammar: Grammar | None
    param: str = "response_format"
    """Where the schema stands in the request."""
    echo: str = ""
    """What Responses objects say of it, as JSON; empty: `{"type": "text"}`."""


FREE = Structure(None)


class _Kind(msgspec.Struct):
    type: str


class _Bare(msgspec.Struct, forbid_unknown_fields=True):
    type: str


class _Schema(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    schema: msgspec.Raw
    description: str | None = None
    strict: bool | None = None


class _Nested(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    json_schema: _Schema


class _Flat(_Schema, kw_only=True, forbid_unknown_fields=True):
    type: str


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    format: msgspec.Raw = ABSENT
    verbosity: msgspec.Raw = ABSENT


class _Echo(msgspec.Struct, kw_only=True, tag_field="type", tag="json_schema"):
    """As Open Responses types it: an answer names its schema and does not repeat it."""

    name: str
    description: str | None
    schema: None = None
    strict: bool


_kind_decoder = msgspec.json.Decoder(_Kind)
_bare_decoder = msgspec.json.Decoder(_Bare)
_nested_decoder = msgspec.json.Decoder(_Nested)
_flat_decoder = msgspec.json.Decoder(_Flat)
_text_decoder = msgspec.json.Decoder(_Text)


def response_format(given: msgspec.Raw) -> Structure:
    """What `response_format` asks for.

    Raises:
        InvalidRequest: names the part that is wrong.
    """
    at = "response_format"
    match _kind(given, at):
        case "json_schema":
            schema = decode_as(_nested_decoder, given, at=at).json_schema
            return _structure(schema, f"{at}.json_schema")
        case kind:
            return _plain(given, kind, at)


def text_settings(given: msgspec.Raw) -> Structure:
    """What `text` of a Responses body asks for.

    Raises:
        InvalidRequest: names the part that is wrong.
    """
    if given == ABSENT:
        return FREE
    settings = decode_as(_text_decoder, given, at="text")
    only("text.verbosity", settings.verbosity, ("medium",))
    at = "text.format"
    match _kind(settings.format, at):
        case "json_schema":
            return _structure(decode_as(_flat_decoder, settings.format, at=at), at)
        case kind:
            return _plain(settings.format, kind, at)


def _kind(given: msgspec.Raw, at: str) -> str:
    return "text" if given == ABSENT else decode_as(_kind_decoder, given, at=at).type


def _plain(given: msgspec.Raw, kind: str, at: str) -> Structure:
    if kind not in {"text", "json_object"}:
        raise InvalidRequest(
            f"'{at}.type': expected {_KINDS}, saw {shown(kind)}", param=f"{at}.type"
        )
    if given != ABSENT:
        decode_as(_bare_decoder, given, at=at)
    if kind == "text":
        return FREE
    return Structure(ANY_OBJECT, at, '{"type":"json_object"}')


def _structure(schema: _Schema, at: str) -> Structure:
    if not _NAME.fullmatch(schema.name):
        raise InvalidRequest(
            f"'{at}.name': expected 1 to 64 letters, digits, '_' and '-', saw {shown(schema.name)}",
            param=f"{at}.name",
        )
    if len(schema.description or "") > _MAX_DESCRIPTION_CHARS:
        raise InvalidRequest(
            f"'{at}.description': expected at most {_MAX_DESCRIPTION_CHARS} characters",
            param=f"{at}.description",
        )
    data = bytes(schema.schema)
    if len(data) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"'{at}.schema': expected at most {MAX_GRAMMAR_BYTES} bytes, saw {len(data)}",
            param=f"{at}.schema",
        )
    echo = _Echo(
        name=schema.name, description=schema.description, strict=schema.strict is not False
    )
    grammar = Grammar(kind="json_schema", text=as_text(schema.schema, at=f"{at}.schema"))
    return Structure(grammar, f"{at}.schema", msgspec.json.encode(echo).decode())


class GrammarChecks:
    """Sees that grammars can be obeyed, each once.

    Args:
        executor: Where it is done: 0.3 ms, 0.2 s at worst.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._good: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, grammar: Grammar, card: ModelCard, *, param: str) -> None:
        """See that `card`'s engine can obey `grammar`, which stands at `param`.

        Raises:
            InvalidRequest: says what cannot be obeyed, and where it stands.
        """
        if not card.grammars:
            top = param.split(".", 1)[0]
            raise InvalidRequest(
                f"'{top}': the model '{card.model}' writes free text only",
                param=top,
                code="unsupported_parameter",
            )
        digest = hashlib.blake2b(f"{grammar.kind}:{grammar.text}".encode(), digest_size=16).digest()
        if digest not in self._good:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, _check, grammar, param)
        self._good[digest] = None
        self._good.move_to_end(digest)
        if len(self._good) > _MAX_KNOWN:
            self._good.popitem(last=False)


def _check(grammar: Grammar, param: str) -> None:
    if grammar.kind == "json_schema":
        check_schema(grammar.text, param=param)
        return
    try:
        check_grammar(grammar)
    except InvalidRequest as err:
        raise InvalidRequest(f"'{param}': {err}", param=param) from err
