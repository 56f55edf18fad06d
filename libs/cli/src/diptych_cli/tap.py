"""`diptych tap`: what goes over the bus, a JSON line per message, by plain MessagePack alone."""

import asyncio
import base64
import os
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from diptych_bus.jetstream.client import IdentifiedClient
from diptych_cli import credentials
from diptych_cli.failing import CliError
from diptych_contracts import subjects
from diptych_contracts.wire import HIDDEN

EVERYTHING = ">"
CHATTER = (
    *("beat.", "load.", "queue.", "power."),
    *("$KV.leases.", "$KV.workers."),
    *("live.", "$JS.", "_INBOX."),
)
"""Not shown unless asked for: telemetry many times a second, renewals every few seconds, what was
shown when it was stored, and the server's own business. A stack that nobody asks is silent."""
_DELIVERY = "$JS.ACK."
IDS = (
    *("prompt_ids", "prefix_ids", "first_ids", "token_ids", "block_hashes"),
    *("logprobs", "first_logprobs"),
)
"""What people wrote, and what they were answered."""
_CHUNK = re.compile(r"\$O\.[^.]+\.C\.")
_CONNECT_S = 10.0


def tap(url: str, subject: str, *, count: int | None, everything: bool) -> int:
    """Print messages until `count` are printed, or Ctrl-C."""
    try:
        asyncio.run(_listen(url, subject, count, everything=everything))
    except KeyboardInterrupt:
        return 0
    return 0


async def _listen(url: str, subject: str, count: int | None, *, everything: bool) -> None:
    ended = asyncio.get_running_loop().create_future()
    printed = 0

    async def heard(message: Msg) -> None:
        nonlocal printed
        if ended.done() or (subject == EVERYTHING and is_chatter(message.subject, message.reply)):
            return
        try:
            print(line(message.subject, message.data, everything=everything), flush=True)
        except BrokenPipeError:
            # Whoever read has gone; at exit Python would complain once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ended.set_result(None)
            return
        printed += 1
        if printed == count:
            ended.set_result(None)

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def refuse(reason: str) -> None:
        if not ended.done():
            ended.set_exception(CliError(reason))

    client = await _connected(url, end, refuse)
    try:
        for one in subjects.EVERYTHING if subject == EVERYTHING else (subject,):
            await client.subscribe(one, cb=heard)
        await client.flush()
        await ended
    finally:
        await client.close()


async def _connected(url: str, lost: Callable[[], None], refuse: Callable[[str], None]) -> Any:
    async def closed() -> None:
        lost()

    async def quiet(err: Exception) -> None:
        """Told below, or by the end; but not what this identity may not hear."""
        if "permissions violation" in str(err).lower():
            refuse(f"this identity may not hear that: {err}")

    client = IdentifiedClient(credentials.access(url))
    try:
        async with asyncio.timeout(_CONNECT_S):
            await client.connect_as(url, name="diptych-tap", error_cb=quiet, closed_cb=closed)
            return client
    except (OSError, TimeoutError, NatsError) as err:
        raise CliError(f"no NATS server answers at {url}") from err


def is_chatter(subject: str, reply: str) -> bool:
    """Whether a message is left out where everything is asked for.

    That goes for each consumer's copy of a stored message too.
    """
    return subject.startswith(CHATTER) or reply.startswith(_DELIVERY)


def line(subject: str, data: bytes, *, everything: bool, now: datetime | None = None) -> str:
    """One message as JSON; token ids are counted, not shown, unless `everything` is asked for."""
    at = now or datetime.now(UTC)
    facts: dict[str, Any] = {
        "time": at.isoformat(timespec="milliseconds"),
        "subject": subject,
        "size": len(data),
    }
    if _CHUNK.match(subject) and not everything:  # of long prompts, of what people wrote
        return msgspec.json.encode(facts | {"type": "", "raw": f"<{len(data)} bytes>"}).decode()
    try:
        message = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        facts["type"] = str(message.pop("type", ""))
        message = without_secrets(message)
        facts["message"] = message if everything else without_ids(message)
    else:
        facts["type"] = ""
        facts["raw"] = _text(data)
    return msgspec.json.encode(facts, enc_hook=str).decode()


def without_secrets(value: Any) -> Any:
    """`value` without what would let its reader speak for a request."""
    if isinstance(value, dict):
        return {
            key: "<hidden>" if key in HIDDEN else without_secrets(part)
            for key, part in value.items()
        }
    return [without_secrets(part) for part in value] if isinstance(value, list) else value


def without_ids(value: Any) -> Any:
    """`value` with lists of token ids replaced by their length."""
    if isinstance(value, dict):
        return {
            key: f"<{len(part)} ids>"
            if key in IDS and isinstance(part, list)
            else without_ids(part)
            for key, part in value.items()
        }
    if isinstance(value, list):
        return [without_ids(part) for part in value]
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else value


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return base64.b64encode(data).decode()
