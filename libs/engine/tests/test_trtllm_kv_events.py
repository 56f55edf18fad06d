"""KV events of TensorRT-LLM: which blocks are known, and when none is."""

from collections.abc import Sequence
from typing import Any

import pytest

from diptych_contracts.errors import Permanent
from diptych_engine.request_port import KvCleared, KvRemoved, KvStored
from diptych_engine.tensorrt_llm.handing_over import MAX_BYTES, sealed
from diptych_engine.tensorrt_llm.iteration_stats import stats_of
from diptych_engine.tensorrt_llm.kv_events import KvEventReader

FIRST = KvStored((1, 2), (11,))
BOTH = KvStored((1, 2, 3, 4), (11, 12))


def stored(*blocks: tuple[int, Sequence[int]], parent: int | None = None) -> dict[str, Any]:
    told = [
        {"block_hash": name, "tokens": [{"token_id": token} for token in tokens]}
        for name, tokens in blocks
    ]
    return {"data": {"type": "stored", "parent_hash": parent, "blocks": told}}


def removed(*names: int) -> dict[str, Any]:
    return {"data": {"type": "removed", "block_hashes": list(names)}}


def test_blocks_are_told_with_all_that_lies_before_them() -> None:
    reader = KvEventReader(2)
    assert reader.read(stored((11, [1, 2]))) == [FIRST]
    assert reader.read(stored((12, [3, 4]), parent=11)) == [BOTH]


def test_a_block_behind_an_unknown_one_is_not_told() -> None:
    reader = KvEventReader(2)
    assert reader.read(stored((12, [3, 4]), parent=11)) == []
    reader.read(stored((11, [1, 2])))
    reader.read(stored((12, [3, 4]), parent=11))
    assert reader.read(removed(11)) == [KvRemoved((11,))]
    assert reader.read(stored((13, [5, 6]), parent=12)) == []


def test_what_is_gone_is_told_once() -> None:
    reader = KvEventReader(2)
    reader.read(stored((11, [1, 2])))
    assert reader.read(removed(11, 99)) == [KvRemoved((11,))]
    assert reader.read(removed(11)) == []


def test_a_block_that_is_not_full_is_not_told_nor_what_follows() -> None:
    reader = KvEventReader(2)
    assert reader.read(stored((11, [1, 2]), (12, [3]), (13, [5, 6]))) == [FIRST]
    assert reader.read(removed(12, 13)) == []


def test_a_cache_made_anew_is_an_empty_one() -> None:
    reader = KvEventReader(2)
    created = {"data": {"type": "created"}}
    assert reader.read(created) == []
    reader.read(stored((11, [1, 2])))
    assert reader.read(created) == [KvCleared()]
    assert reader.read(stored((12, [3, 4]), parent=11)) == []


def test_an_iteration_says_how_full_the_engine_is() -> None:
    cache = {"usedNumBlocks": 5, "tokensPerBlock": 32}
    told = {"numActiveRequests": 3, "numQueuedRequests": 2, "kvCacheStats": cache}
    stats = stats_of(told)
    assert (stats.running, stats.waiting, stats.kv_tokens_used) == (3, 2, 160)
    assert stats_of({}).kv_tokens_used is None


def test_a_description_too_long_for_the_bus_is_refused() -> None:
    with pytest.raises(Permanent, match=f"{MAX_BYTES} may travel"):
        sealed({"opaque_state": bytes(MAX_BYTES)}, version="1.3.0", prompt_tokens=1)
    with pytest.raises(Permanent, match="field mrope of the engine"):
        sealed({"mrope": object()}, version="1.3.0", prompt_tokens=1)
