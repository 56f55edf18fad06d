"""The engine's news of its blocks, in our form.

It names a block by a number of 64 bits of its own making; we know blocks by their tokens. Blocks
that are not full are told too, and later that they are gone: what was not passed on is not
remembered, and its removal not passed on either. A gap in the numbers of events means that its
buffer ran over: nothing is known any more.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from diptych_contracts.errors import EngineGone
from diptych_engine.request_port import KvCleared, KvEvent, KvRemoved, KvStored

MAX_BLOCKS = 1 << 20
"""Most blocks remembered; 32 tokens each, that is more than any GPU holds."""


@dataclass(frozen=True, slots=True)
class _Block:
    parent: int | None
    token_ids: tuple[int, ...]


class KvEventReader:
    """Reads the events of one engine, in their order.

    Args:
        block_tokens: Tokens of a full block.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks: dict[int, _Block] = {}
        self._next_id: int | None = None

    def read(self, event: Mapping[str, Any]) -> list[KvEvent]:
        """What `event` tells. Every key of it may be missing: then it tells nothing.

        Raises:
            EngineGone: it is of another form, so that no more of this engine's cache is known.
        """
        try:
            return self._read(event)
        except (AttributeError, LookupError, TypeError, ValueError) as err:
            raise EngineGone(f"TensorRT-LLM's KV events: {err!r}"[:300]) from err

    def _read(self, event: Mapping[str, Any]) -> list[KvEvent]:
        found: list[KvEvent] = []
        number = event.get("event_id")
        if isinstance(number, int):
            if self._next_id is not None and number != self._next_id:
                self.forget()
                found.append(KvCleared())
            self._next_id = number + 1
        data = event.get("data") or {}
        match data.get("type"):
            case "stored":
                found += self._stored(data.get("parent_hash"), data.get("blocks") or ())
            case "removed":
                found += self._removed(data.get("block_hashes") or ())
            case "created" if self._blocks:  # a cache made anew is an empty one
                self.forget()
                found.append(KvCleared())
        return found

    def forget(self) -> None:
        """Know nothing."""
        self._blocks.clear()

    def _stored(self, parent: int | None, blocks: Iterable[Mapping[str, Any]]) -> Iterator[KvEvent]:
        if parent is not None and parent not in self._blocks:
            return  # its beginning is not known
        last: int | None = None
        for block in blocks:
            name = block.get("block_hash")
            tokens = tuple(int(one["token_id"]) for one in block.get("tokens") or ())
            if name is None or len(tokens) != self._block_tokens:
                break
            self._blocks[name] = _Block(parent, tokens)
            parent = last = name
        if last is not None and (chain := self._chain(last)):
            tokens = tuple(token for name in chain for token in self._blocks[name].token_ids)
            yield KvStored(token_ids=tokens, engine_hashes=tuple(chain))
        if len(self._blocks) > MAX_BLOCKS:
            self.forget()
            yield KvCleared()

    def _chain(self, name: int) -> list[int]:
        """The blocks from the prompt's beginning to `name`; none if one of them is gone."""
        chain: list[int] = []
        at: int | None = name
        while at is not None:
            block = self._blocks.get(at)
            if block is None or len(chain) > len(self._blocks):
                return []
            chain.append(at)
            at = block.parent
        return chain[::-1]

    def _removed(self, names: Iterable[int]) -> Iterator[KvEvent]:
        known = tuple(name for name in names if self._blocks.pop(name, None) is not None)
        if known:
            yield KvRemoved(known)
