"""Keeps the KV of sequences that leave, and starts new ones from it.

What is kept is `policy.prefix_cache`'s choice; here its orders become calls of the engine. Full
blocks only: a block that is not full could not be found by its hash. All methods run on the step
loop's thread, but for `pin` and `unpin`: what KV to come will follow is pinned from any.
"""

import threading
from collections.abc import Hashable

from diptych_engine.port import Phase, StepEngine
from diptych_engine.sequence import LiveSequence
from diptych_policy.prefix_cache import Changes, PrefixCache
from diptych_policy.prefixes import Prefix


class PrefixReuse:
    """The prefix cache of one engine; of no effect where `spec.prefix_sequences` is 0."""

    def __init__(self, engine: StepEngine) -> None:
        spec = engine.spec
        self._engine = engine
        self._base = spec.fingerprint.base
        self._kv_tokens = spec.kv_tokens
        self._most_tokens = spec.prefix_tokens
        self._block_tokens = spec.layout.block_tokens
        first = spec.max_sequences
        self._on = spec.prefix_sequences > 0
        self._cache = PrefixCache(
            range(first, first + spec.prefix_sequences), block_tokens=self._block_tokens
        )
        # Guards the index; held for a call or two of the engine, never while it computes.
        self._lock = threading.Lock()

    @property
    def on(self) -> bool:
        """Whether anything is kept."""
        return self._on

    def pin(self, key: Hashable, prefix: Prefix) -> int:
        """Keep what is cached of `prefix` for `key`; see `pins.PrefixPins`."""
        with self._lock:
            return self._cache.pin(key, prefix)

    def unpin(self, key: Hashable) -> None:
        """Nothing of `key` comes any more; see `pins.PrefixPins`."""
        with self._lock:
            self._cache.unpin(key)

    def take_pinned(self, sequence: LiveSequence) -> int:
        """Give `sequence` the KV that was pinned for it; gives the number of tokens.

        0, and nothing is given, if it had to go, or is that of other tokens.
        """
        key = sequence.work.key
        with self._lock:
            hit = self._cache.pinned(key)
            self._cache.unpin(key)
            tokens = hit.blocks * self._block_tokens if hit is not None else 0
            if hit is None or tokens >= len(sequence.tokens):
                return 0
            found = self._cache.match(self._prefix(sequence, tokens))
            if found is None or found.blocks != hit.blocks:
                return 0
            self._engine.fork(found.seq, sequence.seq, 0, tokens)
            return tokens

    def fork(self, sequence: LiveSequence) -> int:
        """Give `sequence` the KV of its longest cached beginning; gives the number of tokens.

        The last known token is always computed: its logits are in no cache.
        """
        known = len(sequence.tokens)
        if not self._on or known < self._block_tokens:
            return 0
        prefix = self._prefix(sequence, known)
        with self._lock:
            hit = self._cache.match(prefix)
            if hit is None:
                return 0
            tokens = min(hit.blocks * self._block_tokens, known - 1)
            self._engine.fork(hit.seq, sequence.seq, 0, tokens)
            return tokens

    def make_room(self, live_cells: int) -> None:
        """Give way to live sequences that hold, or are about to hold, `live_cells` cells."""
        with self._lock:
            for seq in self._cache.shrink(self._room(live_cells)):
                self._engine.drop(seq)

    def keep(self, sequence: LiveSequence, computed: int, *, live_cells: int) -> None:
        """Keep the first `computed` tokens of a sequence that leaves; it is dropped afterwards.

        Imported KV only where its work says so. `live_cells` are those of the sequences that stay.
        """
        work = sequence.work
        may_stay = work.keep or work.phase is not Phase.DECODE
        if not self._on or not may_stay or computed < self._block_tokens:
            return
        prefix = self._prefix(sequence, computed)
        with self._lock:
            self._keep(sequence, prefix, live_cells=live_cells)

    def _keep(self, sequence: LiveSequence, prefix: Prefix, *, live_cells: int) -> None:
        kept = self._cache.keep(prefix, room_cells=self._room(live_cells))
        for seq in kept.evicted:
            self._engine.drop(seq)
        if kept.seq is None:
            return
        start, end = kept.start * self._block_tokens, kept.end * self._block_tokens
        if kept.base is not None:
            self._engine.fork(kept.base, kept.seq, 0, start)
        if not self._engine.fork(sequence.seq, kept.seq, start, end):
            self._cache.undo(kept)
            if kept.base is not None:
                self._engine.drop(kept.seq)

    def forget(self, tenant: str) -> int:
        """Keep nothing of `tenant`; gives how many sequences were dropped."""
        with self._lock:
            dropped = self._cache.forget(tenant)
            for seq in dropped:
                self._engine.drop(seq)
            return len(dropped)

    def _room(self, live_cells: int) -> int:
        return min(self._most_tokens, self._kv_tokens - live_cells)

    def changes(self) -> Changes:
        """Blocks that came and went since this was last asked."""
        with self._lock:
            return self._cache.changes()

    @property
    def cells(self) -> int:
        """KV cells that are kept."""
        return self._cache.cells

    @property
    def pinned(self) -> int:
        """Prefixes that are pinned, of which some may have had to go."""
        return self._cache.pins

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        self._cache.check()

    def _prefix(self, sequence: LiveSequence, tokens: int) -> Prefix:
        return Prefix.of(
            sequence.work.tenant, self._base, sequence.tokens[:tokens], self._block_tokens
        )
