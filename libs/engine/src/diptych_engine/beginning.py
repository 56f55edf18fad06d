"""From a seat to the first compute: a sequence is given the KV that there is of it already.

    a prompt         a cached prefix is forked, what was kept elsewhere is restored behind it
    imported KV      the prefix that was pinned for it is forked, the rest is imported behind it

All methods run on the step loop's thread.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Condition

from diptych_contracts.errors import DiptychError
from diptych_engine.exporting import export
from diptych_engine.failing import failed
from diptych_engine.port import Phase, SequenceKey, SequenceStarted, StepEngine, StepNews
from diptych_engine.prefix_reuse import PrefixReuse
from diptych_engine.restoring import Restoring
from diptych_engine.sequence import LiveSequence
from diptych_policy.batching import Batcher


@dataclass(frozen=True, slots=True)
class Beginning:
    """Takes sequences in.

    Args:
        engine: Imports.
        batcher: Says who has a seat.
        changed: Guards it, and `sequences`.
        prefixes: What is cached.
        restoring: Imports what was kept elsewhere, a little each turn.
        sequences: Those that are here.
        free: Told of one that cannot begin.
    """

    engine: StepEngine
    batcher: Batcher[SequenceKey]
    changed: Condition
    prefixes: PrefixReuse
    restoring: Restoring
    sequences: Mapping[SequenceKey, LiveSequence]
    free: Callable[[SequenceKey], None]

    def admit(self) -> Iterable[StepNews]:
        """Give seats to those who fit, and begin with all but those that are to be restored.

        Prefixes are forked first: what shares cells with a live sequence may go, and takes none
        along.
        """
        with self.changed:
            admitted = [(self.sequences[key], seq) for key, seq in self.batcher.admit()]
        for sequence, seq in admitted:
            sequence.seq = seq
            if sequence.work.phase is Phase.DECODE:
                sequence.held = self.prefixes.take_pinned(sequence)
            else:
                self._reuse(sequence)
        with self.changed:
            live_cells = self.batcher.cells_next_step
        self.prefixes.make_room(live_cells)
        for sequence, _ in admitted:
            if self.restoring.begin(sequence):
                with self.changed:
                    self.batcher.hold(sequence.work.key)
            else:
                yield from self._started(sequence)

    def restored(self) -> Iterable[StepNews]:
        """Import a few of the blocks that were kept; begin with the sequences that have theirs."""
        for sequence, failure in self.restoring.turn():
            if failure is not None:
                self.free(sequence.work.key)
                yield failed(sequence.work.key, failure)
                continue
            if not sequence.cached:  # refused: what it had before went with it
                sequence.cached = self.prefixes.fork(sequence)
            with self.changed:
                self.batcher.go_on(sequence.work.key, sequence.cached)
            yield from self._started(sequence)

    def _started(self, sequence: LiveSequence) -> Iterable[StepNews]:
        key, work = sequence.work.key, sequence.work
        if work.restored:
            sequence.work = replace(work, restored=())
            if work.on_imported is not None:
                work.on_imported()
        yield SequenceStarted(key, sequence.cached)
        try:
            self._begin(sequence)
        except DiptychError as err:
            self.free(key)
            yield failed(key, err)

    def _reuse(self, sequence: LiveSequence) -> None:
        sequence.cached = self.prefixes.fork(sequence)
        if sequence.cached:
            with self.changed:
                self.batcher.advance(sequence.work.key, sequence.cached)

    def _begin(self, sequence: LiveSequence) -> None:
        if sequence.work.phase is Phase.DECODE:
            self._import(sequence)
        else:  # what is there already travels while the rest computes
            export(self.engine, sequence, sequence.cached)

    def _import(self, sequence: LiveSequence) -> None:
        sequence.check_blocks()
        for block in sequence.work.blocks:
            self.engine.import_block(sequence.seq, block)
        if sequence.work.on_imported is not None:
            sequence.work.on_imported()
