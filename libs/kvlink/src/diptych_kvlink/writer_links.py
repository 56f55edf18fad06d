"""What a process that writes KV holds: its announcement, its open links, and the links' thread."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, Ticket
from diptych_kvlink.links import open_link
from diptych_kvlink.lockfile import SHM_DIRECTORY
from diptych_kvlink.outgoing import OutgoingTransfer
from diptych_kvlink.port import LinkWriter
from diptych_kvlink.presence import Presence


class WriterLinks:
    """One per writing process. Make it before the first `Reserve` is sent.

    Args:
        writer: This process: what its `Reserve` messages call `prefill_worker`.
        directory: Where shared memory lives.
        clock: Monotonic seconds.

    Raises:
        Permanent: this process cannot announce itself.
    """

    def __init__(
        self,
        writer: Incarnation,
        *,
        directory: Path = SHM_DIRECTORY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._presence = Presence(writer, directory)
        self._links: dict[LinkEndpoint, LinkWriter] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-link")

    def open(self, endpoint: LinkEndpoint) -> LinkWriter:
        """The link to `endpoint`, opened once. Raises `Incompatible`.

        Opening a new one leaves the endpoints that have vanished (their worker is gone), so the
        memory of a dead reader is not held.
        """
        if endpoint not in self._links:
            for known, link in tuple(self._links.items()):
                if link.reader_is_gone():
                    self.leave(known)
            self._links[endpoint] = open_link(endpoint, directory=self._directory)
        return self._links[endpoint]

    def transfer(self, ticket: Ticket, *, sent_s: float) -> OutgoingTransfer:
        """The transfer `ticket` allows; `sent_s` is when its `Reserve` was sent."""
        return OutgoingTransfer(
            ticket,
            self.open(ticket.endpoint),
            thread=self._thread,
            sent_s=sent_s,
            clock=self._clock,
        )

    def leave(self, endpoint: LinkEndpoint) -> None:
        """Close the link to `endpoint`, if it is open."""
        link = self._links.pop(endpoint, None)
        if link is not None:
            link.close()

    def close(self) -> None:
        """Finish the link's thread, close every link, withdraw the announcement. Idempotent.

        The engine must have stopped: withdrawing says that this process writes no more.
        """
        self._thread.shutdown(wait=True)
        for endpoint in tuple(self._links):
            self.leave(endpoint)
        self._presence.close()
