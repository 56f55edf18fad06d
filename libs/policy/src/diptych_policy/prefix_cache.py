"""Which prefixes an engine keeps, and where: an index of retained sequences, without any KV.

A retained sequence holds a path of full blocks. Paths that begin alike share their first blocks:

    system prompt ──┬── question 1        retained sequence 16
                    └── question 2        retained sequence 17

Rules:

1. The cache lives on what live sequences leave: they are admitted as if it were not there, and
   `shrink` is called before they need the room.
2. A block counts once, however many paths hold it.
3. The path that was used longest ago goes first; with it go the blocks no other path holds. A path
   that is about to be forked or extended is never the one.
4. A path that goes on where another one ends extends it, so no path is the beginning of another.
5. A hash finds, tenant and tokens decide: two prompts whose hashes collide share nothing.
6. What is pinned goes last, and only where live sequences leave no other room: whoever pinned it
   finds that out from `pinned`. A tenant that is forgotten takes its pins along.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from diptych_policy.prefixes import Prefix


class Hit(NamedTuple):
    """A retained sequence begins with `blocks` of the blocks asked for."""

    seq: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What an engine must do, in this order: drop `evicted`, then fill `seq`.

    Blocks [0, start) come from `base`, or are there already where it is None; [start, end) come
    from the sequence that leaves.
    """

    evicted: tuple[int, ...] = ()
    seq: int | None = None
    """None: nothing is kept."""
    base: int | None = None
    start: int = 0
    end: int = 0


class Changes(NamedTuple):
    """Blocks, by hash, that came and went."""

    stored: tuple[int, ...]
    removed: tuple[int, ...]


class PrefixCache:
    """The index of one engine.

    Args:
        seqs: Sequence ids that may be retained.
        block_tokens: KV cells of one block.
    """

    def __init__(self, seqs: Iterable[int], *, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._ids = frozenset(seqs)
        self._free = sorted(self._ids, reverse=True)
        # In order of use, the one used longest ago first.
        self._paths: dict[int, Prefix] = {}
        self._holders: dict[int, dict[int, None]] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._pins: dict[Hashable, Prefix] = {}

    @property
    def cells(self) -> int:
        """KV cells that retained sequences hold."""
        return len(self._holders) * self._block_tokens

    @property
    def sequences(self) -> int:
        """Retained sequences."""
        return len(self._paths)

    @property
    def pins(self) -> int:
        """Keys for which something is pinned."""
        return len(self._pins)

    def match(self, prefix: Prefix) -> Hit | None:
        """The longest beginning of `prefix` that is retained. Counts as use."""
        blocks = 0
        for block in prefix.hashes:
            if block not in self._holders:
                break
            blocks += 1
        if blocks == 0:
            return None
        seq = next(iter(self._holders[prefix.hashes[blocks - 1]]))
        path, tokens = self._paths[seq], blocks * self._block_tokens
        if path.tenant != prefix.tenant or path.token_ids[:tokens] != prefix.token_ids[:tokens]:
            return None
        self._use(seq)
        return Hit(seq, blocks)

    def pin(self, key: Hashable, prefix: Prefix) -> int:
        """Have what is retained of `prefix` go last, for `key`; gives how many blocks that is."""
        hit = self.match(prefix)
        if hit is None:
            return 0
        tokens = prefix.token_ids[: hit.blocks * self._block_tokens]
        self._pins[key] = Prefix(prefix.tenant, tokens, prefix.hashes[: hit.blocks])
        return hit.blocks

    def pinned(self, key: Hashable) -> Hit | None:
        """Where all that was pinned for `key` is; None: nothing was, or it had to go."""
        prefix = self._pins.get(key)
        hit = self.match(prefix) if prefix is not None else None
        if prefix is None or hit is None or hit.blocks < len(prefix.hashes):
            return None
        return hit

    def unpin(self, key: Hashable) -> None:
        """`key` needs nothing to stay. Idempotent."""
        self._pins.pop(key, None)

    def _needed(self) -> set[int]:
        """For each pin a path that holds what it is for."""
        return {
            next(iter(self._holders[pin.hashes[-1]]))
            for pin in self._pins.values()
            if pin.hashes[-1] in self._holders
        }

    def keep(self, prefix: Prefix, *, room_cells: int) -> Kept:
        """Retain `prefix`, or as much of it as fits if all retained fill at most `room_cells`."""
        hit = self.match(prefix)
        start = hit.blocks if hit else 0
        new = prefix.hashes[start:]
        if not new or any(block in self._holders for block in new):
            return Kept()
        base = hit.seq if hit else None
        base_blocks = len(self._paths[base].hashes) if base is not None else 0
        extends = base is not None and base_blocks == start
        if (base_blocks + 1) * self._block_tokens > room_cells:
            return Kept()
        wanted_cells = room_cells - len(new) * self._block_tokens
        evicted: list[int] = []
        while self.cells > wanted_cells or not (extends or self._free):
            needed = self._needed()
            victim = next((s for s in self._paths if s != base and s not in needed), None)
            if victim is None:
                break
            self._evict(victim)
            evicted.append(victim)
        fits = min(len(new), (room_cells - self.cells) // self._block_tokens)
        if not (extends or self._free) or fits < 1:
            return Kept(tuple(evicted))
        seq = base if extends and base is not None else self._free.pop()
        self._store(seq, prefix, end=start + fits)
        return Kept(tuple(evicted), seq, None if extends else base, start, start + fits)

    def undo(self, kept: Kept) -> None:
        """The engine could not continue a path so: it is as it was, or, if it was new, gone."""
        if kept.seq is None:
            return
        path = self._paths[kept.seq]
        self._evict(kept.seq)
        if kept.base is None and kept.start > 0:
            self._free.remove(kept.seq)
            self._store(kept.seq, path, end=kept.start)

    def shrink(self, room_cells: int) -> tuple[int, ...]:
        """Fit into `room_cells`; gives the sequences to drop."""
        evicted: list[int] = []
        while self.cells > room_cells and self._paths:
            needed = self._needed()
            evicted.append(
                next((s for s in self._paths if s not in needed), next(iter(self._paths)))
            )
            self._evict(evicted[-1])
        return tuple(evicted)

    def forget(self, tenant: str) -> tuple[int, ...]:
        """Retain nothing of `tenant`; gives the sequences to drop."""
        found = [seq for seq, path in self._paths.items() if path.tenant == tenant]
        for seq in found:
            self._evict(seq)
        return tuple(found)

    def changes(self) -> Changes:
        """What came and went since this was last asked."""
        changes = Changes(tuple(self._stored), tuple(self._removed))
        self._stored, self._removed = {}, {}
        return changes

    def _use(self, seq: int) -> None:
        self._paths[seq] = self._paths.pop(seq)

    def _store(self, seq: int, prefix: Prefix, *, end: int) -> None:
        path = Prefix(
            prefix.tenant, prefix.token_ids[: end * self._block_tokens], prefix.hashes[:end]
        )
        self._paths.pop(seq, None)
        self._paths[seq] = path
        for block in path.hashes:
            if block not in self._holders:
                self._holders[block] = {}
                self._note(block, self._stored, self._removed)
            self._holders[block][seq] = None

    def _evict(self, seq: int) -> None:
        for block in self._paths.pop(seq).hashes:
            holders = self._holders[block]
            del holders[seq]
            if not holders:
                del self._holders[block]
                self._note(block, self._removed, self._stored)
        self._free.append(seq)

    @staticmethod
    def _note(block: int, happened: dict[int, None], opposite: dict[int, None]) -> None:
        if block in opposite:
            del opposite[block]
        else:
            happened[block] = None

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        _require(self._ids == self._paths.keys() | set(self._free), "no sequence id lost")
        _require(len(self._ids) == len(self._paths) + len(self._free), "each id once")
        held: dict[int, set[int]] = {}
        for seq, path in self._paths.items():
            _require(len(path.hashes) > 0, "no path is empty")
            _require(
                len(path.token_ids) == len(path.hashes) * self._block_tokens, "blocks are full"
            )
            for block in path.hashes:
                held.setdefault(block, set()).add(seq)
        _require(
            {block: set(holders) for block, holders in self._holders.items()} == held,
            "holders are those whose path holds the block",
        )
        _require(
            all(len(held[path.hashes[-1]]) == 1 for path in self._paths.values()),
            "no path is the beginning of another",
        )
        _require(not self._stored.keys() & self._removed.keys(), "a block came or went")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"prefix cache: broken invariant: {what}")
