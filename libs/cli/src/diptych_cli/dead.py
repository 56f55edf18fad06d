"""`diptych dead`: requests that could not be served, why, and trying them again."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from diptych_bus.port import Bus
from diptych_cli.auditing import audited
from diptych_cli.failing import CliError
from diptych_cli.graveyard import Grave, graves, pick
from diptych_cli.joining import joined
from diptych_cli.retrying import prompt_of, retry_of, sent
from diptych_cli.tables import blank, console
from diptych_contracts import subjects
from diptych_contracts.audit import Action
from diptych_contracts.cards import ModelCard
from diptych_contracts.dead import DeadLetter, DeadRequest
from diptych_contracts.errors import Transient
from diptych_contracts.ids import RequestId
from diptych_contracts.prompts import unpacked
from diptych_contracts.responses import response_id
from diptych_contracts.streams import MODELS
from diptych_contracts.wire import decode
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec

COLUMNS = ("id", "died", "cause", "model", "prompt", "answer", "attempts", "retried as", "reason")
NUMBERS = ("prompt", "answer", "attempts")
NOTHING = "no dead requests"


@dataclass(frozen=True, slots=True)
class Place:
    """A stack's bus and, if known, where its answers are read."""

    nats_url: str
    base_url: str = "http://<gateway>/v1"


def show_all(place: Place, *, as_json: bool) -> int:
    """`diptych dead list`."""

    async def work(bus: Bus) -> None:
        found = await graves(bus)
        if as_json:
            print(msgspec.json.encode([facts(grave) for grave in found]).decode())
        elif found:
            console().print(table(found))
        else:
            print(NOTHING)

    return _on_bus(place, work)


def show_one(place: Place, wanted: str, *, prompt: bool) -> int:
    """`diptych dead show`: everything, as JSON; what people wrote only if `prompt`."""

    async def work(bus: Bus) -> None:
        grave = pick(await graves(bus), wanted)
        told = facts(grave) | _details(grave)
        if prompt:
            async with audited(bus, Action.DEAD_PROMPT, f"request:{grave.id}"):
                told["prompt"] = await _prompt(bus, grave)
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())

    return _on_bus(place, work)


def retry(place: Place, wanted: Sequence[str], *, every: bool, again: bool) -> int:
    """`diptych dead retry`: those that are named, or `every` one that was not retried yet."""

    async def work(bus: Bus) -> None:
        found = await graves(bus)
        chosen = _unretried(found) if every else [pick(found, name) for name in wanted]
        if not chosen:
            print("nothing to retry")
        outcomes = [await _retried(bus, place, grave, again=again) for grave in chosen]
        if failed := [problem for problem in outcomes if problem]:
            raise CliError("; ".join(failed))

    return _on_bus(place, work)


def _unretried(found: list[Grave]) -> list[Grave]:
    return [grave for grave in found if not grave.retries and grave.request is not None]


async def _retried(bus: Bus, place: Place, grave: Grave, *, again: bool) -> str:
    """Try one again, and say so; gives what went wrong."""
    try:
        made = retry_of(grave, again=again, now_unix_ms=time.time_ns() // 1_000_000)
        async with audited(bus, Action.DEAD_RETRY, f"request:{grave.id}") as doing:
            doing.detail = f"as {made.response_id}"
            await sent(bus, made)
    except CliError as err:
        return str(err)
    print(f"{grave.id} → {place.base_url}/responses/{made.response_id}")
    return ""


def _on_bus(place: Place, work: Callable[[Bus], Awaitable[None]]) -> int:
    async def run() -> None:
        async with joined(place.nats_url) as bus:
            try:
                await work(bus)
            except Transient as err:
                raise CliError(f"the stack's bus does not answer any more: {err}") from err

    asyncio.run(run())
    return 0


def table(found: Sequence[Grave]) -> Any:
    """A row each, the newest last."""
    made = blank(*COLUMNS, right=NUMBERS)
    for grave in found:
        told = facts(grave)
        made.add_row(
            grave.id,
            told["died"],
            told["cause"],
            told["model"],
            str(told["prompt_tokens"]),
            str(told["answer_tokens"]),
            str(told["attempts"]),
            told["retried_as"],
            told["reason"],
        )
    return made


def facts(grave: Grave) -> dict[str, Any]:
    """What is told of every one."""
    entry, request = grave.entry, grave.request
    dead = entry if isinstance(entry, DeadRequest) else None
    return {
        "id": grave.id,
        "died": _when(entry.died_unix_ms),
        "cause": grave.cause.value,
        "model": request.model if request else "",
        "prompt_tokens": request.prompt_tokens if request else 0,
        "answer_tokens": dead.tokens if dead else 0,
        "attempts": dead.attempts if dead else 0,
        "retried_as": response_id(grave.retries[-1].retried_as) if grave.retries else "",
        "reason": grave.reason,
    }


def _details(grave: Grave) -> dict[str, Any]:
    entry, request = grave.entry, grave.request
    told: dict[str, Any] = {"trace_id": entry.trace_id, "gateway": entry.gateway}
    match entry:
        case DeadRequest():
            told |= {
                "scheduler": entry.scheduler,
                "lost_attempts": entry.lost_attempts,
                "adoptions": entry.adoptions,
                "setbacks": [
                    msgspec.to_builtins(s) | {"at": _when(s.unix_ms)} for s in entry.setbacks
                ],
            }
        case DeadLetter():
            told |= {"subject": entry.subject, "bytes": len(entry.payload)}
    if request is not None:
        shown = msgspec.structs.replace(request, prompt_ids=(), secret=b"")
        told["request"] = msgspec.to_builtins(shown)
    told["retries"] = [
        {"as": response_id(r.retried_as), "at": _when(r.retried_unix_ms)} for r in grave.retries
    ]
    return told


async def _prompt(bus: Bus, grave: Grave) -> str:
    """What was asked, as text where its model's card is there; bytes of what is no request."""
    request = grave.request
    if request is None:
        payload = grave.entry.payload if isinstance(grave.entry, DeadLetter) else b""
        return base64.b64encode(payload).decode()
    ids: Sequence[int] = request.prompt_ids
    if request.prompt is not None:
        ids = unpacked(await prompt_of(bus, RequestId(grave.id), request.prompt), request.prompt)
    card = await bus.get_object(MODELS, subjects.escape(request.model))
    return " ".join(map(str, ids)) if card is None else _text(card, ids)


def _text(data: bytes, ids: Sequence[int]) -> str:
    card: ModelCard = decode(data, ModelCard)
    text = AnswerText(TextCodec.from_card(card))
    return text.push(ids) + text.finish()


def _when(unix_ms: int) -> str:
    if not unix_ms:
        return ""
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="seconds")
