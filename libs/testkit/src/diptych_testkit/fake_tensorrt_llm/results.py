"""What `generate_async` gives: one object that changes at every step."""

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

from diptych_testkit.fake_tensorrt_llm.shapes import CompletionOutput


class RequestOutput:
    """Yields itself, once a step."""

    def __init__(
        self, request_id: int, prompt_token_ids: list[int], on_abort: Callable[[], None]
    ) -> None:
        self._id, self._prompt = request_id, prompt_token_ids
        self._on_abort = on_abort
        self._steps: asyncio.Queue[Callable[[], bool]] = asyncio.Queue()
        self._outputs = [CompletionOutput(0)]
        self._done = self._aborted = False

    def push(self, step: Callable[[], bool]) -> None:
        """What the next step does to the output; it says whether it is the last, or raises."""
        self._steps.put_nowait(step)

    @property
    def request_id(self) -> int:
        return self._id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._prompt

    @property
    def outputs(self) -> list[CompletionOutput]:
        return self._outputs

    @property
    def finished(self) -> bool:
        return self._done

    def abort(self) -> None:
        self._aborted = True
        self._on_abort()

    def aborted(self) -> bool:
        return self._aborted

    async def _step(self) -> None:
        step = await self._steps.get()
        try:
            self._done = step()
        except Exception:
            self._done = True
            raise

    async def aresult(self) -> "RequestOutput":
        while not self._done:
            await self._step()
        return self

    def __await__(self) -> Generator[Any, None, "RequestOutput"]:
        return self.aresult().__await__()

    def __aiter__(self) -> AsyncIterator["RequestOutput"]:
        return self

    async def __anext__(self) -> "RequestOutput":
        if self._done:
            raise StopAsyncIteration
        await self._step()
        return self


class RequestOutput13(RequestOutput):
    """Of 1.3: it says how much of the prompt was cached."""

    cached = 0

    @property
    def cached_tokens(self) -> int:
        return self.cached


class IterationResult:
    """Drains a queue until nothing comes for `timeout`; blocks until the first request has run."""

    def __init__(
        self, queue: "asyncio.Queue[dict[str, Any]]", first: asyncio.Event, timeout: float | None
    ) -> None:
        self._queue, self._first, self._timeout = queue, first, timeout

    def __aiter__(self) -> AsyncIterator[dict[str, Any]]:
        return self

    async def __anext__(self) -> dict[str, Any]:
        await self._first.wait()
        try:
            async with asyncio.timeout(self._timeout):
                return await self._queue.get()
        except TimeoutError:
            raise StopAsyncIteration from None
