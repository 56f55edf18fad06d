"""Texts that wait for their vectors, computed a chunk at a time between an engine's steps.

Every text is computed alone and in chunks of the same size, so its vector does not depend on what
else there is to do. Texts take their turn job by job, in the order they came.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.errors import DiptychError, Refused
from diptych_contracts.jobs import RefusalReason
from diptych_engine.embedder import Embedder
from diptych_engine.port import StepReport
from diptych_policy.embedding import Spared

Vectors = NDArray[np.float32]


@dataclass(slots=True)
class _Work:
    texts: Sequence[Sequence[int]]
    done: "Future[Vectors]"
    rows: list[Vectors] = field(default_factory=list)
    at: int = 0
    """How much of the text in hand is computed."""


class Embedding:
    """The queue of one engine.

    Args:
        embedder: Computes; None: nothing can be asked.
        changed: Guards the queue, and wakes the engine's thread.
        clock: Seconds, for how long chunks take.
    """

    def __init__(
        self, embedder: Embedder | None, changed: threading.Condition, clock: Callable[[], float]
    ) -> None:
        self._embedder = embedder
        self._changed = changed
        self._clock = clock
        self._queue: deque[_Work] = deque()
        self._spared = Spared()
        self._closed = False

    @property
    def waiting(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._queue)

    def submit(self, texts: Sequence[Sequence[int]]) -> "Future[Vectors]":
        """See `port.Engine.embed`."""
        embedder = self._embedder
        if embedder is None:
            raise Refused(RefusalReason.UNSUPPORTED, "this engine gives no embeddings")
        longest = max(map(len, texts), default=0)
        if longest > embedder.max_tokens or not all(texts) or not texts:
            limit = embedder.max_tokens
            text = f"expected texts of 1 to {limit} tokens, saw one of {longest}"
            raise Refused(RefusalReason.UNSUPPORTED, text)
        work = _Work(texts, Future())
        with self._changed:
            if self._closed:
                raise RuntimeError("the engine has stopped")
            self._queue.append(work)
            self._changed.notify()
        return work.done

    def turn(self, *, step_s: float) -> StepReport | None:
        """Compute a chunk, if there is one and generation leaves time; gives what it cost.

        Called on the engine's thread, after a step that took `step_s`; 0: there was none.
        """
        work = self._first()
        if work is None or self._embedder is None or not self._spared.may(step_s):
            return None
        began_s = self._clock()
        try:
            tokens = self._chunk(self._embedder, work)
        except DiptychError as err:
            self._finish(work)
            if work.done.set_running_or_notify_cancel():
                work.done.set_exception(err)
            return None
        duration_s = self._clock() - began_s
        self._spared.computed(duration_s)
        return StepReport(news=(), duration_s=duration_s, prefill_tokens=tokens)

    def close(self) -> None:
        """Give up what waits."""
        with self._changed:
            self._closed = True
            left, self._queue = list(self._queue), deque()
        for work in left:
            work.done.cancel()

    def _first(self) -> _Work | None:
        with self._changed:
            while self._queue and self._queue[0].done.cancelled():
                self._queue.popleft()
            return self._queue[0] if self._queue else None

    def _chunk(self, embedder: Embedder, work: _Work) -> int:
        text = work.texts[len(work.rows)]
        if work.at == 0:
            embedder.begin()
        chunk = text[work.at : work.at + embedder.chunk_tokens]
        embedder.feed(chunk)
        work.at += len(chunk)
        if work.at == len(text):
            work.rows.append(embedder.vector())
            work.at = 0
            if len(work.rows) == len(work.texts):
                self._finish(work)
                if work.done.set_running_or_notify_cancel():
                    work.done.set_result(np.stack(work.rows))
        return len(chunk)

    def _finish(self, work: _Work) -> None:
        with self._changed:
            if self._queue and self._queue[0] is work:
                self._queue.popleft()
