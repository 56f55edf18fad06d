"""Several answers to one call, in one stream: each a request of its own.

They share a client: it is awake when any of them has news, and all are over when it leaves. One
that fails ends them all, since a part of what was asked for is of no use.
"""

import asyncio
from collections.abc import Callable, Sequence

from diptych_gateway.answering.answers import ChunkWriter, Usage
from diptych_gateway.answering.delivering import Outlet
from diptych_gateway.answering.streams import AnswerStream, Shown
from diptych_gateway.errors import ApiError

UsageOf = Callable[[Sequence[AnswerStream]], Usage]


class Choices:
    """The answers of one call."""

    def __init__(self, streams: Sequence[AnswerStream]) -> None:
        self.streams = streams
        self._wake = asyncio.Event()
        for stream in streams:
            stream.wake = self._wake
        self._wake.set()  # some may have news already

    @property
    def gone(self) -> bool:
        """Whether the client has left, or was cut off."""
        return any(stream.gone for stream in self.streams)

    @property
    def failure(self) -> ApiError | None:
        """Why there will not be all of them, once the rest of the failed one was taken."""
        failed = (stream.failure for stream in self.streams if stream.over)
        return next((failure for failure in failed if failure is not None), None)

    def leave(self) -> None:
        """The client is gone."""
        for stream in self.streams:
            stream.leave()

    def keep_alive(self) -> None:
        """Send a sign of life."""
        self.streams[0].keep_alive()

    async def news(self) -> None:
        """Wait until there is something to do."""
        await self._wake.wait()
        self._wake.clear()

    def pinged(self) -> bool:
        """Whether a keep-alive is due; asked once."""
        due = any(stream.ping for stream in self.streams)
        for stream in self.streams:
            stream.ping = False
        return due

    async def write(self, outlet: Outlet, events: list[bytes], *, last: bool) -> None:
        """Send events, or a sign of life if there are none; each answer knows how long it takes."""
        for stream in self.streams:
            stream.patience.sending()
        if events:
            await outlet.write(events, last=last)
        else:
            await outlet.ping()
        for stream in self.streams:
            stream.patience.sent()
        if self._wake.is_set():
            await asyncio.sleep(0)  # a long backlog must not keep the loop to itself


class ChoicesDelivery:
    """The events of several answers, as they come.

    Args:
        choices: The answers.
        writers: One for each.
    """

    def __init__(self, choices: Choices, writers: Sequence[ChunkWriter]) -> None:
        self._choices = choices
        self._writers = writers
        self._open = list(zip(choices.streams, writers, strict=True))

    def events(self) -> list[bytes]:
        """What is new, and the end of each that has ended."""
        made: list[bytes] = []
        for stream, writer in list(self._open):
            made += writer.texts(stream.texts())
            if stream.over and stream.failure is None:
                made += writer.finish(stream)
                self._open.remove((stream, writer))
        return made

    def start(self) -> list[bytes]:
        """What comes before all tokens."""
        return [event for writer in self._writers for event in writer.start()]

    async def run(self, outlet: Outlet, used: UsageOf) -> None:
        """Send it all; returns early if the client leaves.

        Raises:
            ApiError: one of them failed before the first byte.
        """
        choices, begun = self._choices, False
        for stream in choices.streams:
            stream.eager = True
        while not choices.gone:
            await choices.news()
            events, failure = self.events(), choices.failure
            if failure is not None and not begun:
                raise failure
            ping = choices.pinged()
            if not begun and (events or ping):
                begun = True
                events = [*self.start(), *events]
                await outlet.begin()
            if failure is not None:
                events += self._writers[0].failed(failure)
            elif not self._open:
                events += self._writers[0].total(
                    used(choices.streams), choices.streams[0].tokens + 2
                )
            last = failure is not None or not self._open
            if events or ping:
                await choices.write(outlet, events, last=last)
            if last:
                return


async def deliver_whole_choices(choices: Choices) -> list[list[Shown]] | None:
    """The pieces of each answer once all are complete; None if the client left.

    Raises:
        ApiError: one of them failed.
    """
    pieces: list[list[Shown]] = [[] for _ in choices.streams]
    while not choices.gone:
        if choices.failure is not None:
            raise choices.failure
        if all(stream.over for stream in choices.streams):
            return pieces
        await choices.news()
        for stream, found in zip(choices.streams, pieces, strict=True):
            if stream.end is not None or stream.failure is not None:
                found += stream.texts()
                await asyncio.sleep(0)
    return None
