"""A writer and a reader of KV, each a process of its own, over one link; their bus is the test.

What the bus would carry (reservations, hand-overs, releases, cancels) is carried by hand, so that
either end can be killed or frozen between any two steps of a transfer.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diptych_contracts.ids import RequestId, transfer_id
from diptych_contracts.jobs import BlockDigest, DecodeJob, Generation
from diptych_contracts.journal import Report
from diptych_contracts.tickets import TicketSeal
from diptych_contracts.transfers import Reserve, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink.verifying import context_salt
from diptych_testkit.builders import a_generation
from diptych_testkit.kv_peer import BLOCK_TOKENS, FINGERPRINT, LAYOUT, WRITER

PATIENCE_S = 60.0


class PeerFailed(Exception):
    """What an order to a peer raised there."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"{kind}: {why}")
        self.kind, self.why = kind, why


class Peer:
    """One end, driven by lines."""

    def __init__(
        self,
        role: str,
        settings: dict[str, Any],
        *,
        environment: dict[str, str],
        within: Sequence[str] = (),
    ) -> None:
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "diptych_testkit.kv_peer", role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self._hears() == "ready"

    def ask(self, do: str, **order: Any) -> Any:
        """Have an order carried out. Raises `PeerFailed`."""
        self.tell(do, **order)
        return self.answer()

    def tell(self, do: str, **order: Any) -> None:
        """Give an order; `answer` comes later."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Of the last order. Raises `PeerFailed`."""
        said = self._hears()
        if "failed" in said:
            raise PeerFailed(said["failed"], said["why"])
        return said["ok"]

    def signal(self, number: signal.Signals) -> None:
        """Freeze it, until none of its threads runs; or thaw it."""
        os.kill(self.process.pid, number)
        if number is signal.SIGSTOP:
            until(lambda: set(self._states()) == {"T"})

    def _states(self) -> list[str]:
        """Of each thread, as the kernel has it; one that ends meanwhile has none."""
        states = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                states.append(task.read_text().rpartition(")")[2].split()[0])
        return states

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        self.process.kill()
        self.process.communicate()

    def leave(self) -> int:
        """Let it close everything and end; gives the exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.kill_quietly()

    def kill_quietly(self) -> None:
        """End it, whatever became of its pipes."""
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()

    def _hears(self) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 2 * PATIENCE_S)
        assert ready, "a peer says nothing"
        line = self.process.stdout.readline()
        assert line, f"a peer has ended: {self.process.poll()}"
        return json.loads(line)


class Pair:
    """Both ends. `link` is a kind of link, or `nixl/<UCX_TLS>`; `both` are `kv_peer`'s settings."""

    def __init__(
        self,
        link: str,
        directory: Path,
        *,
        within: tuple[Sequence[str], Sequence[str]] = ((), ()),
        reader: dict[str, Any] | None = None,
        writer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **both: Any,
    ) -> None:
        self.kind, _, transports = link.partition("/")
        kinds = {"shm": ["shm"], "tcp": ["shm", "tcp"], "nixl": ["shm", "nixl"]}[self.kind]
        both = {"kinds": kinds, "directory": str(directory)} | both
        told = {"UCX_TLS": transports} if transports else {}
        told |= environment or {}
        self.directory = directory
        self.reader = Peer(
            "reader",
            {"slots": 8, "lease_s": 600.0, **both, **(reader or {})},
            environment=told,
            within=within[0],
        )
        try:
            self.writer = Peer(
                "writer", {**both, **(writer or {})}, environment=told, within=within[1]
            )
        except BaseException:
            self.reader.kill_quietly()
            raise
        self.certificate, self.agent = map(bytes.fromhex, self.writer.ask("who"))
        self.seals: dict[str, TicketSeal | None] = {}
        self.slots: dict[str, list[int]] = {}
        self._asked_s = 0.0
        """When the last ticket was asked for: from there its writer counts the lease."""

    def reserve(self, request: str, *, blocks: int = 3, tenant: str = "default") -> Ticket:
        """A ticket of `request`. Raises `PeerFailed`."""
        generation = self.generation(request, tenant=tenant)
        reserve = Reserve(
            transfer_id=transfer_id(RequestId(request), 1),
            generation=generation,
            prefill_worker=WRITER,
            link=self.kind,
            layout=LAYOUT,
            fingerprint=FINGERPRINT,
            certificate=self.certificate,
            agent=self.agent,
        )
        self._asked_s = time.monotonic()
        given = self.reader.ask(
            "reserve", reserve=encode(reserve).hex(), tokens=blocks * BLOCK_TOKENS
        )
        ticket: Ticket = decode(bytes.fromhex(given), Ticket)
        self.seals[request] = ticket.seal
        self.slots[request] = [ref.slot for ref in ticket.slots]
        return ticket

    def open(self, request: str, *, blocks: int = 3) -> Ticket:
        """A ticket, and the writer's transfer under it. Raises `PeerFailed`."""
        ticket = self.reserve(request, blocks=blocks)
        self.use(ticket)
        return ticket

    def use(self, ticket: Ticket) -> None:
        """Have the writer open its transfer under `ticket`. Raises `PeerFailed`."""
        salt = context_salt(self.generation("any"), FINGERPRINT.base)
        self.writer.ask("open", ticket=encode(ticket).hex(), salt=salt, sent_s=self._asked_s)

    def write(self, request: str, blocks: Sequence[int], sign: str, **more: Any) -> None:
        """Have blocks exported."""
        self.writer.ask("write", transfer=f"{request}.1", blocks=list(blocks), sign=sign, **more)

    def digests(self, request: str, *, within_s: float = PATIENCE_S) -> tuple[BlockDigest, ...]:
        """Of all blocks, once they have arrived. Raises `PeerFailed`."""
        told = self.writer.ask("digests", transfer=f"{request}.1", within_s=within_s)
        return tuple(
            BlockDigest(index=index, n_bytes=n_bytes, checksum=checksum)
            for index, n_bytes, checksum in told
        )

    def claim(
        self, request: str, digests: tuple[BlockDigest, ...], *, blocks: int = 3, **changes: Any
    ) -> list[str]:
        """Hand over: which bytes each block holds that may be decoded. Raises `PeerFailed`."""
        fields: dict[str, Any] = {
            "generation": self.generation(request),
            "prefill_worker": WRITER,
            "transfer_id": transfer_id(RequestId(request), 1),
            "first_ids": (7,),
            "blocks": digests,
            "report": Report(),
            "seal": self.seals[request],
        }
        job = DecodeJob(**(fields | changes))
        seen: list[str] = self.reader.ask(
            "claim", job=encode(job).hex(), tokens=blocks * BLOCK_TOKENS
        )
        return seen

    def carries(self, request: str, sign: str, *, blocks: int = 3) -> None:
        """A whole transfer, from ticket to import; a link that has just failed is asked again."""
        ticket = self.reserve(request, blocks=blocks)
        until(lambda: self._is_usable(ticket))
        self.write(request, range(blocks), sign)
        digests = self.digests(request)
        assert self.claim(request, digests, blocks=blocks) == [sign] * blocks
        self.writer.ask("close", transfer=f"{request}.1")

    def _is_usable(self, ticket: Ticket) -> bool:
        try:
            self.use(ticket)
        except PeerFailed as failed:
            if failed.kind != "LinkBroken":
                raise
            return False
        return True

    def withdraw(self, request: str, why: str) -> None:
        """What a prefill worker does with a hand-off that failed, until nothing is on its way."""

        def over() -> bool:
            closed: bool = self.writer.ask("close", transfer=f"{request}.1")
            self.reader.ask("stopped", transfer=f"{request}.1", reason=why, writes=not closed)
            return closed

        until(over)

    def stands(self, request: str) -> tuple[str, str]:
        """State and reason of a transfer in the reader's ledger, as `diptych kv` shows it."""
        state, reason = self.reader.ask("look")["transfers"][f"{request}.1"]
        return state, reason

    def until_stands(self, request: str, state: str) -> str:
        """Wait until a transfer is in `state` at the reader; gives the reason."""
        until(lambda: self.stands(request)[0] == state)
        return self.stands(request)[1]

    def until_free(self, slots: int = 0) -> None:
        """Wait until no more than `slots` of the reader's are taken."""
        until(lambda: self.reader.ask("look")["used"] == slots)

    def generation(self, request: str, *, tenant: str = "default") -> Generation:
        """Whose KV it is."""
        return a_generation(request, tenant=tenant, budget_ms=600_000)

    def close(self) -> None:
        """Kill what is left, frozen or not."""
        for peer in (self.writer, self.reader):
            peer.kill_quietly()


def until(holds: Callable[[], bool]) -> None:
    """Wait for a fact, for a minute at most."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s, "it does not come true"
        time.sleep(0.02)
