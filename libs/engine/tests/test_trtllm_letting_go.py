"""A request of TensorRT-LLM that is left is over in the engine too, or the engine is dead to us."""

import asyncio

import pytest

from diptych_contracts.errors import EngineGone
from diptych_engine.tensorrt_llm.requests import LiveRequest


class Result:
    """What `generate_async` gives for an answer that has no end but its abort."""

    def __init__(self, *, obeys: bool = True) -> None:
        self._obeys = obeys
        self._over = asyncio.Event()
        self.aborts = 0
        self.finished = False
        self.outputs = ["grown"]

    def abort(self) -> None:
        self.aborts += 1
        if self._obeys:
            self._over.set()

    async def aresult(self) -> None:
        await self._over.wait()
        self.finished = True

    def __aiter__(self) -> "Result":
        return self

    async def __anext__(self) -> "Result":
        return self


class Asked:
    """A request and what has gone wrong with it."""

    def __init__(self, result: Result, *, fetching: bool = False, abort_s: float = 60.0) -> None:
        self.result = result
        self.failures: list[Exception] = []
        self.request = LiveRequest(
            result,
            fetching=fetching,
            abort_s=abort_s,
            fetch_s=60.0,
            on_failure=self.failures.append,
        )


@pytest.mark.parametrize("fetching", [True, False])
async def test_a_stream_that_is_left_is_aborted(fetching: bool) -> None:
    asked = Asked(Result(), fetching=fetching)
    steps = asked.request.steps()
    await anext(steps)
    await steps.aclose()
    assert (asked.result.aborts, asked.result.finished) == (1, True)
    assert asked.failures == []


async def test_a_prefill_that_is_left_is_aborted() -> None:
    asked = Asked(Result())
    waiting = asyncio.create_task(asked.request.whole())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (asked.result.aborts, asked.result.finished) == (1, True)


async def test_an_abort_that_is_not_obeyed_is_told() -> None:
    """What the engine still computes would hold KV that nobody counts."""
    asked = Asked(Result(obeys=False), abort_s=0.01)
    await asked.request.let_go()
    (failure,) = asked.failures
    assert isinstance(failure, EngineGone)
    assert "does not end a request in 0.01 s" in str(failure)


async def test_what_is_over_is_not_aborted() -> None:
    asked = Asked(Result())
    asked.result.finished = True
    await asked.request.let_go()
    assert asked.result.aborts == 0
