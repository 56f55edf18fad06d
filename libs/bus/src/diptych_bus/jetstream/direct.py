"""Direct reads from a stream: one message, the last of a subject, all of a subject in batches."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import datetime

from nats.aio.msg import Msg

from diptych_bus.jetstream.answers import API, status
from diptych_bus.jetstream.client import REFLECTED
from diptych_bus.jetstream.connection import Connection
from diptych_contracts.errors import BusAway

log = logging.getLogger("diptych.bus")

BATCH = 512
BATCH_WAIT_S = 1.0
"""Silence within a batch before the rest is asked for again."""
READ_S = 5.0
"""Silence after which a read gives up."""
CALL_S = 5.0
"""Deadline of one read that has none of its own: a restart of the server fits in."""


def seq_of(msg: Msg) -> int:
    """The stream sequence of a directly read or republished message."""
    return int((msg.headers or {})["Nats-Sequence"])


def last_seq_of(msg: Msg) -> int:
    """The sequence of the message before it on the same subject; 0 if there was none."""
    return int((msg.headers or {})["Nats-Last-Sequence"])


def stored_ms_of(msg: Msg) -> int:
    """When a directly read message was stored, by the server's clock."""
    stamp: str = (msg.headers or {})["Nats-Time-Stamp"]
    return round(datetime.fromisoformat(stamp).timestamp() * 1000)


def genuine(msg: Msg) -> bool:
    """Whether a directly read message was published by a process, not by the server for one.

    The server sends what it answers wherever a question asks, into other streams too, whatever the
    asker itself may publish. What comes from one stream into another names both of them.
    """
    if REFLECTED not in (msg.headers or {}):
        return True
    log.warning("bus_reflected_message_refused: %s", (msg.headers or {}).get("Nats-Subject"))
    return False


async def by_seq(connection: Connection, stream: str, seq: int) -> Msg | None:
    """The message at `seq`, or None if it is gone."""
    msg = await connection.ask(
        f"{API}.DIRECT.GET.{stream}", json.dumps({"seq": seq}).encode(), timeout_s=CALL_S
    )
    return msg if status(msg) is None else None


async def last_on(connection: Connection, stream: str, subject: str) -> Msg | None:
    """The newest message on `subject`, or None if there is none."""
    msg = await connection.ask(f"{API}.DIRECT.GET.{stream}.{subject}", timeout_s=CALL_S)
    return msg if status(msg) is None else None


async def all_on(
    connection: Connection, stream: str, subject: str, *, after_seq: int
) -> AsyncGenerator[Msg, None]:
    """Every message on `subject` after `after_seq`, up to the newest, in order.

    Raises:
        BusAway: no progress for 5 s.
    """
    loop = asyncio.get_running_loop()
    progress_s = loop.time()
    while True:
        async with aclosing(_batch(connection, stream, subject, after_seq)) as batch:
            async for msg in batch:
                code = status(msg)
                if code == "404" or (code and (msg.headers or {}).get("Nats-Num-Pending") == "0"):
                    return
                if code or last_seq_of(msg) > after_seq:
                    break  # the batch's end, or a message was lost on the way: ask again
                after_seq, progress_s = seq_of(msg), loop.time()
                yield msg
        if loop.time() - progress_s > READ_S:
            raise BusAway(f"no answer reading {subject} of {stream}")


async def _batch(
    connection: Connection, stream: str, subject: str, after_seq: int
) -> AsyncGenerator[Msg, None]:
    """One batch and its closing status; it just ends where nothing comes any more."""
    arrived: asyncio.Queue[Msg] = asyncio.Queue(maxsize=2 * BATCH)

    def take(msg: Msg) -> None:
        if not arrived.full():
            arrived.put_nowait(msg)

    inbox = connection.inbox()
    listening = await connection.listen(inbox, take)
    ask = {"seq": after_seq + 1, "next_by_subj": subject, "batch": BATCH}
    try:
        await connection.publish(
            f"{API}.DIRECT.GET.{stream}", json.dumps(ask).encode(), reply=inbox
        )
        while True:
            async with asyncio.timeout(BATCH_WAIT_S):
                msg = await arrived.get()
            yield msg
    except TimeoutError:
        return
    finally:
        await listening.close()
