"""KV events that vLLM publishes by ZMQ, as events of our port.

A message is topic, 8-byte sequence number, msgpack batch `[ts, events, rank]`. An event is a map
with its kind as `type` (0.32), or an array with the kind in front (before). A missing number means
that something was missed: it is asked for again where there is a replay endpoint, else nothing is
known any more.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterator
from typing import Any, NamedTuple

import msgspec
import zmq
import zmq.asyncio

from diptych_contracts.errors import EngineGone, Permanent
from diptych_engine.over_http.salts import Salts
from diptych_engine.request_port import KvCleared, KvEvent, KvRemoved, KvStored

log = logging.getLogger("diptych.engine")

MOST_BLOCKS = 1 << 18
"""Blocks whose prefix is remembered: as many as the index of a worker knows."""
REPLAY_S = 5.0
_END = (-1).to_bytes(8, "big", signed=True)
_UNREADABLE = (
    *(msgspec.DecodeError, LookupError, TypeError, ValueError),
    *(AttributeError, RecursionError, OverflowError),
)
_POSITIONS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
        *("lora_id", "medium", "lora_name", "extra_keys", "group_idx"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class _Block(NamedTuple):
    """A block behind others, which all that follow them share: a long prompt has thousands."""

    name: int
    tokens: tuple[int, ...]
    tenant: str | None
    before: "_Block | None"

    def prefix(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The tokens up to its end, and the names of their blocks."""
        chain: list[_Block] = []
        at: _Block | None = self
        while at is not None:
            chain.append(at)
            at = at.before
        chain.reverse()
        tokens = tuple(token for block in chain for token in block.tokens)
        return tokens, tuple(block.name for block in chain)


def see_endpoint(endpoint: str, option: str) -> None:
    """See that ZMQ can connect to `endpoint`, or that there is none.

    Raises:
        Permanent: it cannot: `tcp://*:5557` is where vLLM listens, which is nowhere to connect to.
    """
    if not endpoint:
        return
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.linger = 0
        try:
            socket.connect(endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as err:
            expected = "expected tcp://host:port or ipc://path"
            raise Permanent(f"option {option!r}: {expected}, got {endpoint!r}: {err}") from err


class BlockChains:
    """Makes whole prefixes of vLLM's events, which name one block and its parent.

    Args:
        salts: By which blocks are known to be a tenant's.
        most_blocks: Beyond that the block told of longest ago is forgotten.
    """

    def __init__(self, salts: Salts, *, most_blocks: int = MOST_BLOCKS) -> None:
        self._salts = salts
        self._most_blocks = most_blocks
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def events(self, batch: bytes) -> Iterator[KvEvent]:
        """What a batch says. Raises `EngineGone` if it has another form."""
        try:
            whole = msgspec.msgpack.decode(batch)
            for event in whole["events"] if isinstance(whole, dict) else whole[1]:
                yield from self._event(_fields(event))
        except _UNREADABLE as err:
            raise EngineGone(f"vLLM's KV events: {err!r}") from err

    def clear(self) -> None:
        """Forget all."""
        self._blocks.clear()

    def _event(self, event: dict[str, Any]) -> Iterator[KvEvent]:
        match event.get("type"):
            case "AllBlocksCleared":
                self.clear()
                yield KvCleared()
            case "BlockRemoved" if _on_gpu(event):
                hashes = tuple(map(_number, event["block_hashes"]))
                for name in hashes:
                    self._blocks.pop(name, None)
                yield KvRemoved(hashes)
            case "BlockStored" if _on_gpu(event) and not event.get("lora_name"):
                stored = self._stored(event)
                if stored is not None:
                    yield stored

    def _stored(self, event: dict[str, Any]) -> KvStored | None:
        hashes = tuple(map(_number, event["block_hashes"]))
        size, tokens = event["block_size"], tuple(event["token_ids"])
        before: _Block | None = None
        if (parent := event.get("parent_block_hash")) is not None:
            before = self._blocks.get(_number(parent))
            if before is None:
                return None  # it began before we listened
        whose = self._whose(event, before)
        if whose is None or not hashes or len(tokens) != size * len(hashes):
            return None
        for n, name in enumerate(hashes):
            block = _Block(name, tokens[n * size : (n + 1) * size], whose[0], before)
            self._blocks[name] = before = block
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._most_blocks:
            self._blocks.popitem(last=False)
        return KvStored(*block.prefix(), whose[0])

    def _whose(self, event: dict[str, Any], before: _Block | None) -> tuple[str | None] | None:
        """The tenant; None: blocks of nobody here, or of more than tokens."""
        keys = event.get("extra_keys")
        if keys is None:
            return (before.tenant if before is not None else None,)
        salts = {key for block in keys if block for key in block}
        if not salts:
            return (before.tenant if before is not None else "",)
        tenants = {self._salts.tenant(salt) if isinstance(salt, str) else None for salt in salts}
        tenant = tenants.pop()
        return None if tenants or tenant is None else (tenant,)


class KvListener:
    """Hears one publisher for ever.

    Args:
        endpoint: Where it publishes.
        chains: Read by.
        replay: Where it tells again; empty: nowhere.
        topic: What it publishes under.
    """

    def __init__(
        self, endpoint: str, chains: BlockChains, *, replay: str = "", topic: str = ""
    ) -> None:
        self._endpoint = endpoint
        self._chains = chains
        self._replay = replay
        self._topic = topic.encode()
        self._next: int | None = None
        self._live = -1
        """The last number that came by itself; what is told again may come so too."""
        self.missed = 0
        """How often something was missed and could not be told again."""

    async def events(self) -> AsyncGenerator[KvEvent, None]:
        """What it keeps and drops. Raises `EngineGone` if what it says cannot be read."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = 100_000
        socket.subscribe(self._topic)
        socket.connect(self._endpoint)
        self._next, self._live = None, -1
        self._chains.clear()
        try:
            yield KvCleared()
            for event in await self._again(context, 0):
                yield event
            while True:
                for event in await self._heard(context, await socket.recv_multipart()):
                    yield event
        finally:
            socket.close()
            context.term()

    async def _heard(self, context: zmq.asyncio.Context, frames: list[bytes]) -> list[KvEvent]:
        if len(frames) != 3 or len(frames[1]) != 8:
            raise EngineGone(f"vLLM's KV events: expected 3 frames, saw {len(frames)}")
        number = int.from_bytes(frames[1], "big")
        found: list[KvEvent] = []
        if number <= self._live:  # it began anew
            found += self._lost(number)
        elif self._next is not None and number < self._next:
            self._live = number
            return found  # told again already
        elif self._next is not None and number > self._next:
            found += await self._again(context, self._next)
            if number > self._next:
                found += self._lost(number)
            elif number < self._next:
                self._live = number
                return found
        self._live = number
        self._next = number + 1
        return [*found, *self._chains.events(frames[2])]

    def _lost(self, number: int) -> list[KvEvent]:
        self.missed += 1
        log.warning("kv_events_missed", extra={"expected": self._next, "seen": number})
        self._chains.clear()
        return [KvCleared()]

    async def _again(self, context: zmq.asyncio.Context, first: int) -> list[KvEvent]:
        """What it tells again from number `first` on; empty: it does not, or not all."""
        if not self._replay:
            return []
        socket = context.socket(zmq.DEALER)
        socket.linger = 0
        socket.connect(self._replay)
        found: list[KvEvent] = []
        try:
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) < 2:
                        raise EngineGone(f"vLLM's replay: expected 2 frames, saw {len(frames)}")
                    number, batch = frames[-2:]
                    if number == _END:
                        return found
                    seen = int.from_bytes(number, "big")
                    if seen != (first if self._next is None else self._next):
                        return []
                    found += self._chains.events(batch)
                    self._next = seen + 1
        except TimeoutError:
            return found
        finally:
            socket.close()


def _fields(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    kind, *values = event
    return {"type": kind, **dict(zip(_POSITIONS.get(kind, ()), values, strict=False))}


def _on_gpu(event: dict[str, Any]) -> bool:
    return event.get("medium") in (None, "GPU") and event.get("group_idx") in (None, 0)


def _number(name: int | bytes) -> int:
    return name if isinstance(name, int) else int.from_bytes(name, "big")
