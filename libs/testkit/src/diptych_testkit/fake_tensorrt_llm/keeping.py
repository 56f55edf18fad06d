"""The KV an engine keeps, and what it tells of it: partial blocks too."""

import asyncio
import itertools
from typing import Any

from diptych_testkit.fake_tensorrt_llm.shapes import KvCacheConfig
from diptych_testkit.fake_tensorrt_llm.world import Faults

_BIG = 1 << 63
"""Hashes are unsigned, of 64 bits: these are large ones."""


class KvCache:
    """Blocks by the tokens up to their end, and by salt."""

    def __init__(self, config: KvCacheConfig, faults: Faults) -> None:
        self._config, self._faults = config, faults
        self._blocks: dict[tuple[str | None, tuple[int, ...]], int] = {}
        self._hashes = itertools.count(_BIG)
        self._event_ids = itertools.count()
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._tell({"type": "created", "num_blocks_per_cache_level": [1000, 0]})

    def keep(self, prompt: list[int], salt: str | None) -> int:
        """Keep a prompt's KV; gives how many of its tokens were there."""
        if not self._config.enable_block_reuse:
            return 0
        size, cached = self._config.tokens_per_block, 0
        parent, fresh = None, []
        for end in range(size, len(prompt), size):  # the last token is never cached
            name = (salt, tuple(prompt[:end]))
            if name in self._blocks:
                cached, parent = end, self._blocks[name]
                continue
            self._blocks[name] = next(self._hashes)
            fresh.append(_told(self._blocks[name], prompt[end - size : end]))
        rest = prompt[(len(prompt) - 1) // size * size : -1]
        if rest:
            fresh.append(_told(next(self._hashes), rest))
        if fresh:
            self._tell({"type": "stored", "parent_hash": parent, "blocks": fresh})
        return cached

    def drop_all(self) -> None:
        """Everything gives way."""
        hashes = list(self._blocks.values())
        self._blocks.clear()
        self._tell({"type": "removed", "block_hashes": hashes})

    def _tell(self, data: dict[str, Any]) -> None:
        number = next(self._event_ids)
        if self._faults.lost_events:
            self._faults.lost_events -= 1
        elif self._config.event_buffer_max_size and self._config.enable_block_reuse:
            self.events.put_nowait({"event_id": number, "data": data, "window_size": 4096})


def _told(name: int, tokens: list[int]) -> dict[str, Any]:
    told = [{"token_id": token, "token_extra_id": 0} for token in tokens]
    return {"block_hash": name, "tokens": told, "cache_level": 0, "priority": 35}
