"""Sequences whose grammar is being made ready, on a thread of its own.

A large grammar takes 100 ms to set up, and a recovery replays its answer's tokens: neither holds up
the steps of the others, nor the caller. There are never more of them than a worker admits.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

from diptych_contracts.errors import DiptychError, Permanent
from diptych_engine.matching import Grammars
from diptych_engine.port import SequenceKey
from diptych_engine.sequence import LiveSequence

Ready = Callable[[LiveSequence, DiptychError | None], None]
"""Told of a sequence whose matcher is in place, or why it will have none."""


class Preparing:
    """Gives sequences their matchers. All but the work itself happens under the step loop's lock.

    Args:
        grammars: Makes them; None: this engine follows none.
        ready: Called on the thread, without the lock.
        on_crash: Called on the thread if it meets a bug.
        executor: Of one thread.
    """

    def __init__(
        self,
        grammars: Grammars | None,
        ready: Ready,
        on_crash: Callable[[BaseException], None],
        *,
        executor: Executor | None = None,
    ) -> None:
        self._grammars = grammars
        self._ready = ready
        self._on_crash = on_crash
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._sequences: dict[SequenceKey, LiveSequence] = {}

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._sequences.values())

    def add(self, sequence: LiveSequence) -> None:
        """Begin with `sequence`."""
        self._sequences[sequence.work.key] = sequence
        self._executor.submit(self._prepare, sequence)

    def take(self, sequence: LiveSequence) -> bool:
        """Have `sequence` back, prepared; False if it has been dropped meanwhile."""
        if self._sequences.get(sequence.work.key) is not sequence:
            return False
        del self._sequences[sequence.work.key]
        return True

    def drop(self, key: SequenceKey) -> None:
        """Forget a sequence, if it is here."""
        self._sequences.pop(key, None)

    def stop(self) -> None:
        """Begin nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, sequence: LiveSequence) -> None:
        try:
            error = self._give_matcher(sequence)
            self._ready(sequence, error)
        except BaseException as err:  # an executor would keep it to itself
            self._on_crash(err)

    def _give_matcher(self, sequence: LiveSequence) -> DiptychError | None:
        work = sequence.work
        grammar = work.sampling.grammar
        if self._grammars is None or grammar is None:
            return Permanent("this engine follows no grammars")
        most = sequence.full_length - len(work.prompt_ids)
        try:
            sequence.matcher = self._grammars.matcher(grammar, work.answer_ids, max_tokens=most)
        except DiptychError as err:
            return err
        return None
