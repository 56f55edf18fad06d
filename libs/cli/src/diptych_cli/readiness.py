"""The supervisor on the stack's own bus: it hears who serves, and answers orders."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from diptych_bus.access import Access
from diptych_bus.jetstream import JetStreamBus
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.lifetime import heeding
from diptych_contracts import subjects
from diptych_contracts.errors import Permanent, Transient
from diptych_contracts.fleet import Beat
from diptych_contracts.wire import Message, decode, encode

_PAUSE_S = 0.05
_PREPARE_S = 10.0

Answer = Callable[[bytes], Awaitable[Message]]


async def listen(
    url: str,
    me: Access,
    *,
    on_server: Callable[[], None],
    on_beat: Callable[[Beat], None],
    answers: Mapping[str, Answer],
) -> None:
    """Tell of the server whenever it is there (again), and of every beat, until cancelled.

    Before it is told of, it has every stream and bucket: nobody else may create them.

    Requests on the subjects of `answers` are answered meanwhile, however long that takes.
    """

    async def heard(message: Msg) -> None:
        try:
            on_beat(decode(message.data, Beat))
        except Permanent:
            return  # a stranger's message: not ours to judge

    there = asyncio.Event()
    client = await _connected(url, me, there)
    try:
        async with asyncio.TaskGroup() as tasks:
            await client.subscribe(subjects.BEATS, cb=heard)
            for subject, answer in answers.items():
                await client.subscribe(subject, cb=_answering(tasks, answer))
            while True:
                await there.wait()
                there.clear()
                if await _prepared(url, me):
                    on_server()
                else:
                    await asyncio.sleep(_PAUSE_S)
                    there.set()
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


async def _prepared(url: str, me: Access) -> bool:
    """Have what is missing of streams and buckets created."""
    try:
        bus = await JetStreamBus.connect(url, name=me.name, wait_s=_PREPARE_S, access=me)
    except Transient:
        return False
    await bus.close()
    return True


async def _connected(url: str, me: Access, there: asyncio.Event) -> Client:
    async def back() -> None:
        there.set()

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
        client = IdentifiedClient(me)
        try:
            await client.connect_as(url, name=me.name, **options)
            await heeding(client.jetstream(timeout=1).account_info())
            there.set()
            return client
        except BaseException as err:
            await client.close()
            if not isinstance(err, TimeoutError | OSError | NatsError):
                raise
        await asyncio.sleep(_PAUSE_S)


async def _quiet(_: Exception) -> None:
    """That the server is away is told by its exit."""
