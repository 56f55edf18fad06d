"""A share of a durable pull consumer, by an own loop on one inbox.

nats-py's `fetch` stalls for its whole remaining time after a restart of the server. Here a request
for messages stands at the server; it is renewed at half its batch, when the server ends it (404,
408, 409), when two heartbeats are missed, and after a reconnect.
"""

import asyncio
import json
import logging
from collections.abc import Callable

from nats.aio.msg import Msg

from diptych_bus.jetstream.answers import API, status
from diptych_bus.jetstream.connection import Connection, Listening
from diptych_bus.jetstream.declaring import NS, declare_consumer
from diptych_bus.jetstream.messaging import delivery_of, sent_on, stamp_ms
from diptych_bus.lifetime import stop, woken
from diptych_bus.port import Delivery, Pulled
from diptych_contracts.errors import Transient
from diptych_contracts.streams import ConsumerSpec

log = logging.getLogger("diptych.bus")

EXPIRES_S = 1.0
"""How long a request for messages stands. That of a frozen replica takes messages until then, each
of which is then lost to the others for `ack_wait_s`: with 30 s some came to the frozen one four
times in a row (6 s measured), and one time more would have been their last."""
HEARTBEAT_S = 0.5
MISSED_S = 2.2
LOOK_S = 0.25
PAUSED_LOOK_S = 0.05
DECLARE_S = 5.0


class PulledMessage:
    """See `port.Pulled`. Acknowledging does not wait: a lost ack means another delivery."""

    def __init__(self, connection: Connection, msg: Msg) -> None:
        self._connection = connection
        self._reply = msg.reply
        self.delivery: Delivery = delivery_of(msg)
        self.seq: int = msg.metadata.sequence.stream
        self.num_delivered: int = msg.metadata.num_delivered
        self.stored_unix_ms: int = stamp_ms(msg)

    async def ack(self) -> None:
        """Done: never deliver it again."""
        await self._connection.publish(self._reply, b"+ACK")

    async def hold(self) -> None:
        """Still in work: the time until it is delivered again begins anew."""
        await self._connection.publish(self._reply, b"+WPI")

    async def nak(self, delay_s: float) -> None:
        """Not now: deliver it again, to anyone, after `delay_s`."""
        body = json.dumps({"delay": int(delay_s * NS)}).encode()
        await self._connection.publish(self._reply, b"-NAK " + body)


class Puller:
    """One replica's share; made by `start`."""

    def __init__(
        self,
        connection: Connection,
        spec: ConsumerSpec,
        *,
        handler: Callable[[Pulled], None],
        paused: Callable[[], bool],
    ) -> None:
        self._connection = connection
        self._spec = spec
        self._handler = handler
        self._paused = paused
        self._loop = asyncio.get_running_loop()
        self._inbox = connection.inbox()
        self._asked = 0
        """Messages the server may still send without being asked again."""
        self._heard_s = self._loop.time()
        self._consumer_lost = False
        self._wake = asyncio.Event()
        self._listening: Listening | None = None
        self._task: asyncio.Task[None] | None = None
        self._stop_watching = connection.watch_link(up=self._forget)

    async def start(self) -> "Puller":
        """Create the consumer if need be and start asking."""
        try:
            await declare_consumer(self._connection, self._spec, timeout_s=DECLARE_S)
            self._listening = await self._connection.listen(self._inbox, self._on_message)
        except BaseException:
            await self.close()
            raise
        what = f"pull {self._spec.stream}.{self._spec.name}"
        self._task = self._connection.lifetime.start(self._run(), what)
        return self

    async def close(self) -> None:
        """Ask for no more; what was delivered may still be acknowledged."""
        self._stop_watching()
        await stop(self._task)
        if self._listening is not None:
            await self._listening.close()

    def _on_message(self, msg: Msg) -> None:
        self._heard_s = self._loop.time()
        code = status(msg)
        if code is None:
            self._asked = max(0, self._asked - 1)
            if 2 * self._asked <= self._spec.batch:
                self._wake.set()
            pulled = PulledMessage(self._connection, msg)
            if sent_on(msg):
                log.warning("bus_reflected_message_refused: %s", msg.subject)
                self._connection.lifetime.start(pulled.ack(), "refusing a reflected message")
                return
            self._connection.server_clock.stamped(pulled.stored_unix_ms)
            self._handler(pulled)
        elif code != "100":
            self._on_end(code, msg)

    def _on_end(self, code: str, msg: Msg) -> None:
        unserved = (msg.headers or {}).get("Nats-Pending-Messages")
        self._asked = max(0, self._asked - int(unserved)) if unserved else 0
        self._consumer_lost = code == "503" or "deleted" in str(msg.headers).lower()
        if code in ("404", "408"):
            self._wake.set()  # others are asked again at the next look, not at once

    def _forget(self) -> None:
        self._asked = 0
        self._wake.set()

    async def _run(self) -> None:
        while True:
            await self._ask()
            if self._paused():
                await asyncio.sleep(PAUSED_LOOK_S)
            else:
                await woken(self._wake, LOOK_S)
            if self._asked and self._loop.time() - self._heard_s > MISSED_S:
                self._forget()

    async def _ask(self) -> None:
        wanted = self._spec.batch - self._asked
        if 2 * wanted < self._spec.batch or not self._connection.connected or self._paused():
            return
        if self._consumer_lost and not await self._restore():
            return
        self._asked += wanted
        self._heard_s = self._loop.time()
        ask = {
            "batch": wanted,
            "expires": int(EXPIRES_S * NS),
            "idle_heartbeat": int(HEARTBEAT_S * NS),
        }
        subject = f"{API}.CONSUMER.MSG.NEXT.{self._spec.stream}.{self._spec.name}"
        await self._connection.publish(subject, json.dumps(ask).encode(), reply=self._inbox)

    async def _restore(self) -> bool:
        try:
            await declare_consumer(self._connection, self._spec, timeout_s=DECLARE_S)
        except Transient as err:
            log.debug("pull_consumer_lost: %s: %s", self._spec.name, err)
            return False
        self._consumer_lost = False
        return True
