"""The supervisor on the stack's own bus: it hears who serves, and answers orders."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from diptych_contracts import subjects
from diptych_contracts.errors import Permanent
from diptych_contracts.fleet import Beat
from diptych_contracts.wire import Message, decode, encode

_PAUSE_S = 0.05

Answer = Callable[[bytes], Awaitable[Message]]


async def listen(
    url: str,
    *,
    on_server: Callable[[], None],
    on_beat: Callable[[Beat], None],
    answers: Mapping[str, Answer],
) -> None:
    """Tell of the server whenever it is there (again), and of every beat, until cancelled.

    Requests on the subjects of `answers` are answered meanwhile, however long that takes.
    """

    async def heard(message: Msg) -> None:
        try:
            on_beat(decode(message.data, Beat))
        except Permanent:
            return  # a stranger's message: not ours to judge

    client = await _connected(url, on_server)
    try:
        async with asyncio.TaskGroup() as tasks:
            await client.subscribe(subjects.BEATS, cb=heard)
            for subject, answer in answers.items():
                await client.subscribe(subject, cb=_answering(tasks, answer))
            on_server()
            await asyncio.Event().wait()
    finally:
        await client.close()


def _answering(tasks: asyncio.TaskGroup, answer: Answer) -> Callable[[Msg], Awaitable[None]]:
    async def reply(message: Msg) -> None:
        answered = encode(await answer(message.data))
        with contextlib.suppress(NatsError):  # else whoever asked will ask again
            await message.respond(answered)

    async def asked(message: Msg) -> None:
        if message.reply:
            tasks.create_task(reply(message))

    return asked


async def _connected(url: str, on_server: Callable[[], None]) -> Client:
    async def back() -> None:
        on_server()

    options: dict[str, Any] = {
        "connect_timeout": 1,
        "reconnect_time_wait": 0.1,
        "max_reconnect_attempts": -1,
        "ping_interval": 1,
        "max_outstanding_pings": 2,
        "error_cb": _quiet,
        "reconnected_cb": back,
    }
    while True:
        try:
            client = await nats.connect(url, name="diptych-up", **options)
            await client.jetstream(timeout=1).account_info()
            return client
        except (TimeoutError, OSError, NatsError):
            await asyncio.sleep(_PAUSE_S)


async def _quiet(_: Exception) -> None:
    """That the server is away is told by its exit."""
