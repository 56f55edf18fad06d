"""What clients send: bodies, frames, forms, lines of batches, queries and headers."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from random import Random
from typing import Any

from diptych_contracts.cards import ModelCard
from diptych_contracts.errors import InvalidRequest
from diptych_contracts.sampling import Grammar
from diptych_contracts.wire import encode
from diptych_gateway.admission.answer_plans import planned, template_variables
from diptych_gateway.admission.models import ServedModel
from diptych_gateway.batches.lines import Inspection, TooLong, lines
from diptych_gateway.batches.serving import _decoder as batch_decoder
from diptych_gateway.completions.chat_resuming import wanted_by_event_id, wanted_by_query
from diptych_gateway.completions.text_checks import check_completion, decode_completion
from diptych_gateway.errors import ApiError, from_error
from diptych_gateway.files.paging import paging
from diptych_gateway.files.uploading import read_form
from diptych_gateway.idempotency.header import once_of
from diptych_gateway.judging.bodies import decode, decode_as
from diptych_gateway.judging.checking import Call, check, check_metadata
from diptych_gateway.judging.class_checks import likely_class
from diptych_gateway.listening.reading import ClientGone, read_json_body, wants_resume
from diptych_gateway.responses.bodies import decode_create, decode_frame_kind, decode_response
from diptych_gateway.responses.checking import check_frame, check_response
from diptych_gateway.responses.input_pages import page as items_page
from diptych_gateway.responses.serving import query
from diptych_gateway.sockets.responses_socket import _lane as lane_of
from diptych_gateway.texts.embedding_bodies import judge_embeddings
from diptych_gateway.texts.tokenizing_bodies import decode_detokenize, decode_tokenize
from diptych_testkit.fuzzing import bodies
from diptych_testkit.fuzzing.bending import WHOLE_TEXTS, as_json, bent_bytes, bent_tree
from diptych_testkit.fuzzing.cases import Parser
from diptych_testkit.tiny_gguf import tiny_card
from diptych_text.grammars import MAX_GRAMMAR_BYTES, check_grammar
from diptych_text.schemas import check_schema

_ERRORS = (InvalidRequest, ApiError)
_BYTE_BENT = 0.3
Tree = dict[str, Any]


def parsers() -> list[Parser]:
    """All of them."""
    return [
        _of_bodies("chat", bodies.CHATS, _chat, cases=350),
        _of_bodies("completions", bodies.COMPLETIONS, _completion, cases=3000),
        _of_bodies("responses", bodies.RESPONSES, _response, cases=350),
        _of_bodies("websocket", bodies.FRAMES, _frame, cases=350),
        _of_bodies("batches", bodies.BATCHES, _batch, cases=5000),
        _of_bodies("schemas", bodies.SCHEMAS, _schema, cases=600),
        _of_bodies("tokens", bodies.TOKENS, _tokens, cases=2500),
        Parser(name="batch-lines", make=_file, read=_lines, told=_ERRORS, cases=300),
        Parser(name="uploads", make=_form, read=_upload, told=_ERRORS, cases=1500),
        Parser(name="queries", make=_scope, read=_queries, told=_ERRORS, cases=4000),
    ]


def _of_bodies(
    name: str, seeds: Sequence[Tree], read: Callable[[bytes], None], *, cases: int
) -> Parser:
    keys = sorted({key for body in seeds for key in _keys(body)} | set(bodies.KEYWORDS))

    def make(rng: Random) -> bytes:
        return _bent_body(rng, seeds, keys)

    return Parser(name=name, make=make, read=read, told=_ERRORS, cases=cases)


def _bent_body(rng: Random, seeds: Sequence[Tree], keys: Sequence[str]) -> bytes:
    body = rng.choice(seeds)
    data = as_json(rng, bent_tree(rng, body, keys))
    if rng.random() < _BYTE_BENT:
        data = bent_bytes(rng, data, [as_json(rng, other) for other in seeds])
    return data


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in _keys(inner)}
    return {key for inner in value for key in _keys(inner)} if isinstance(value, list) else set()


@cache
def served_model(card: ModelCard | None = None) -> ServedModel:
    """A model for calls to be planned for."""
    return ServedModel.from_card(card or tiny_card())


def _chat(data: bytes) -> None:
    likely_class(data)
    _plan(check(decode(data)))


def _completion(data: bytes) -> None:
    _plan(check_completion(decode_completion(data)))


def _response(data: bytes) -> None:
    _plan(check_response(decode_response(data)).generation(()))


def _frame(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError as err:  # the WebSocket library ends the connection
        raise InvalidRequest(f"expected UTF-8: {err}") from err
    kind = decode_frame_kind(text)
    lane_of(kind.stream_id)
    _plan(check_frame(decode_create(text)).generation(()))


def _plan(call: Call) -> None:
    """What becomes of a good call before it is accepted."""
    served = served_model()
    codec = served.codec
    if call.prompt is not None:
        return
    if call.sampling.grammar is not None:
        _obey(call.sampling.grammar)
    variables = template_variables(call.effort, codec, param=call.effort_param)
    tools = call.tooling.tools if call.tooling is not None else ()
    parts = codec.chat_parts(call.messages, tools=tools, variables=variables)
    ids = [token for part in parts for token in part]
    plan = planned(call, served, ids)
    if plan.grammar is not None:
        encode(plan.grammar)
        _obey(plan.grammar)
    encode(call.sampling)


def _obey(grammar: Grammar) -> None:
    if grammar.kind == "json_schema":
        check_schema(grammar.text, param="x")
    else:
        check_grammar(grammar)


def _tokens(data: bytes) -> None:
    """`/tokenize`, `/detokenize` and `/v1/embeddings`: what one refuses another may not."""
    for read in (_tokenize, decode_detokenize, judge_embeddings):
        with suppress(*_ERRORS):
            read(data)


def _tokenize(data: bytes) -> None:
    asked = decode_tokenize(data)
    if asked.prompt is None:
        served_model().codec.encode_chat(asked.messages)


def _batch(data: bytes) -> None:
    body = decode_as(batch_decoder, data)
    check_metadata(body.metadata)


def _schema(data: bytes) -> None:
    if len(data) > MAX_GRAMMAR_BYTES:  # longer ones were refused
        data = data[:MAX_GRAMMAR_BYTES]
    try:
        text = data.decode()
    except UnicodeDecodeError as err:
        raise InvalidRequest(f"expected UTF-8: {err}") from err
    check_schema(text, param="x")


def _file(rng: Random) -> list[bytes]:
    keys = sorted({key for body in bodies.LINES for key in _keys(body)})
    made = [_bent_body(rng, bodies.LINES, keys) for _ in range(rng.randrange(1, 6))]
    data = rng.choice((b"\n", b"\r\n", b"\n\n", b"\r")).join(made)
    if rng.random() < _BYTE_BENT:
        data = bent_bytes(rng, data)
    return _cut_up(rng, data)


def _cut_up(rng: Random, data: bytes) -> list[bytes]:
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(5)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def _judge(body: bytes) -> None:
    check(decode(body))


def _lines(pieces: list[bytes]) -> None:
    async def content() -> Any:
        for piece in pieces:
            yield piece

    async def read() -> None:
        inspection = Inspection("/v1/chat/completions", _judge, max_lines=50)
        try:
            async for line in lines(content(), max_bytes=1 << 20):
                inspection.inspect([line])
        except TooLong:
            return
        assert all(fault.message for fault in inspection.faults)

    asyncio.run(read())


_FORM = (
    b'--B\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--B\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n'
    b"content-type: application/jsonl\r\n\r\n{}\r\n{}\r\n--B--\r\n"
)
_TYPES = (
    *(b"multipart/form-data; boundary=B", b'multipart/form-data; boundary="B"', b""),
    *(b"multipart/form-data", b"multipart/form-data; boundary=" + b"x" * 3000, b"text/plain"),
    *(b"multipart/form-data; boundary=\xff", b"multipart/form-data; boundary=;", b';;;="\\'),
)


def _form(rng: Random) -> tuple[bytes, list[bytes]]:
    kind = _TYPES[0] if rng.random() < 0.8 else rng.choice(_TYPES)
    if rng.random() < 0.1:
        kind = bent_bytes(rng, kind)
    return kind, _cut_up(rng, bent_bytes(rng, _FORM, [_FORM]))


class _Sink:
    """What a form's file is written to."""

    n_bytes = 0

    async def write(self, data: bytes) -> None:
        self.n_bytes += len(data)

    async def finish(self) -> None:
        return


def _upload(case: tuple[bytes, list[bytes]]) -> None:
    kind, pieces = case
    asyncio.run(_read_form(kind, pieces))


async def _read_form(kind: bytes, pieces: list[bytes]) -> None:
    left = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]
    left.append({"type": "http.request", "body": b""})
    sink: Any = _Sink()

    async def receive() -> Any:
        return left.pop(0)

    scope = {"headers": [(b"content-type", kind)]}
    form = await read_form(scope, receive, sink, max_bytes=100_000, silence_s=5)
    assert sum(map(len, form.fields.values())) < 100_000
    assert form.filename is None or len(form.filename) < 1000


_QUERIES = (
    *(b"stream=true&starting_after=4", b"limit=20&after=batch_1", b"include_usage=true"),
    *(b"order=desc&purpose=batch&limit=1", b"", b"stream=1&&=&%zz", b"limit=%E0%A4%A"),
)
_PATHS = ("chatcmpl-" + "0" * 32, "resp_" + "1" * 32, "../../x", "a/b", "\0", "*", ">", "é" * 90)
_HEADERS = (
    (b"last-event-id", b"0" * 32 + b":7"),
    (b"idempotency-key", b"key-1"),
    (b"x-diptych-resume", b"1"),
    (b"content-type", b"application/json; charset=utf-8"),
    (b"content-length", b"17"),
    (b"content-encoding", b"identity"),
    (b"authorization", b"Bearer dk-1"),
)


def _scope(rng: Random) -> Tree:
    headers = [
        (name, bent_bytes(rng, value) if rng.random() < 0.4 else value)
        for name, value in rng.sample(_HEADERS, rng.randrange(len(_HEADERS)))
    ]
    if rng.random() < 0.1:
        headers.append((b"content-length", rng.choice((b"9" * 5000, b"-1", b"1e3", b"\xb2"))))
    text = rng.choice(_QUERIES)
    text = bent_bytes(rng, text, _QUERIES) if rng.random() < 0.7 else text
    path = rng.choice((*_PATHS, *WHOLE_TEXTS))
    names = ("completion_id", "response_id", "batch_id", "file_id", "model")
    return {
        "type": "http",
        "method": "GET",
        "path": f"/v1/responses/{path}",
        "headers": headers,
        "query_string": text,
        "path_params": dict.fromkeys(names, path),
        "state": {"tenant": "default"},
    }


def _queries(scope: Tree) -> None:
    """Each of them: what one refuses another may not."""
    for read in (query, wanted_by_query, _event_id, items_page, _paged, _once, _resume, _declared):
        try:
            read(scope)
        except _ERRORS as err:
            from_error(err)


def _paged(scope: Tree) -> None:
    paging(scope, most=100, usual=20, more=("purpose", "order"))


def _once(scope: Tree) -> None:
    once_of(scope, b"{}")


def _resume(scope: Tree) -> None:
    wants_resume(scope["headers"])


def _declared(scope: Tree) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def read() -> None:
        limit = asyncio.timeout(5)
        headers = scope["headers"]
        await read_json_body(headers, receive, max_bytes=100, limit=limit, grown=lambda _: None)

    try:
        asyncio.run(read())
    except ClientGone:
        return


def _event_id(scope: Tree) -> None:
    wanted_by_event_id(scope, include_usage=False)
