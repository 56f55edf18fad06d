"""Gives sequences KV that somebody kept, a few blocks a turn.

A block of 1.4 MB takes 0.4 ms to import, a long prompt has hundreds: between two steps there is
time for some, so that the answers of others go on. Meanwhile the sequence computes nothing.

    begin ──▶ importing ──▶ writing to its sink ──▶ done
                  └─ the engine refuses a block ──▶ done, with nothing restored

Nothing is written to the sink before all blocks are imported: a run of which one block is bad is
not trusted. All methods run on the step loop's thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from diptych_contracts.errors import DiptychError, Unverified
from diptych_engine.exporting import export
from diptych_engine.port import KvBlock, Phase, Restored, SequenceKey, StepEngine
from diptych_engine.sequence import LiveSequence

TURN_S = 0.004
"""What restoring may take between two steps, all sequences together. One block at least."""
_NOTHING = Restored()


@dataclass(slots=True)
class _Run:
    """A sequence and what is still to be done for it."""

    sequence: LiveSequence
    blocks: list[KvBlock]
    at: int = 0
    failure: DiptychError | None = None


@dataclass(slots=True)
class Restoring:
    """The sequences that are being given KV.

    Args:
        engine: Imports, and knows the sizes.
        clock: Seconds.
    """

    engine: StepEngine
    clock: Callable[[], float] = time.perf_counter
    turn_s: float = TURN_S
    _runs: dict[SequenceKey, _Run] = field(default_factory=dict)
    _told: Restored = _NOTHING

    def begin(self, sequence: LiveSequence) -> bool:
        """Begin with `sequence`, whose first `cached` tokens have KV; False: nothing to import."""
        blocks = beyond(sequence, self.engine.spec.layout.block_tokens)
        if not blocks:
            return False
        self._runs[sequence.work.key] = _Run(sequence, blocks)
        size = self.engine.spec.layout.block_tokens
        sequence.restored = {block.p0 // size: block.data for block in blocks}
        return True

    def drop(self, key: SequenceKey) -> None:
        """A sequence leaves."""
        self._runs.pop(key, None)

    def turn(self) -> list[tuple[LiveSequence, DiptychError | None]]:
        """Go on for a while; gives the sequences that are done, with what their sink failed of.

        Their `cached` says how far their KV reaches; 0: it was refused, and they hold nothing.
        """
        done: list[tuple[LiveSequence, DiptychError | None]] = []
        until_s = self.clock() + self.turn_s
        for key, run in list(self._runs.items()):
            if (done and self.clock() >= until_s) or not self._go_on(run, until_s):
                break
            del self._runs[key]
            done.append((run.sequence, run.failure))
        return done

    def take_told(self) -> Restored | None:
        """What was done since this was last asked."""
        told, self._told = self._told, _NOTHING
        return told if told != _NOTHING else None

    def _go_on(self, run: _Run, until_s: float) -> bool:
        """Whether all is done for a sequence."""
        while run.at < len(run.blocks):
            if not self._import(run):
                return True
            if self.clock() >= until_s:
                return False
        sequence, size = run.sequence, self.engine.spec.layout.block_tokens
        sequence.cached = run.blocks[-1].p1
        while sequence.work.sink is not None and sequence.exported * size < sequence.cached:
            try:
                export(self.engine, sequence, (sequence.exported + 1) * size)
            except DiptychError as err:
                run.failure = err
                return True
            if self.clock() >= until_s and sequence.exported * size < sequence.cached:
                return False
        sequence.restored = {}
        self._told = self._told._replace(sequences=self._told.sequences + 1)
        return True

    def _import(self, run: _Run) -> bool:
        """Import the next block; False: it was refused, and the sequence holds nothing now."""
        block, began_s = run.blocks[run.at], self.clock()
        try:
            self.engine.import_block(run.sequence.seq, block)
        except Unverified:
            self.engine.drop(run.sequence.seq)
            run.sequence.cached, run.sequence.restored = 0, {}
            self._told = self._told._replace(refused=self._told.refused + 1)
            return False
        run.at += 1
        told = self._told
        self._told = told._replace(
            tokens=told.tokens + block.p1 - block.p0,
            n_bytes=told.n_bytes + block.data.nbytes,
            took_s=told.took_s + self.clock() - began_s,
        )
        return True


def beyond(sequence: LiveSequence, block_tokens: int) -> list[KvBlock]:
    """Of the blocks restored for `sequence`, those that follow its cached tokens.

    None, if they do not follow, or are no run of full blocks before the last known token.
    """
    if sequence.work.phase is Phase.DECODE:
        return []
    at, most = sequence.cached, len(sequence.tokens) - 1
    found: list[KvBlock] = []
    for block in sequence.work.restored:
        if block.p1 <= sequence.cached:
            continue
        if block.p0 != at or block.p1 != at + block_tokens or block.p1 > most:
            break
        found.append(block)
        at = block.p1
    return found
