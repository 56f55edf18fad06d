"""Keeps the KV of sequences that leave, and starts new ones from it.

What is kept is `policy.prefix_cache`'s choice; here its orders become calls of the engine. Full
blocks only: a block that is not full could not be found by its hash. All methods run on the step
loop's thread.
"""

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

    def fork(self, sequence: LiveSequence) -> int:
        """Give `sequence` the KV of its longest cached beginning; gives the number of tokens.

        The last known token is always computed: its logits are in no cache.
        """
        known = len(sequence.tokens)
        if not self._on or known < self._block_tokens:
            return 0
        hit = self._cache.match(self._prefix(sequence, known))
        if hit is None:
            return 0
        tokens = min(hit.blocks * self._block_tokens, known - 1)
        self._engine.fork(hit.seq, sequence.seq, 0, tokens)
        return tokens

    def make_room(self, live_tokens: int) -> None:
        """Give way to live sequences that hold, or are about to hold, `live_tokens` cells."""
        for seq in self._cache.shrink(self._room(live_tokens)):
            self._engine.drop(seq)

    def keep(self, sequence: LiveSequence, computed: int, *, live_tokens: int) -> None:
        """Keep the first `computed` tokens of a sequence that leaves; it is dropped afterwards.

        Imported KV is not kept: whoever computed it has it, and nobody imports a second time.
        `live_tokens` are those of the sequences that stay.
        """
        imported = sequence.work.phase is Phase.DECODE
        if not self._on or imported or computed < self._block_tokens:
            return
        prefix = self._prefix(sequence, computed)
        kept = self._cache.keep(prefix, room_cells=self._room(live_tokens))
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
        dropped = self._cache.forget(tenant)
        for seq in dropped:
            self._engine.drop(seq)
        return len(dropped)

    def _room(self, live_tokens: int) -> int:
        return min(self._most_tokens, self._kv_tokens - live_tokens)

    def changes(self) -> Changes:
        """Blocks that came and went since this was last asked."""
        return self._cache.changes()

    @property
    def cells(self) -> int:
        """KV cells that are kept."""
        return self._cache.cells

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken."""
        self._cache.check()

    def _prefix(self, sequence: LiveSequence, tokens: int) -> Prefix:
        return Prefix.of(
            sequence.work.tenant, self._base, sequence.tokens[:tokens], self._block_tokens
        )
