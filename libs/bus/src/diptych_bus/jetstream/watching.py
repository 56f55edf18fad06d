"""A watch on a bucket that heals.

An ordered consumer with heartbeats delivers every key, then every change. A gap in its numbering,
silence, or a reconnect starts a new listing; keys that are missing from it are reported as gone.
The server says nothing when a key expires, so each key's TTL is kept and the key is looked up when
it is over.

Values that are *final* for the watcher are told and forgotten: a bucket of 100,000 closed records
then costs a listing (1.9 s of CPU), but no memory, and after a short absence not even that: the
listing begins where the last one was. The server sends no faster than we take (flow control).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from uuid import uuid4

from nats.aio.msg import Msg

from diptych_bus.jetstream import direct
from diptych_bus.jetstream.answers import ApiError, api, status
from diptych_bus.jetstream.connection import Connection, Listening
from diptych_bus.jetstream.declaring import NS
from diptych_bus.jetstream.messaging import sent_on, stamp_ms
from diptych_bus.lifetime import stop, woken
from diptych_bus.port import Gone, Kept, never
from diptych_bus.stream_names import API, bucket_stream
from diptych_contracts.errors import BusAway, Permanent, Transient
from diptych_contracts.wire import Message, decode

M = TypeVar("M", bound=Message)

log = logging.getLogger("diptych.bus")

HEARTBEAT_S = 0.5
SILENCE_S = 1.6
"""Three missed heartbeats."""
LOOK_S = 0.25
LISTING_S = 15.0
"""Silence after which a listing is given up; 5 s came about where 100,000 keys were listed by one
of many busy processes."""
SHORT_AWAY_S = 60.0
"""After a longer absence a forgotten value may have expired, and a remembered one been forgotten
by everybody else: all is listed."""
LISTING_MESSAGES = 65_536
"""More than flow control lets the server send ahead: at most 32 MiB, usually 2."""
EXPIRY_MARGIN_S = 0.3
EXPIRY_RETRY_S = 0.5
"""Keys expire late: up to a second (measured)."""


def is_gone(msg: Msg) -> bool:
    """Whether a bucket's message is a tombstone."""
    return "KV-Operation" in (msg.headers or {})


def ttl_left_s(msg: Msg, unix_ms: int) -> float | None:
    """How long the key will live, `unix_ms` being the server's time; None if it has no TTL."""
    ttl = (msg.headers or {}).get("Nats-TTL")
    if not ttl:
        return None
    age_s = (unix_ms - stamp_ms(msg)) / 1000
    ttl_s = float(ttl.rstrip("s"))
    return ttl_s - min(max(age_s, 0.0), ttl_s)


class Listing:
    """One consumer: the keys it has listed so far, and how many messages came."""

    def __init__(self, prefix: str, inbox: str) -> None:
        self.consumer = uuid4().hex
        self.prefix = prefix
        self.inbox = inbox
        self.listening: Listening | None = None
        self.count = 0
        self.expected: int | None = None
        """Messages until every key that was present is listed; None until known."""
        self.keys: set[str] = set()
        """The keys listed."""
        self.complete = False
        self.after_seq = 0
        """0: every key is listed; else those written after that sequence."""


class Watch(Generic[M]):
    """One watch; made by `start`."""

    def __init__(
        self,
        connection: Connection,
        bucket: str,
        kind: type[M],
        *,
        handler: Callable[[Kept[M] | Gone], None],
        final: Callable[[M], bool] = never,
    ) -> None:
        self._connection = connection
        self._stream = bucket_stream(bucket)
        self._prefix = f"$KV.{bucket}."
        self._kind = kind
        self._handler = handler
        self._final = final
        self._loop = asyncio.get_running_loop()
        self._revisions: dict[str, int] = {}
        self._expiries: dict[str, float] = {}
        self._listing: Listing | None = None
        self._listed = asyncio.Event()
        self._stale = False
        self._heard_s = self._loop.time()
        self._told_s = self._loop.time()
        """When the last value came."""
        self._seq = 0
        """The newest sequence seen."""
        self._alive_s = self._loop.time()
        """When a complete listing was last heard of."""
        self._resumable = False
        """Whether everything up to `_seq` was told."""
        self._flow: list[str] = []
        """Where to tell the server that we have kept up."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stop_watching = connection.watch_link(up=self._list_soon)

    async def start(self) -> "Watch[M]":
        """List the bucket. Raises `BusAway` if that does not go on for 15 s."""
        try:
            await self._list()
            self._task = self._connection.lifetime.start(self._heal(), f"watch {self._stream}")
            while not self._listed.is_set():
                if self._loop.time() - self._told_s > LISTING_S:
                    raise BusAway(f"no listing of {self._stream} for {LISTING_S:g} s")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await self._listed.wait()
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """No handler is called after this."""
        self._stop_watching()
        await stop(self._task)
        await self._drop(self._listing)
        self._listing = None

    async def _list(self) -> None:
        after_seq = await self._known_up_to()
        old, self._listing = self._listing, None
        await self._drop(old)
        listing = Listing(self._prefix, self._connection.inbox())
        listing.after_seq = after_seq
        self._resumable &= after_seq > 0
        self._listing = listing
        self._stale = False
        self._flow.clear()
        self._heard_s = self._told_s = self._loop.time()
        listing.listening = await self._connection.listen(
            listing.inbox, lambda msg: self._on_message(listing, msg), backlog=LISTING_MESSAGES
        )
        try:
            info = await api(
                self._connection,
                f"CONSUMER.CREATE.{self._stream}.{listing.consumer}.{self._prefix}>",
                {"stream_name": self._stream, "config": self._config(listing)},
                timeout_s=LISTING_S,
            )
        except ApiError as err:
            raise err.judged(f"cannot watch {self._stream}") from err
        listing.expected = int(info["num_pending"]) + int(info["delivered"]["consumer_seq"])
        self._check_complete(listing)

    def _config(self, listing: Listing) -> dict[str, Any]:
        begin: dict[str, Any] = {"deliver_policy": "last_per_subject"}
        if listing.after_seq:
            begin = {
                "deliver_policy": "by_start_sequence",
                "opt_start_seq": listing.after_seq + 1,
            }
        return begin | {
            "name": listing.consumer,
            "deliver_subject": listing.inbox,
            "filter_subject": self._prefix + ">",
            "ack_policy": "none",
            "max_deliver": 1,
            "flow_control": True,
            "idle_heartbeat": int(HEARTBEAT_S * NS),
            "inactive_threshold": 5 * NS,
            "mem_storage": True,
            "num_replicas": 1,
        }

    async def _known_up_to(self) -> int:
        """The sequence a new listing may begin after; 0 if everything is to be listed.

        Only where values are forgotten (so there may be many) and the bucket is the same one as
        before: its newest message is at least as new as what was seen.
        """
        away_s = self._loop.time() - self._alive_s
        if self._final is never or not self._resumable or away_s > SHORT_AWAY_S:
            return 0
        last = await direct.last_on(self._connection, self._stream, self._prefix + ">")
        return self._seq if last is not None and direct.seq_of(last) >= self._seq else 0

    async def _drop(self, listing: Listing | None) -> None:
        if listing is None:
            return
        if listing.listening is not None:
            await listing.listening.close()
        where = f"{self._stream}.{listing.consumer}"
        await self._connection.publish(f"{API}.CONSUMER.DELETE.{where}", b"")

    def _on_message(self, listing: Listing, msg: Msg) -> None:
        if listing is not self._listing:
            return
        self._heard_s = self._loop.time()
        if listing.complete:
            self._alive_s = self._heard_s
        if (code := status(msg)) is not None:
            self._on_status(listing, msg, code)
            return
        self._told_s = self._heard_s
        listing.count += 1
        if msg.metadata.sequence.consumer != listing.count:
            self._list_soon()
            return
        self._connection.server_clock.stamped(stamp_ms(msg))
        key = msg.subject[len(self._prefix) :]
        self._seq = max(self._seq, msg.metadata.sequence.stream)
        self._take(key, msg)
        if not listing.complete:
            if key in self._revisions:
                listing.keys.add(key)
            self._check_complete(listing)

    def _on_status(self, listing: Listing, msg: Msg, code: str) -> None:
        headers = msg.headers or {}
        if (keep_up := headers.get("Nats-Consumer-Stalled") or msg.reply) and code == "100":
            self._flow.append(keep_up)
            self._wake.set()
        last = headers.get("Nats-Last-Consumer")
        if code == "100" and last is not None and int(last) > listing.count:
            self._list_soon()

    def _take(self, key: str, msg: Msg) -> None:
        if is_gone(msg):
            self._gone(key)
            return
        if sent_on(msg):
            log.warning("bus_reflected_message_refused: %s", msg.subject)
            return
        revision = msg.metadata.sequence.stream
        if self._revisions.get(key) == revision:
            return
        try:
            value = decode(msg.data, self._kind)
        except Permanent as err:
            log.warning("bucket_value_skipped: %s: %s", msg.subject, err)
            return
        self._expiries.pop(key, None)
        if self._final(value):
            self._revisions.pop(key, None)
        else:
            self._revisions[key] = revision
            if (left_s := ttl_left_s(msg, self._connection.server_clock.unix_ms())) is not None:
                self._expiries[key] = self._loop.time() + left_s + EXPIRY_MARGIN_S
        self._connection.lifetime.call(self._handler, Kept(key, value, revision), msg.subject)

    def _gone(self, key: str) -> None:
        self._expiries.pop(key, None)
        if self._revisions.pop(key, None) is not None:
            self._connection.lifetime.call(self._handler, Gone(key), self._prefix + key)

    def _check_complete(self, listing: Listing) -> None:
        if listing.complete or listing.expected is None or listing.count < listing.expected:
            return
        listing.complete = self._resumable = True
        self._alive_s = self._loop.time()
        missing = set() if listing.after_seq else self._revisions.keys() - listing.keys
        for key in missing:
            self._gone(key)
        listing.keys.clear()
        self._listed.set()

    def _list_soon(self) -> None:
        self._stale = True
        self._wake.set()

    async def _heal(self) -> None:
        while True:
            await woken(self._wake, LOOK_S)
            try:
                await self._look()
            except Transient as err:
                log.debug("bucket_listing_delayed: %s: %s", self._stream, err)
                self._stale = True

    async def _look(self) -> None:
        if not self._connection.connected:
            return
        for keep_up in self._flow[-1:]:  # later ones answer for earlier ones
            await self._connection.publish(keep_up, b"")
        self._flow.clear()
        now_s = self._loop.time()
        if self._stale or now_s - self._heard_s > SILENCE_S:
            await self._list()
        for key in [key for key, due_s in self._expiries.items() if due_s <= now_s]:
            self._expiries[key] = now_s + EXPIRY_RETRY_S
            revision = self._revisions.get(key)
            last = await direct.last_on(self._connection, self._stream, self._prefix + key)
            if last is None and self._revisions.get(key) == revision:
                self._gone(key)
