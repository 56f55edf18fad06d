"""A child process: started, its lines read, its end told."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable

from diptych_cli.stack import ChildSpec

_CHUNK_BYTES = 65536
_LONGEST_LINE_BYTES = 256 * 1024

OnLine = Callable[[str, bytes], None]


class Child:
    """One life of one process.

    It gets a session of its own: Ctrl-C in the terminal reaches the supervisor only, which then
    ends its children in their order.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @property
    def pid(self) -> int:
        """The process's id; the tether keeps it when it becomes the command."""
        return self._process.pid

    def terminate(self) -> None:
        """Ask it to finish what it holds and end."""
        self._signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """Ask it to end soon."""
        self._signal(signal.SIGINT)

    def reload(self) -> None:
        """Have it read again what it was told to believe."""
        self._signal(signal.SIGHUP)

    def kill(self) -> None:
        """End it."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def attend(self, on_line: OnLine) -> int:
        """Hand on its lines until it has ended; gives its exit code (negative: a signal)."""
        assert self._process.stdout is not None
        async for line in lines(self._process.stdout):
            on_line(self.name, line)
        return await self._process.wait()


async def start(name: str, spec: ChildSpec) -> Child:
    """Run `spec` as child `name`, both its outputs in one pipe.

    Raises:
        OSError: the command cannot be run.
    """
    process = await asyncio.create_subprocess_exec(
        *spec.command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **spec.environment},
        start_new_session=True,
    )
    return Child(name, process)


async def lines(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of `stream`; one longer than 256 KiB comes in pieces."""
    rest = b""
    while chunk := await stream.read(_CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line
        if len(rest) > _LONGEST_LINE_BYTES:
            yield rest
            rest = b""
    if rest:
        yield rest
