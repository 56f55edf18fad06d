"""vLLM's publisher of KV events, in both forms it has had, which loses what it is told to lose."""

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import zmq

from diptych_testkit.ports import free_port

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 10


class FakeVllmEvents:
    """Publishes on two free ports.

    Args:
        replays: Whether it has a replay endpoint.
        topic: What it publishes under.
    """

    def __init__(self, *, replays: bool = True, topic: str = "kv") -> None:
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.replay = f"tcp://127.0.0.1:{free_port()}" if replays else ""
        self.topic = topic
        self._number = 0
        self._kept: list[tuple[int, bytes]] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.linger = 0
        self._socket.bind(self.endpoint)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve_replays, daemon=True)
        if replays:
            self._thread.start()

    def wait_for_listener(self) -> None:
        """Returns once somebody has subscribed."""
        assert self._socket.poll(60_000)
        self._socket.recv()

    def publish(self, *events: Any, lost: bool = False) -> None:
        """One batch; `lost`: it is kept for replay, and does not arrive."""
        batch = msgspec.msgpack.encode([12.5, list(events), 0])
        self._kept.append((self._number, batch))
        if not lost:
            number = self._number.to_bytes(8, "big")
            self._socket.send_multipart([self.topic.encode(), number, batch])
        self._number += 1

    def restart(self) -> None:
        """As a new process: numbers begin again, nothing is kept."""
        self._number, self._kept = 0, []

    def forget_all(self) -> None:
        """Its replay buffer is over."""
        self._kept = []

    def _serve_replays(self) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.bind(self.replay)
        while not self._stopped.is_set():
            if not router.poll(_POLL_MS):
                continue
            client, _, first = router.recv_multipart()
            for number, batch in list(self._kept):
                if number >= int.from_bytes(first, "big"):
                    router.send_multipart([client, b"", number.to_bytes(8, "big"), batch])
            router.send_multipart([client, b"", _END, b""])
        router.close()

    def close(self) -> None:
        self._stopped.set()
        if self.replay:
            self._thread.join()
        self._socket.close()
        self._context.term()


def stored(
    hashes: Sequence[int | bytes],
    token_ids: Sequence[int],
    *,
    parent: int | bytes | None = None,
    block_size: int = 4,
    **more: Any,
) -> dict[str, Any]:
    """A `BlockStored` as 0.32 writes it: a map without fields of default value."""
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent}
    return event | {"token_ids": list(token_ids), "block_size": block_size, **more}


def removed(*hashes: int | bytes, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def positional(event: dict[str, Any]) -> list[Any]:
    """The same as older releases write it: an array with the kind in front."""
    order: tuple[str, ...] = ("block_hashes", "parent_block_hash", "token_ids", "block_size")
    order += ("lora_id", "medium")
    if event["type"] == "BlockRemoved":
        order = ("block_hashes", "medium")
    return [
        event["type"],
        *(event.get(name) for name in order if event["type"] != "AllBlocksCleared"),
    ]
