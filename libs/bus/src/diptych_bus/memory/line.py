"""One client's way to the broker, which can be cut; and whose code runs for it.

Everything a client hears is called in the context (`contextvars`) it connected in, as if it came
from its own socket. So a test can tell whose code runs, and hold one client's up.
"""

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any

from diptych_contracts.errors import BusAway

NOTICED_S = 3.0
"""Pings notice a peer that is silent after this; until then a cut client believes in its line."""


class Line:
    """Up, unless it is cut or the server is away. Needs a running loop.

    Args:
        now_s: The broker's clock.
        server_up: Whether the server is there.
    """

    def __init__(self, now_s: Callable[[], float], *, server_up: bool) -> None:
        self.context = copy_context()
        self._now_s = now_s
        self._server_up = server_up
        self._cut_s: float | None = None
        self._dead = False
        self._back = asyncio.Event()
        self._ups: list[Callable[[], None]] = []
        self._settle()

    @property
    def up(self) -> bool:
        """Whether messages pass."""
        return self._server_up and self._cut_s is None and not self._dead

    @property
    def dead(self) -> bool:
        """Whether its client's process is: nothing passes any more."""
        return self._dead

    @property
    def connected(self) -> bool:
        """Whether the client believes that it is connected."""
        if self._dead or not self._server_up:
            return False
        return self._cut_s is None or self._now_s() - self._cut_s < NOTICED_S

    def server(self, *, up: bool) -> None:
        """The server has gone, or is back."""
        self._server_up = up
        self._settle()

    def cut(self) -> None:
        """From now on nothing passes in either direction."""
        if self._cut_s is None:
            self._cut_s = self._now_s()
        self._settle()

    def heal(self) -> None:
        """Messages pass again; what was said meanwhile is lost, unless it is stored."""
        self._cut_s = None
        self._settle()

    def kill(self) -> None:
        """Nothing passes, for ever."""
        self._dead = True
        self._settle()

    def soon(self, action: Callable[..., Any], *args: Any) -> None:
        """Call `action` as the client's own code, in the loop's next round."""
        asyncio.get_running_loop().call_soon(partial(action, *args), context=self.context)

    def watch(self, up: Callable[[], None]) -> Callable[[], None]:
        """Call `up` whenever messages pass again; gives the way to stop it."""
        self._ups.append(up)
        return partial(self._ups.remove, up)

    async def reachable(self, timeout_s: float) -> None:
        """Wait until messages pass. Raises `BusAway` after `timeout_s`."""
        await asyncio.sleep(0)
        if self._dead:
            raise BusAway("this client is dead")
        try:
            async with asyncio.timeout(timeout_s):
                await self._back.wait()
        except TimeoutError as err:
            raise BusAway(f"the broker was away for {timeout_s:g} s") from err

    def _settle(self) -> None:
        was_up = self._back.is_set()
        if self.up and not was_up:
            self._back.set()
            for up in tuple(self._ups):
                self.soon(up)
        elif not self.up:
            self._back.clear()
