"""One request on one gRPC stream: the end of the stream is the end of the answer.

The client has no sign of the final response (it ignores `enable_empty_final_response`), so nothing
else is multiplexed on the stream. A read that is broken off would break the call off with it;
reads are shielded, so that an abort can ask the model to stop and hear that it has.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import tritonclient.grpc.aio as triton

from diptych_contracts.errors import DiptychError, EngineGone
from diptych_engine.triton.failures import of_call, of_stream

Result = Any
"""A `tritonclient.grpc.InferResult`, which has no types."""


class Call:
    """A request that has been sent."""

    def __init__(
        self, client: triton.InferenceServerClient, request: dict[str, Any], *, deadline_s: float
    ) -> None:
        self._stream = client.stream_infer(_once(request), stream_timeout=deadline_s)
        self._pending: asyncio.Future[tuple[Result, Any]] | None = None
        self.over = False
        """Whether the stream has ended, or failed: the server holds nothing of it."""
        self.answered = False
        """Whether anything came."""

    async def next(self) -> Result | None:
        """The next response; None at the end.

        Raises:
            Refused, Permanent, EngineGone: what the server or gRPC said.
        """
        if self.over:
            return None
        pending = self._pending or asyncio.ensure_future(self._stream.__anext__())
        self._pending = pending
        try:
            result, error = await asyncio.shield(pending)
        except asyncio.CancelledError:
            if not pending.cancelled():
                raise
            self._end()
            raise EngineGone("triton: the call was broken off") from None
        except StopAsyncIteration:
            self._end()
            return None
        except grpc.RpcError as err:
            self._end()
            raise of_call(str(err.code()), str(err.details())) from None
        self._pending = None
        self.answered = True
        if error is not None:
            raise of_stream(error.message())
        return result

    def _end(self) -> None:
        self.over, self._pending = True, None

    async def ended(self, within_s: float) -> bool:
        """Hear it out; whether it ended within that time. Never raises but for cancellation."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self.over:
                    with contextlib.suppress(DiptychError):
                        await self.next()
        return self.over

    async def first(self, within_s: float) -> None:
        """Wait until anything came, or it ended, or that time is over."""
        with contextlib.suppress(TimeoutError, DiptychError):
            async with asyncio.timeout(within_s):
                while not (self.answered or self.over):
                    await self.next()

    async def cancel(self) -> None:
        """Break it off, which the model sees at its next look."""
        pending = self._pending
        self._stream.cancel()
        self._end()
        if pending is not None:
            pending.cancel()
            await asyncio.wait([pending])
            if not pending.cancelled():
                pending.exception()  # so that nobody warns of it


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request
