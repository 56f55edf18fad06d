"""The engine's statistics of one iteration, in our form. Every key may be missing."""

from collections.abc import Mapping
from typing import Any

from diptych_engine.request_port import EngineStats


def stats_of(iteration: Mapping[str, Any]) -> EngineStats:
    """How full the engine was in that iteration."""
    blocks = _part(iteration, "kvCacheStats")
    used, size = _number(blocks, "usedNumBlocks"), _number(blocks, "tokensPerBlock")
    return EngineStats(
        running=_number(iteration, "numActiveRequests"),
        waiting=_number(iteration, "numQueuedRequests"),
        kv_tokens_used=None if used is None or size is None else used * size,
    )


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = told.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(told: Mapping[str, Any], name: str) -> int | None:
    value = told.get(name)
    return int(value) if isinstance(value, int | float) else None
