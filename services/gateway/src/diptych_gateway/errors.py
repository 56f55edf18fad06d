"""Every error a client can see: one object, OpenAI's shape, with the status that fits."""

import math

import msgspec
from msgspec import UNSET, UnsetType

from diptych_contracts.dead import Cause
from diptych_contracts.errors import (
    ContextOverflow,
    DiptychError,
    Expired,
    InvalidRequest,
    Permanent,
    StoreFull,
    Transient,
    UnknownModel,
)
from diptych_contracts.journal import End, EndReason

Headers = list[tuple[bytes, bytes]]

INVALID = "invalid_request_error"
SERVER = "server_error"

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIRST_SERVER_STATUS = 500
_HARMFUL = frozenset(
    {Cause.LOST_WORKERS, Cause.LOST_SCHEDULERS, Cause.UNDELIVERABLE, Cause.IMPOSSIBLE}
)
"""The same request again would do the same again: libraries that repeat must not."""
_RETRY_AFTER_S = 1.0


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None
    headers: dict[str, str] | UnsetType = UNSET
    """What would stand in the head of an answer, where that has been sent already."""


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class ApiError(DiptychError):
    """An answer that is not what the client asked for.

    `retry_after_s` goes out as whole seconds; `should_retry` overrides what the client's library
    would do by itself (it repeats 408, 409, 429 and 5xx).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.should_retry: bool | None = None
        self.more_headers: Headers = []

    @property
    def detail(self) -> ErrorDetail:
        """What the error object says."""
        fallback = SERVER if self.status >= _FIRST_SERVER_STATUS else INVALID
        kind = _TYPES.get(self.status, fallback)
        return ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)

    @property
    def late_detail(self) -> ErrorDetail:
        """The same within a stream that has begun: with the headers."""
        headers = {name.decode(): value.decode() for name, value in self.headers}
        return msgspec.structs.replace(self.detail, headers=headers or UNSET)

    @property
    def body(self) -> bytes:
        """The error object as JSON."""
        return msgspec.json.encode(ErrorBody(error=self.detail))

    @property
    def late_body(self) -> bytes:
        """The error object within a stream that has begun."""
        return msgspec.json.encode(ErrorBody(error=self.late_detail))

    @property
    def headers(self) -> Headers:
        """The headers that go with it, such as when to come back."""
        headers = list(self.more_headers)
        if self.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(self.retry_after_s)).encode()))
        if self.should_retry is not None:
            headers.append((b"x-should-retry", b"true" if self.should_retry else b"false"))
        return headers


def from_error(err: DiptychError) -> ApiError:
    """What a client is told about `err`."""
    match err:
        case ApiError():
            return err
        case UnknownModel():
            return ApiError(404, str(err), code="model_not_found", param=err.param or "model")
        case ContextOverflow():
            code = "context_length_exceeded"
            return ApiError(400, str(err), code=code, param=err.param or "messages")
        case InvalidRequest():
            return ApiError(400, str(err), code=err.code or "invalid_value", param=err.param)
        case StoreFull():
            return ApiError(429, str(err), code="storage_full", retry_after_s=_RETRY_AFTER_S)
        case Transient():
            return ApiError(503, str(err), code="unavailable", retry_after_s=_RETRY_AFTER_S)
        case Expired():
            return ApiError(504, str(err), code="deadline_exceeded")
        case Permanent():
            return ApiError(500, str(err), code="permanent_failure")
        case _:
            return ApiError(500, "internal error", code="internal_error")


def from_end(end: End, *, produced: bool) -> ApiError | None:
    """What a client is told about an answer that did not finish; None if it did.

    Args:
        end: The request's end.
        produced: Whether it had tokens: then a repetition would pay for them twice, and its client
            is told not to; else that it may.
    """
    detail = f": {end.detail}" if end.detail else ""
    match end.reason:
        case EndReason.STOP | EndReason.LENGTH:
            return None
        case EndReason.EXPIRED:
            error = ApiError(504, f"the request's deadline passed{detail}", code="expired")
        case EndReason.CANCELLED:
            error = ApiError(503, f"the request was cancelled{detail}", code="cancelled")
        case EndReason.FAILED:
            error = ApiError(500, f"the request failed{detail}", code="failed")
    error.should_retry = not produced and end.cause not in _HARMFUL
    return error
