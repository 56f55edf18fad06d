import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from diptych_cli import readiness


class Client:
    """One whose question is answered just when it is cancelled."""

    made: "list[Client]"

    def __init__(self, _me: Any) -> None:
        self.asked = asyncio.Event()
        self.closed = False
        self.made.append(self)

    async def connect_as(self, _url: str, **_options: Any) -> None:
        pass

    def jetstream(self, *, timeout: float) -> "Client":
        return self

    async def account_info(self) -> None:
        self.asked.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            return

    async def close(self) -> None:
        self.closed = True


async def test_a_supervisor_that_is_stopped_while_it_connects_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`wait_for` before Python 3.12 gives the answer, and the cancellation is lost."""
    Client.made = []
    monkeypatch.setattr(readiness, "IdentifiedClient", Client)
    me: Any = SimpleNamespace(name="supervisor-1")
    there = asyncio.Event()
    connecting = asyncio.create_task(readiness._connected("tls://h:1", me, there))
    await asyncio.sleep(0)
    (client,) = Client.made
    await client.asked.wait()
    connecting.cancel()
    await asyncio.wait([connecting], timeout=60)
    assert connecting.cancelled()
    assert client.closed
    assert not there.is_set()
