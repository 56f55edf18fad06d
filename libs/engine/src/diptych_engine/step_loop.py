"""Drives a `StepEngine`: one thread, one call per step.

A turn: take aborts and admissions (with cached prefixes and KV imports), restore some KV, report
all that, compute one batch, hand finished KV blocks over, sample, report. What goes into the batch
is `policy.batching`'s choice. A sequence that fails leaves alone; anything else that goes wrong is
a bug and ends the process.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.errors import DiptychError
from diptych_contracts.sampling import Stopping
from diptych_engine.beginning import Beginning
from diptych_engine.drafting import Drafting
from diptych_engine.embedding import Embedding, Vectors
from diptych_engine.exporting import export
from diptych_engine.failing import end_process, failed
from diptych_engine.forgetting import Forgetting
from diptych_engine.matching import Grammars
from diptych_engine.pins import PrefixPins
from diptych_engine.port import (
    EngineLoad,
    EngineSpec,
    NewTokens,
    Phase,
    SequenceAborted,
    SequenceKey,
    SequenceWork,
    StepEngine,
    StepInput,
    StepNews,
    StepReport,
    never,
)
from diptych_engine.prefix_reuse import PrefixReuse
from diptych_engine.preparing import Preparing
from diptych_engine.restoring import Restoring
from diptych_engine.sequence import LiveSequence, StopText
from diptych_policy.batching import Batcher, BatchLimits, Chunk

PREFILL_TOKENS = 64
"""A block per step: finer steps cost llama.cpp nothing (it computes 32 tokens at a time), and
export, cancellation and everybody's next token wait for one step at most."""


PAUSE_S = 0.02
"""How often a paused loop looks whether it may go on."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step computes."""

    chunks: list[Chunk[SequenceKey]]
    inputs: list[StepInput]
    decoding: frozenset[SequenceKey]
    """Those whose chunk is a sampled token."""
    began_s: float


class StepLoop:
    """An `Engine` made of a `StepEngine`.

    Args:
        engine: Owned from here on: used on the loop's thread only, closed by `stop`.
        answer_text: Makes what finds stop strings in an answer.
        prefill_tokens: Most prompt tokens in one step.
        on_crash: Called on the loop's thread when it dies of a bug; must not return to business
            as usual. The default ends the process.
        clock: Seconds, for how long steps take.
        grammars: Makes what follows grammars; None: work that has one fails.
    """

    def __init__(
        self,
        engine: StepEngine,
        answer_text: Callable[[Stopping], StopText],
        *,
        prefill_tokens: int = PREFILL_TOKENS,
        on_crash: Callable[[BaseException], None] = end_process,
        clock: Callable[[], float] = time.perf_counter,
        grammars: Grammars | None = None,
    ) -> None:
        self.spec: EngineSpec = engine.spec
        self._engine = engine
        self._answer_text = answer_text
        self._on_crash = on_crash
        self._clock = clock
        self._batcher: Batcher[SequenceKey] = Batcher(_limits(engine, prefill_tokens))
        self._prefixes = PrefixReuse(engine)
        self._restoring = Restoring(engine, clock)
        self._sequences: dict[SequenceKey, LiveSequence] = {}
        self._drafting = Drafting(engine, self._sequences, self._free, self._advance)
        self._preparing = self._preparer(grammars)
        self._settled: list[tuple[SequenceWork, StepNews]] = []
        self._aborts: list[SequenceKey] = []
        self._stopping = False
        # Guards everything above; never held while the engine computes.
        self._changed = threading.Condition()
        self._beginning = Beginning(
            engine,
            self._batcher,
            changed=self._changed,
            prefixes=self._prefixes,
            restoring=self._restoring,
            sequences=self._sequences,
            free=self._free,
        )
        self._embedding = Embedding(engine.embedder, self._changed, clock)
        self._forgetting = Forgetting(self._changed)
        self._thread: threading.Thread | None = None
        self._listener: Callable[[StepReport], None] = lambda _report: None
        self._paused: Callable[[], bool] = never

    def _preparer(self, grammars: Grammars | None) -> Preparing:
        return Preparing(grammars, self._prepared, self._on_crash)

    def start(
        self, listener: Callable[[StepReport], None], *, paused: Callable[[], bool] = never
    ) -> None:
        """Begin; see `port.Engine`."""
        self._listener, self._paused = listener, paused
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the step in progress, stop the thread and free the model."""
        with self._changed:
            self._stopping = True
            self._preparing.stop()
            self._changed.notify()
        self._embedding.close()
        self._forgetting.close()
        if self._thread is None:
            self._engine.close()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    def submit(self, work: SequenceWork) -> None:
        """Queue `work`; see `port.Engine`.

        Raises:
            ValueError: if the same attempt is already here.
            RuntimeError: after `stop`.
        """
        sequence: LiveSequence | None = None
        try:
            sequence = LiveSequence.begin(work, self.spec, self._answer_text)
            settled: StepNews | None = sequence.finished()
        except DiptychError as err:
            settled = failed(work.key, err)
        with self._changed:
            if self._stopping:
                raise RuntimeError("the engine has stopped")
            if work.key in self._preparing or work.key in self._sequences:
                raise ValueError(f"{work.key} is already here")
            if settled is None and sequence is not None and work.sampling.grammar is not None:
                self._preparing.add(sequence)
                return
            self._place(work, sequence, settled)

    def _prepared(self, sequence: LiveSequence, error: DiptychError | None) -> None:
        """Take a sequence in whose matcher is in place; called on the preparing thread."""
        key = sequence.work.key
        settled = sequence.finished() if error is None else failed(key, error)
        with self._changed:
            if not self._stopping and self._preparing.take(sequence):
                self._place(sequence.work, sequence, settled)

    def _place(
        self, work: SequenceWork, sequence: LiveSequence | None, settled: StepNews | None
    ) -> None:
        if settled is not None:
            self._settled.append((work, settled))
        elif sequence is not None:
            self._add(sequence)
        self._changed.notify()

    def _add(self, sequence: LiveSequence) -> None:
        key, known = sequence.work.key, len(sequence.tokens)
        handed_over = sequence.work.phase is Phase.DECODE
        self._batcher.add(
            key,
            known=known,
            cells=sequence.cells,
            computed=known - 1 if handed_over else 0,
            interrupted=not handed_over and bool(sequence.work.answer_ids),
        )
        self._sequences[key] = sequence

    def abort(self, key: SequenceKey) -> None:
        """Stop and free at the next step; see `port.Engine`."""
        with self._changed:
            self._preparing.drop(key)
            self._aborts.append(key)
            self._changed.notify()

    def forget(self, tenant: str) -> "Future[int]":
        """Keep no cached prefix of `tenant`; see `port.Engine`."""
        return self._forgetting.submit(tenant)

    def embed(self, texts: Sequence[Sequence[int]]) -> "Future[Vectors]":
        """Vectors of texts, a chunk at a time between steps; see `port.Engine`."""
        return self._embedding.submit(texts)

    def load(self) -> EngineLoad:
        """How full it is now. Cells are promised from `submit` on."""
        with self._changed:
            return EngineLoad(
                running=self._batcher.running,
                waiting=self._batcher.waiting + len(self._preparing),
                waiting_tokens=self._batcher.tokens_to_fill,
                kv_tokens_used=self._batcher.promised_cells
                + sum(sequence.cells for sequence in self._preparing),
            )

    @property
    def pins(self) -> PrefixPins | None:
        """What keeps cached prefixes for KV to come; see `port.Engine`."""
        return self._prefixes if self._prefixes.on else None

    @property
    def gone(self) -> None:
        """None: it lives and dies with this process."""
        return None

    @property
    def kept_cells(self) -> int:
        """KV cells of prefixes that no sequence needs."""
        return self._prefixes.cells

    @property
    def pinned(self) -> int:
        """Prefixes that are pinned."""
        return self._prefixes.pinned

    def check(self) -> None:
        """Raise `AssertionError` if an invariant is broken. To be called while nothing runs."""
        with self._changed:
            self._batcher.check()
            self._prefixes.check()
            if any(key not in self._batcher for key in self._sequences):
                raise AssertionError("step loop: a sequence the batcher does not know")
            if len(self._sequences) != self._batcher.running + self._batcher.waiting:
                raise AssertionError("step loop: the batcher holds a sequence that is gone")

    def _run(self) -> None:
        try:
            while self._wait():
                batch = self._begin_step()
                self._embed(step_s=self._end_step(batch) if batch is not None else 0.0)
        except BaseException as err:  # a silent dead thread would be worse than any bug
            self._on_crash(err)
        finally:
            self._engine.close()

    def _wait(self) -> bool:
        with self._changed:
            while not self._may_go_on():
                self._changed.wait(PAUSE_S if self._sequences else None)
            return not self._stopping

    def _may_go_on(self) -> bool:
        if self._stopping or self._settled or self._aborts or self._forgetting:
            return True
        if self._embedding.waiting:
            return True
        return bool(self._sequences) and not self._paused()

    def _begin_step(self) -> Batch | None:
        """Take in and report what has changed; gives what is to be computed, if anything."""
        news, restored = self._before_step(), self._restoring.take_told()
        if news or restored is not None:
            self._listener(StepReport(news=news, duration_s=0.0, restored=restored))
        self._forgetting.turn(self._prefixes, self._listener)
        with self._changed:
            chunks = [] if self._paused() else self._batcher.plan()
        if not chunks:
            return None
        return Batch(
            chunks,
            [self._input(chunk) for chunk in chunks],
            frozenset(c.key for c in chunks if self._sequences[c.key].decodes_from(c.start)),
            self._clock(),
        )

    def _before_step(self) -> list[StepNews]:
        with self._changed:
            settled, self._settled = self._settled, []
            aborts, self._aborts = self._aborts, []
        for work, outcome in settled:
            if work.on_imported is not None and isinstance(outcome, NewTokens):
                work.on_imported()
        news = [outcome for _, outcome in settled]
        for key in aborts:
            self._free(key)
            news.append(SequenceAborted(key))
        return [*news, *self._beginning.admit(), *self._beginning.restored()]

    def _embed(self, *, step_s: float) -> None:
        if (report := self._embedding.turn(step_s=step_s)) is not None:
            self._listener(report)

    def _end_step(self, batch: Batch) -> float:
        """Compute `batch` and report what came of it; gives how long it took."""
        logits = self._engine.step(batch.inputs)
        duration_s = self._clock() - batch.began_s
        news: list[StepNews] = []
        for chunk, row in zip(batch.chunks, logits, strict=True):
            news += self._after(chunk, row)
        tokens = {chunk.key: chunk.end - chunk.start for chunk in batch.chunks}
        drafts, accepted = self._drafting.take(news, tokens)
        changes = self._prefixes.changes()
        report = StepReport(
            news=news,
            duration_s=duration_s,
            tokens_by_key=tokens,
            prefill_tokens=sum(
                chunk.end - chunk.start for chunk in batch.chunks if chunk.key not in batch.decoding
            ),
            decode_tokens=len(batch.decoding) + accepted,
            drafts=drafts,
            accepted_drafts=accepted,
            blocks_stored=changes.stored,
            blocks_removed=changes.removed,
        )
        self._listener(report)
        return duration_s

    def _input(self, chunk: Chunk[SequenceKey]) -> StepInput:
        sequence = self._sequences[chunk.key]
        return StepInput(
            seq=sequence.seq,
            position=chunk.start,
            token_ids=sequence.tokens[chunk.start : chunk.end],
            want_logits=chunk.last,
        )

    def _after(
        self, chunk: Chunk[SequenceKey], logits: NDArray[np.float32] | None
    ) -> Iterable[StepNews]:
        key, sequence = chunk.key, self._sequences[chunk.key]
        try:
            export(self._engine, sequence, chunk.end, last=chunk.last)
            news = sequence.extend(logits) if logits is not None else None
        except DiptychError as err:
            self._free(key)
            yield failed(key, err)
            return
        if news is not None:
            yield news
        if news is not None and (news.finish or sequence.work.phase is Phase.PREFILL):
            self._free(key, chunk.end)
            return
        self._advance(key, chunk.end, len(news.token_ids) if news else 0)

    def _advance(self, key: SequenceKey, computed: int, sampled: int) -> None:
        with self._changed:
            self._batcher.advance(key, computed, sampled=sampled)

    def _free(self, key: SequenceKey, keep: int = 0) -> None:
        """Forget a sequence; its first `keep` tokens may stay as a cached prefix."""
        self._restoring.drop(key)
        with self._changed:
            sequence = self._sequences.pop(key, None)
            if sequence is None:
                return
            seq = self._batcher.remove(key)
            live_cells = self._batcher.cells_next_step
        if seq is not None:
            self._prefixes.keep(sequence, keep, live_cells=live_cells)
            self._engine.drop(seq)


def _limits(engine: StepEngine, prefill_tokens: int) -> BatchLimits:
    spec = engine.spec
    return BatchLimits(
        kv_tokens=spec.kv_tokens,
        max_sequences=spec.max_sequences,
        block_tokens=spec.layout.block_tokens,
        step_tokens=spec.step_tokens,
        prefill_tokens=prefill_tokens,
        draft_tokens=engine.draft_tokens,
    )
