"""The header `Idempotency-Key`: what a client calls a request that it may send more than once."""

import re
from dataclasses import dataclass, replace
from hashlib import sha256

from starlette.types import Scope

from diptych_contracts.idempotency import claim_key
from diptych_contracts.requests import PriorityClass
from diptych_gateway.errors import ApiError
from diptych_gateway.judging.checking import Call

HEADER = b"idempotency-key"
PARAM = "Idempotency-Key"
MAX_KEY_CHARS = 255
_KEY = re.compile(rb"[\x21-\x7e]{1,255}")
LINE = "line"
"""In a scope's state: the request is a line of a batch, and this its key."""


@dataclass(frozen=True, slots=True)
class Once:
    """A request that is to run once."""

    name: str
    """Of its entry in the bucket."""
    digest: str
    n_bytes: int
    """Of its body."""
    line: bool = False
    """Whether it is a line of a batch: nobody waits for it, and it goes on unread."""

    def of(self, number: int) -> "Once":
        """That of one of several answers."""
        return replace(self, name=answer_name(self.name, number))

    def terms(self, call: Call) -> Call:
        """`call` as it runs: its client may come back, whatever it said itself."""
        if self.line:
            return replace(call, resume=True, background=True, priority_class=PriorityClass.BATCH)
        return replace(call, resume=True)


def answer_name(name: str, number: int) -> str:
    """The entry of one of several answers to a request; the first has the request's own."""
    return f"{name}.{number}" if number else name


def key_of(scope: Scope) -> str | None:
    """The key that a request came with.

    Raises:
        ApiError: it is none.
    """
    for name, value in scope["headers"]:
        if name == HEADER:
            if not _KEY.fullmatch(value):
                text = (
                    f"'{PARAM}': expected 1 to {MAX_KEY_CHARS} visible ASCII characters, "
                    f"saw {len(value)}: {value[:40]!r}"
                )
                raise ApiError(400, text, code="invalid_value", param=PARAM)
            return str(value.decode("ascii"))
    return None


def once_of(scope: Scope, body: bytes) -> Once | None:
    """What makes a request one that runs once; None if it may run as often as it comes."""
    state = scope["state"]
    line: str | None = state.get(LINE)
    key = f"\0{line}" if line is not None else key_of(scope)  # no client can send a zero
    if key is None:
        return None
    name = claim_key(state["tenant"], scope["path"], key)
    return Once(name, sha256(body).hexdigest(), len(body), line is not None)


def in_use() -> ApiError:
    """What a client is told whose key stands for another body."""
    text = f"'{PARAM}': this key was used with another body; the same one is expected with it"
    error = ApiError(409, text, code="idempotency_key_in_use", param=PARAM)
    error.should_retry = False
    return error
