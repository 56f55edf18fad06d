"""One connection to the server: connecting, healing, sending, asking.

What nats-py 2.16 does not do by itself: notice a frozen server in seconds, spread reconnects, bound
every wait, and say when it gave up.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from diptych_bus.access import Access
from diptych_bus.jetstream.client import IdentifiedClient
from diptych_bus.lifetime import Lifetime, heeding, within, woken
from diptych_bus.server_clock import ServerClock
from diptych_bus.sizes import check_size
from diptych_contracts.errors import BusAway, Transient

log = logging.getLogger("diptych.bus")

PENDING_BYTES = 8 * 1024 * 1024
"""What is buffered while the server is away (2 MiB is nats-py's default)."""
BACKLOG_MESSAGES = 8192
"""Messages that may wait for one handler; what exceeds it is dropped and healed as a gap."""
TRY_S = 0.5
"""The first try of an idempotent question; a restart of the server loses what is in flight."""
MAX_TRY_S = 2.0
"""The longest one: a server that always needs a second would never be heard in half of one."""
SETTLE_S = 1.0
NOT_READY_PAUSE_S = 0.05
"""Pause while JetStream recovers (12-216 ms measured)."""

REFUSED_S = 10.0
"""How long the server may refuse an identity until the process ends: one that is just being
renewed, or a server that is just being told of its key, is not refused for so long."""
WARN_EVERY_S = 1.0

_ERRORS = (nats.errors.Error, TimeoutError, OSError)


class Listening:
    """A subscription; `handler` is called for each message until `close`."""

    def __init__(self, handler: Callable[[Msg], None], lifetime: Lifetime, subject: str) -> None:
        self._handler: Callable[[Msg], None] | None = handler
        self._lifetime = lifetime
        self._subject = subject
        self.subscription: NatsSubscription | None = None

    async def on_message(self, msg: Msg) -> None:
        """What nats-py calls."""
        if self._handler is not None:
            self._lifetime.call(self._handler, msg, self._subject)

    async def close(self) -> None:
        """No handler is called after this."""
        self._handler = None
        if self.subscription is not None:
            try:
                await heeding(self.subscription.unsubscribe())
            except nats.errors.Error:
                return  # closed already


def without_secrets(url: str) -> str:
    """`url` without user, password or token: it goes into errors and logs."""
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"


class Connection:
    """A client that heals itself; made by `open`."""

    def __init__(self, url: str, lifetime: Lifetime, access: Access | None = None) -> None:
        self._url = without_secrets(url)
        self.lifetime = lifetime
        self.access = access
        self.client = IdentifiedClient(access)
        self.server_clock = ServerClock(time.monotonic, lambda: time.time_ns() // 1_000_000)
        self._up = asyncio.Event()
        self._last_error: Exception | None = None
        self._warn_at_s = 0.0
        self._links: dict[tuple[Callable[[], None], Callable[[], None] | None], None] = {}

    @classmethod
    async def open(
        cls, url: str, *, name: str, wait_s: float, access: Access | None = None
    ) -> "Connection":
        """Connect, trying again for `wait_s`; with `access`, over TLS and as somebody.

        Raises:
            BusAway: nobody answers at `url`.
        """
        self = cls(url, Lifetime(), access)
        try:
            connecting = self.client.connect_as(
                url,
                name=name,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
                connect_timeout=2,
                reconnect_time_wait=0.1 * (1 + random.random()),
                max_reconnect_attempts=-1,
                ping_interval=1,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
                flush_timeout=2.0,
            )
            await within(wait_s, connecting)
        except BaseException as err:
            await self.client.close()
            if not isinstance(err, _ERRORS):
                raise
            reason = self._last_error or err
            raise BusAway(f"expected NATS at {self._url} within {wait_s:g} s: {reason}") from err
        self._up.set()
        self.lifetime.start(self._watch_reconnecting(), "reconnecting")
        return self

    @property
    def connected(self) -> bool:
        """Whether the server is there, as far as this client knows."""
        return self._up.is_set() and self.client.is_connected

    def watch_link(
        self, *, up: Callable[[], None], down: Callable[[], None] | None = None
    ) -> Callable[[], object]:
        """Call `up` after each reconnect and `down` after each loss; gives the way to stop it."""
        link = (up, down)
        self._links[link] = None
        return lambda: self._links.pop(link, None)

    async def listen(
        self, subject: str, handler: Callable[[Msg], None], *, backlog: int = BACKLOG_MESSAGES
    ) -> Listening:
        """Subscribe for what this client asks for itself; see also `listen_for_others`."""
        listening = Listening(handler, self.lifetime, subject)
        try:
            listening.subscription = await heeding(
                self.client.subscribe(subject, cb=listening.on_message, pending_msgs_limit=backlog)
            )
        except nats.errors.Error as err:
            raise BusAway(f"cannot subscribe to {subject}: {err}") from err
        return listening

    async def listen_for_others(self, subject: str, handler: Callable[[Msg], None]) -> Listening:
        """Subscribe; when this returns the server hears it, so other clients' messages come."""
        listening = await self.listen(subject, handler)
        await self.settle()
        return listening

    async def settle(self) -> None:
        """Wait until the server has read everything sent so far; gives up after a second.

        A message to ourselves: nats-py's own flush, when it times out, lets a late pong end its
        read loop.
        """
        back = asyncio.Event()
        inbox = self.inbox()
        listening = await self.listen(inbox, lambda _: back.set())
        await self.publish(inbox, b"")
        await woken(back, SETTLE_S if self.connected else 0.0)
        await listening.close()

    def inbox(self) -> str:
        """A subject only this client knows."""
        return self.client.new_inbox()

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        reply: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send and forget; dropped while the server is away."""
        check_size(subject, data, headers)
        if not self.connected:
            return
        try:
            await heeding(
                self.client.publish(
                    subject, data, reply=reply, headers=dict(headers) if headers else None
                )
            )
        except _ERRORS as err:
            log.debug("bus_publish_dropped: %s: %s", subject, err)

    async def request(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Msg:
        """Ask once.

        Raises:
            BusAway: no answer in `timeout_s`, or (at once) nobody listens.
        """
        check_size(subject, data, headers)
        try:
            return await self._ask_once(subject, data, headers, timeout_s)
        except nats.errors.NoRespondersError as err:
            raise BusAway(f"nobody answers on {subject}") from err
        except _ERRORS as err:
            raise BusAway(f"no answer on {subject} within {timeout_s:g} s") from err

    async def ask(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> Msg:
        """Ask JetStream something that may be asked twice, until it answers.

        Raises:
            BusAway: no answer in `timeout_s`.
            Transient: JetStream does not run, or is still starting up.
        """
        check_size(subject, data, headers)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        not_ready, try_s = False, TRY_S
        while (left_s := end_s - loop.time()) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await self._up.wait()
                return await self._ask_once(subject, data, headers, min(try_s, left_s))
            except nats.errors.NoRespondersError:
                not_ready = True
                await asyncio.sleep(NOT_READY_PAUSE_S)
            except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as err:
                raise BusAway(f"connection to {self._url} is closed") from err
            except _ERRORS:
                not_ready, try_s = False, min(2 * try_s, MAX_TRY_S)
                await asyncio.sleep(NOT_READY_PAUSE_S)
        if not_ready:
            raise Transient(f"JetStream at {self._url} is not ready: nobody answers on {subject}")
        raise BusAway(f"no answer on {subject} within {timeout_s:g} s")

    async def _ask_once(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None, timeout_s: float
    ) -> Msg:
        return await heeding(
            self.client.request(
                subject, data, timeout=timeout_s, headers=dict(headers) if headers else None
            )
        )

    async def close(self) -> None:
        """Send what is buffered and leave."""
        await self.lifetime.finish()
        if self.connected:
            await self.settle()
        await self.client.close()

    async def _watch_reconnecting(self) -> None:
        """Say so if nats-py's reconnecting ends by an exception it does not expect.

        Or if the server does not believe this process any more.
        """
        refused_since_s: float | None = None
        while True:
            await asyncio.sleep(1.0)
            now_s = asyncio.get_running_loop().time()
            if not self.client.refusals:
                refused_since_s = None
            elif refused_since_s is None:
                refused_since_s = now_s
            elif now_s - refused_since_s > REFUSED_S:
                text = f"the bus at {self._url} refuses this process's identity: {self._last_error}"
                self.lifetime.end(Transient(text))
            task = self.client._reconnection_task
            if not self.client.is_connected and task is not None and task.done():
                self.lifetime.end(BusAway(f"reconnecting to {self._url} ended: {self._last_error}"))

    async def _on_error(self, err: Exception) -> None:
        self._last_error = err
        if isinstance(err, nats.errors.SlowConsumerError):
            log.warning("bus_backlog_full: %s", err.subject)
        elif "permissions violation" in str(err).lower():
            # A right that the table lacks, or one that this process should not need.
            if (now_s := asyncio.get_running_loop().time()) >= self._warn_at_s:
                self._warn_at_s = now_s + WARN_EVERY_S
                log.warning("bus_permission_refused: %s", err)
        else:
            log.debug("bus_connection_error: %r", err)

    async def _on_disconnected(self) -> None:
        if not self._up.is_set():
            return
        self._up.clear()
        # What nats-py still holds would overtake what is sent again, oldest first, on reconnect.
        self.client._pending = []
        self.client._pending_data_size = 0
        if not self.client.is_closed:
            log.warning("bus_disconnected: %s", self._last_error)
        for _, down in tuple(self._links):
            if down is not None:
                down()

    async def _on_reconnected(self) -> None:
        self._up.set()
        log.info("bus_reconnected")
        for up, _ in tuple(self._links):
            up()

    async def _on_closed(self) -> None:
        self.lifetime.end(BusAway(f"connection to {self._url} closed: {self._last_error}"))
