"""What `/openapi.json` says of every route: one line of `ENDPOINTS` each.

A new route is one more line there, and one in `routes`; a test compares the two. Types of bodies
and answers become schemas by themselves. A status belongs here if it can really come.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from diptych_gateway.answering.answers import Choice, Chunk, ChunkChoice, Completion
from diptych_gateway.batches.objects import BatchList, BatchObject
from diptych_gateway.batches.serving import BatchBody
from diptych_gateway.completions.text_answers import TextChoice
from diptych_gateway.completions.text_checks import CompletionBody
from diptych_gateway.doors.objects import Health, ModelList, ModelObject
from diptych_gateway.files.serving import DeletedFile, FileList, FileObject
from diptych_gateway.judging.bodies import ChatBody
from diptych_gateway.responses.bodies import ResponseBody
from diptych_gateway.responses.checking import INCLUDED
from diptych_gateway.responses.input_pages import ItemList
from diptych_gateway.responses.objects import Deleted, ResponseObject
from diptych_gateway.tenancy.admin_objects import AuditList, KeyList, TenantList, UsageList
from diptych_gateway.texts.embedding_bodies import EmbeddingList, EmbeddingsBody
from diptych_gateway.texts.tokenizing_bodies import (
    DetokenizeBody,
    Text,
    TokenizeBody,
    Tokens,
)

ALWAYS = (400, 408, 431, 500, 503)
"""No HTTP, a head that is too slow or too large, a fault of ours, too many connections."""
IDENTIFIED = (401, 403, 429)
"""No key or a wrong one, one that may not, or one that asks too often."""
WITH_BODY = (413, 415)
"""Too large, or no JSON."""
OF_MODEL = (404,)
"""No such model."""
GENERATING = (*OF_MODEL, 409, 504)
"""Another request has the idempotency key, or a deadline passed."""
OF_STORED = (404, 410)
"""There is none of that id, or a part of it has expired."""


class ChatCompletion(Completion):
    choices: list[Choice]


class ChatCompletionChunk(Chunk):
    choices: list[ChunkChoice]


class TextCompletion(Completion):
    choices: list[TextChoice]


@dataclass(frozen=True, slots=True)
class Query:
    """A parameter of the query."""

    name: str
    schema: dict[str, Any]
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One method of one path."""

    method: str
    path: str
    tag: str
    says: str
    refusals: tuple[int, ...] = ()
    """Beside `ALWAYS`."""
    body: type[msgspec.Struct] | None = None
    form: dict[str, Any] | None = None
    """The schema of a body that is a form."""
    answer: type[msgspec.Struct] | None = None
    """Of a 200 in JSON; None: there is none."""
    events: type[msgspec.Struct] | bool = False
    """Whether the 200 can be server-sent events, and of which objects."""
    media_type: str = ""
    """Of a 200 that is no JSON."""
    query: tuple[Query, ...] = ()
    socket: bool = False
    """Whether the path is a WebSocket too."""
    unready: type[msgspec.Struct] | None = None
    """What a 503 says if that is no error object."""


_FLAG = {"type": "boolean", "default": False}
_AFTER = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_STREAM = Query("stream", _FLAG, "The events, from the first or `starting_after` one on.")
_PAGES = (
    Query("limit", {"type": "integer", "minimum": 1, "maximum": 100}, "Most items; 20 if absent."),
    Query("order", {"enum": ["asc", "desc"]}, "Oldest first, or (if absent) newest first."),
    Query("after", {"type": "string"}, "The id of the item before the first one wanted."),
)

_INCLUDE = Query(
    "include[]",
    {"type": "array", "items": {"enum": list(INCLUDED)}},
    "Accepted: what was asked for when the response was made is told anyhow.",
)
_FILE_PAGES = (
    Query("limit", {"type": "integer", "minimum": 1, "maximum": 10_000}, "Most files."),
    _PAGES[1],
    _PAGES[2],
    Query("purpose", {"type": "string"}, "Only files for that."),
)
_UPLOAD = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"enum": ["batch"]},
    },
    "required": ["file", "purpose"],
}

CHAT, RESPONSES, TEXT = "Chat completions", "Responses", "Text"
BATCHES = "Files and batches"
MODELS, HEALTH, ABOUT = "Models", "Health", "This page"
ADMIN = "Administration"
TAGS = {
    CHAT: "Conversations whose client keeps them.",
    RESPONSES: "Conversations that the server may keep, turn by turn.",
    TEXT: "From text to tokens, and back.",
    BATCHES: "Many requests in a file, answered when there is room.",
    MODELS: "What is served.",
    HEALTH: "For those who watch.",
    ADMIN: "With a key of role `admin` (usage: `viewer`, `operator` too); never without a key.",
    ABOUT: "What you read.",
}
_NEW = (*IDENTIFIED, *WITH_BODY, *GENERATING)
_ONE = (*IDENTIFIED, *OF_STORED)
_TEXT = (*IDENTIFIED, *WITH_BODY, *OF_MODEL)
_RESPONSE = "/v1/responses/{response_id}"
_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"

ENDPOINTS = (
    Endpoint(method="POST", path="/v1/chat/completions", tag=CHAT,
             says="Answer a conversation, whole or (`stream`) token by token.",
             body=ChatBody, answer=ChatCompletion, events=ChatCompletionChunk,
             refusals=(*_NEW, 410), socket=True),
    Endpoint(method="POST", path="/v1/completions", tag=TEXT,
             says="Continue a text or token ids, or several of them.",
             body=CompletionBody, answer=TextCompletion, events=TextCompletion,
             refusals=(*_NEW, 410)),
    Endpoint(method="GET", path="/v1/chat/completions/{completion_id}", tag=CHAT,
             says="Take up an answer again that was asked with `x-diptych-resume: 1`.",
             answer=ChatCompletion, events=ChatCompletionChunk, refusals=(*_ONE, 504),
             query=(_STREAM,
                    Query("starting_after", {**_AFTER, "minimum": -1}, "The last index seen."),
                    Query("include_usage", _FLAG, "Say the usage at the end of the stream."))),
    Endpoint(method="POST", path="/v1/responses", tag=RESPONSES,
             says="Answer the next turn of a conversation that the server may keep.",
             body=ResponseBody, answer=ResponseObject, events=True,
             refusals=(*_NEW, 410), socket=True),
    Endpoint(method="GET", path=_RESPONSE, tag=RESPONSES,
             says="A stored response as it stands, or its events from any number on.",
             answer=ResponseObject, events=True, refusals=(*_ONE, 504),
             query=(_STREAM, Query("starting_after", _AFTER, "The number of the last event seen."),
                    Query("include_obfuscation", _FLAG, "Accepted; there is none."), _INCLUDE)),
    Endpoint(method="DELETE", path=_RESPONSE, tag=RESPONSES,
             says="Forget a stored response; one that runs is cancelled.",
             answer=Deleted, refusals=_ONE),
    Endpoint(method="POST", path=f"{_RESPONSE}/cancel", tag=RESPONSES,
             says="Cancel a response that runs; what has ended stays as it is.",
             answer=ResponseObject, refusals=_ONE),
    Endpoint(method="GET", path=f"{_RESPONSE}/input_items", tag=RESPONSES,
             says="The input of a stored response, page by page.",
             answer=ItemList, refusals=_ONE, query=(*_PAGES, _INCLUDE)),
    Endpoint(method="POST", path="/tokenize", tag=TEXT,
             says="The tokens of a text, or of a conversation in the model's template.",
             body=TokenizeBody, answer=Tokens, refusals=_TEXT),
    Endpoint(method="POST", path="/detokenize", tag=TEXT, says="The text of tokens.",
             body=DetokenizeBody, answer=Text, refusals=_TEXT),
    Endpoint(method="POST", path="/v1/embeddings", tag=TEXT,
             says="A vector of each text.",
             body=EmbeddingsBody, answer=EmbeddingList, refusals=(*_TEXT, 504)),
    Endpoint(method="POST", path="/v1/files", tag=BATCHES, says="Store a file.",
             form=_UPLOAD, answer=FileObject, refusals=(*IDENTIFIED, *WITH_BODY, 409)),
    Endpoint(method="GET", path="/v1/files", tag=BATCHES, says="The files there are.",
             answer=FileList, refusals=IDENTIFIED, query=_FILE_PAGES),
    Endpoint(method="GET", path=_FILE, tag=BATCHES, says="A file, but for what it holds.",
             answer=FileObject, refusals=_ONE),
    Endpoint(method="DELETE", path=_FILE, tag=BATCHES, says="Forget a file.",
             answer=DeletedFile, refusals=(*_ONE, 409)),
    Endpoint(method="GET", path=f"{_FILE}/content", tag=BATCHES, says="What a file holds.",
             media_type="application/octet-stream", refusals=_ONE),
    Endpoint(method="POST", path="/v1/batches", tag=BATCHES,
             says="Answer every line of a file.", body=BatchBody, answer=BatchObject,
             refusals=(*IDENTIFIED, *WITH_BODY, *OF_STORED, 409)),
    Endpoint(method="GET", path="/v1/batches", tag=BATCHES, says="The batches there are.",
             answer=BatchList, refusals=IDENTIFIED, query=(_PAGES[0], _PAGES[2])),
    Endpoint(method="GET", path=_BATCH, tag=BATCHES, says="How far a batch is.",
             answer=BatchObject, refusals=_ONE),
    Endpoint(method="POST", path=f"{_BATCH}/cancel", tag=BATCHES,
             says="End a batch with what it has.", answer=BatchObject, refusals=(*_ONE, 409)),
    Endpoint(method="GET", path="/v1/models", tag=MODELS, says="The models served now.",
             answer=ModelList, refusals=IDENTIFIED),
    Endpoint(method="GET", path="/v1/models/{model}", tag=MODELS, says="One of them.",
             answer=ModelObject, refusals=(*IDENTIFIED, *OF_MODEL)),
    Endpoint(method="GET", path="/health/live", tag=HEALTH, says="Whether the process runs.",
             answer=Health),
    Endpoint(method="GET", path="/health/ready", tag=HEALTH,
             says="Whether it serves, and why not.", answer=Health, unready=Health),
    Endpoint(method="GET", path="/metrics", tag=HEALTH, says="What Prometheus scrapes.",
             refusals=(401, 403),
        media_type="text/plain"),
    Endpoint(method="GET", path="/admin/v1/keys", tag=ADMIN,
             says="All API keys, none of which can be used from what is told.",
             answer=KeyList, refusals=(401, 403)),
    Endpoint(method="GET", path="/admin/v1/tenants", tag=ADMIN,
             says="All tenants, with their limits.", answer=TenantList, refusals=(401, 403)),
    Endpoint(method="GET", path="/admin/v1/usage", tag=ADMIN,
             says="What tenants used, per day.", answer=UsageList, refusals=(401, 403),
             query=(Query("tenant", {"type": "string"}, "Only this one's."),
                    Query("since", {"type": "string"}, "From this day on: 2026-01-31."))),
    Endpoint(method="GET", path="/admin/v1/audit", tag=ADMIN,
             says="Who did what to keys, tenants and the fleet.", answer=AuditList,
             refusals=(401, 403),
             query=(Query("actor", {"type": "string"}, "Only of those named so."),
                    Query("action", {"type": "string"}, "Only this, or what begins so."))),
    Endpoint(method="GET", path="/openapi.json", tag=ABOUT, says="This document.",
             media_type="application/json"),
    Endpoint(method="GET", path="/docs", tag=ABOUT, says="This document, to be read.",
             media_type="text/html"),
)  # fmt: skip
