"""What it means when an engine says no: sorted by what the one who asked should do."""

from http import HTTPStatus
from typing import Any

import msgspec

from diptych_contracts.errors import DiptychError, EngineGone, Permanent, Refused
from diptych_contracts.jobs import RefusalReason
from diptych_engine.over_http.reading import from_json

_MAX_TEXT = 300
_OURS = {400, 405, 413, 422}
_BUSY = {408, 429, 503}
_KEY = {401, 403}


class KeyRefused(EngineGone):
    """An engine wants another key than the one we have."""


def refusal(status: int, body: bytes) -> DiptychError:
    """The error that an answer of `status` stands for; a code in the body counts more.

    Both shapes are known: `{"error": {"message", "code"}}`, and the same without the envelope.
    """
    found, text = _told(body)
    status = found or status
    said = f"the engine says {status}: {text}"
    if status in _OURS:
        return Permanent(said)
    if status in _BUSY:
        return Refused(RefusalReason.NO_ROOM, said)
    if status == HTTPStatus.NOT_FOUND:
        return Refused(RefusalReason.WRONG_MODEL, said)
    if status in _KEY:
        return KeyRefused(said)
    return EngineGone(said)


def _told(body: bytes) -> tuple[int | None, str]:
    try:
        told: Any = from_json(body)
    except msgspec.DecodeError:
        return None, body[:_MAX_TEXT].decode(errors="replace")
    if isinstance(told, dict):
        told = told.get("error") or told
    if not isinstance(told, dict):
        return None, str(told)[:_MAX_TEXT]
    code = told.get("code", told.get("status_code"))
    text = str(told.get("message") or told.get("detail") or told)
    return code if isinstance(code, int) and code >= 400 else None, text[:_MAX_TEXT]
