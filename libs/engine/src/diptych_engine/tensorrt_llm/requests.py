"""One request in the engine, from asking to letting go.

States: *computing* (a context leg, or no output of decode yet) → *streaming* → *over*.

- Aborting at once is right while prefill computes and while decode streams.
- Decode's request that has given nothing yet may be fetching KV: an abort would tear the transfer
  down, with a leak or a hang. It is aborted after its first output.
- A context leg that is over can't be aborted: the engine holds its KV until decode has fetched it
  or `kv_transfer_timeout_ms` is past.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from diptych_contracts.errors import EngineGone


class LiveRequest:
    """A request that the engine has taken.

    Args:
        result: What `generate_async` gave.
        fetching: Whether it begins by fetching KV.
        abort_s: Deadline of an abort.
        fetch_s: Deadline of its first output while it fetches, if it is to be aborted.
        on_failure: Told what goes wrong with an abort, which itself never raises.
    """

    def __init__(
        self,
        result: Any,
        *,
        fetching: bool,
        abort_s: float,
        fetch_s: float,
        on_failure: Callable[[Exception], object],
    ) -> None:
        self._result = result
        self._on_failure = on_failure
        self._fetching = fetching
        self._abort_s = abort_s
        self._fetch_s = fetch_s

    async def whole(self) -> Any:
        """The first output, once the request is over. Cancelled, it aborts."""
        try:
            await self._result.aresult()
        except asyncio.CancelledError:
            await self.let_go()
            raise
        return self._result.outputs[0]

    async def steps(self) -> AsyncGenerator[Any, None]:
        """The same output at each step, grown. Closed or cancelled, it aborts."""
        try:
            async for _ in self._result:
                self._fetching = False
                yield self._result.outputs[0]
        finally:
            await self.let_go()

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens whose KV the engine had, where it says so."""
        told = getattr(self._result, "cached_tokens", None)
        return told if isinstance(told, int) else None

    async def let_go(self) -> None:
        """Return once the engine holds nothing of it, or has failed to let go in time."""
        if self._result.finished:
            return
        try:
            if self._fetching:
                async with asyncio.timeout(self._fetch_s):
                    await anext(self._result, None)
                self._fetching = False
            if not self._result.finished:
                self._result.abort()
                async with asyncio.timeout(self._abort_s):
                    await self._result.aresult()
        except TimeoutError:
            self._on_failure(
                EngineGone(f"TensorRT-LLM does not end a request in {self._abort_s} s")
            )
        except Exception as err:  # of another maker
            self._on_failure(err)
