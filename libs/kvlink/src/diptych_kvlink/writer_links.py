"""What a process that writes KV holds: its announcement, its open links, and the links' thread."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from diptych_contracts.control import KvAsk, KvTransfer
from diptych_contracts.errors import Incompatible
from diptych_contracts.ids import Incarnation
from diptych_contracts.transfers import LinkEndpoint, Ticket
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.links import (
    DEFAULT_LINKS,
    LinkSettings,
    announce,
    link_thread,
    open_link,
    open_writing,
)
from diptych_kvlink.outgoing import OutgoingTransfer
from diptych_kvlink.outgoing_log import OutgoingLog
from diptych_kvlink.port import LinkWriter
from diptych_policy.codecs import CodecChoice


@dataclass(frozen=True, slots=True)
class _Opened:
    """A link and its own thread."""

    link: LinkWriter
    thread: Executor


class WriterLinks:
    """One per writing process. Make it before the first `Reserve` is sent.

    Args:
        writer: This process: what its `Reserve` messages call `prefill_worker`.
        settings: Which links, and where.
        clock: Monotonic seconds.
        codecs: How its blocks are encoded; None: not at all.

    Raises:
        Permanent: this process cannot announce itself.
    """

    def __init__(
        self,
        writer: Incarnation,
        *,
        settings: LinkSettings = DEFAULT_LINKS,
        clock: Callable[[], float] = time.monotonic,
        codecs: CodecChoice | None = None,
    ) -> None:
        self.writer = writer
        self.codecs = codecs or CodecChoice()
        self.outgoing = OutgoingLog(writer, clock=clock)
        self._settings = settings
        self._clock = clock
        self._identity = LinkIdentity()
        self._presence = announce(writer, settings)
        self._writing = open_writing(writer, settings)
        self._given_up: list[OutgoingTransfer] = []
        self._links: dict[LinkEndpoint, _Opened] = {}
        self._left: list[Executor] = []

    @property
    def certificate(self) -> bytes:
        """What this process shows where a link speaks TLS: for its `Reserve`."""
        return self._identity.certificate

    @property
    def agent(self) -> bytes:
        """What a reader needs to ask this process over NIXL: for its `Reserve`."""
        return b"" if self._writing is None else self._writing.agent

    def open(self, endpoint: LinkEndpoint) -> LinkWriter:
        """The link to `endpoint`, opened once. Raises `Incompatible`.

        Opening a new one leaves the endpoints that have vanished (their worker is gone), so the
        memory of a dead reader is not held.
        """
        return self._opened(endpoint).link

    async def transfer(self, ticket: Ticket, *, sent_s: float, salt: int) -> OutgoingTransfer:
        """The transfer `ticket` allows, its link ready; `sent_s` is when its `Reserve` was sent.

        `salt` is `context_salt` of the context whose KV is written.

        Raises:
            Incompatible, LinkBroken: the link does not work; another one may.
        """
        self._close_given_up()
        if self._settings.seal and not (ticket.endpoint.certificate or ticket.sealing_key):
            raise Incompatible(
                f"its reader takes KV over {ticket.endpoint.kind} unsealed; "
                "sealing is required here"
            )
        opened = self._opened(ticket.endpoint)
        if not opened.link.is_ready:
            await asyncio.wrap_future(opened.thread.submit(opened.link.connect))
        return OutgoingTransfer(
            ticket,
            opened.link,
            thread=opened.thread,
            sent_s=sent_s,
            salt=salt,
            clock=self._clock,
        )

    def give_up(self, transfer: OutgoingTransfer) -> None:
        """Close `transfer` some time: something of it is still on its way to a hung reader.

        Its reader is told by the link itself, when that is over.
        """
        self._given_up.append(transfer)

    def transfers(self, ask: KvAsk) -> tuple[KvTransfer, ...]:
        """What `ask` wants to know of transfers out of this process."""
        about, busy = ask.about, {transfer.transfer_id for transfer in self._given_up}
        found = self.outgoing.about(about) if about else self.outgoing.transfers(ended=ask.ended)
        return tuple(
            msgspec.structs.replace(told, in_quarantine=True)
            if told.ended_ms and told.transfer_id in busy
            else told
            for told in found
        )

    def sweep(self) -> None:
        """End what is overdue, and let go of what is not on its way any more."""
        self.outgoing.sweep()
        self._close_given_up()

    def _close_given_up(self) -> None:
        self._given_up = [waits for waits in self._given_up if not waits.close()]

    def leave(self, endpoint: LinkEndpoint) -> None:
        """Close the link to `endpoint`, if it is open, once what was sent over it has failed."""
        opened = self._links.pop(endpoint, None)
        if opened is not None:
            opened.thread.submit(opened.link.close)
            opened.thread.shutdown(wait=False)
            self._left.append(opened.thread)

    def close(self) -> None:
        """Finish the links' threads, close every link, withdraw the announcement. Idempotent.

        The engine must have stopped: withdrawing says that this process writes no more.
        """
        for opened in self._links.values():
            opened.thread.shutdown(wait=True)
            opened.link.close()
        self._links.clear()
        while self._left:
            self._left.pop().shutdown(wait=True)
        if self._writing is not None:
            self._writing.close()
        if self._presence is not None:
            self._presence.close()

    def _opened(self, endpoint: LinkEndpoint) -> _Opened:
        if endpoint not in self._links:
            for known, opened in tuple(self._links.items()):
                if opened.link.reader_is_gone():
                    self.leave(known)
            link = open_link(
                endpoint,
                writer=self.writer,
                settings=self._settings,
                identity=self._identity,
                writing=self._writing,
            )
            self._links[endpoint] = _Opened(link, link_thread(link, self._settings))
        return self._links[endpoint]
