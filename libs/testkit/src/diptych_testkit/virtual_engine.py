"""A step loop that the event loop drives: each step takes virtual time, and no thread."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from diptych_contracts.sampling import Stopping
from diptych_engine.embedding import Vectors
from diptych_engine.matching import Grammars
from diptych_engine.port import SequenceKey, SequenceWork, StepReport, never
from diptych_engine.preparing import Preparing
from diptych_engine.sequence import StopText
from diptych_engine.step_loop import PAUSE_S, StepLoop
from diptych_testkit.toy_engine import ToyStepEngine

LEAST_STEP_S = 0.001


class _AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **options))
        return done


class VirtualEngine(StepLoop):
    """Everything `StepLoop` does, one turn after another, in the running loop.

    Args:
        engine: What computes; a step takes its `step_s` (1 ms if that is 0), whatever is in it.
        answer_text: As for `StepLoop`.
        on_crash: As for `StepLoop`, called in the loop.
        grammars: As for `StepLoop`; a thread would not wait for virtual time, so they are made
            ready at once.
    """

    def __init__(
        self,
        engine: ToyStepEngine,
        answer_text: Callable[[Stopping], StopText],
        *,
        on_crash: Callable[[BaseException], None],
        grammars: Grammars | None = None,
    ) -> None:
        clock = asyncio.get_running_loop().time
        super().__init__(engine, answer_text, on_crash=on_crash, clock=clock, grammars=grammars)
        engine.in_real_time = False
        self._step_s = engine.step_s or LEAST_STEP_S
        self._wake = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    def _preparer(self, grammars: Grammars | None) -> Preparing:
        return Preparing(grammars, self._prepared, self._on_crash, executor=_AtOnce())

    def start(
        self, listener: Callable[[StepReport], None], *, paused: Callable[[], bool] = never
    ) -> None:
        self._listener, self._paused = listener, paused
        self._stepping = asyncio.create_task(self._turns(), name="engine")

    def stop(self) -> None:
        self._stopping = True
        self._embedding.close()
        self._forgetting.close()
        if self._stepping is not None:
            self._stepping.cancel()
        self._engine.close()

    def submit(self, work: SequenceWork) -> None:
        super().submit(work)
        self._wake.set()

    def embed(self, texts: Sequence[Sequence[int]]) -> "Future[Vectors]":
        done = super().embed(texts)
        self._wake.set()
        return done

    def forget(self, tenant: str) -> "Future[int]":
        done = super().forget(tenant)
        self._wake.set()
        return done

    def abort(self, key: SequenceKey) -> None:
        super().abort(key)
        self._wake.set()

    async def _turns(self) -> None:
        try:
            await self._take_turns()
        except Exception as err:
            self._on_crash(err)

    async def _take_turns(self) -> None:
        while True:
            while not self._may_go_on():
                await self._something_new()
            batch = self._begin_step()
            if batch is not None:
                await asyncio.sleep(self._step_s)
                self._end_step(batch)
            if self._embedding.waiting:
                await asyncio.sleep(self._step_s)
                self._embed(step_s=self._step_s if batch is not None else 0.0)

    async def _something_new(self) -> None:
        self._wake.clear()
        if self._sequences:
            await asyncio.sleep(PAUSE_S)
        else:
            await self._wake.wait()
