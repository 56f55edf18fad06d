"""One end of a KV transfer in a process of its own, to be killed and frozen: `kv_pair` drives it.

    python -m diptych_testkit.kv_peer reader|writer SETTINGS

Reads one order a line, as JSON, and answers each with one line. The reader sweeps meanwhile, as a
decode worker does. What a bus would carry, the driver carries.
"""

import asyncio
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.jobs import DecodeJob
from diptych_contracts.transfers import Reserve, SlotRef, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink import tcp_wire
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.links import DEFAULT_LINKS, NIXL, SHM, TCP, LinkSettings
from diptych_kvlink.nixl_writer import NixlWriter
from diptych_kvlink.outgoing import LOOK_S, OutgoingTransfer
from diptych_kvlink.tcp_listening import stop_listening
from diptych_kvlink.tcp_writer import TcpWriter
from diptych_kvlink.writer_links import WriterLinks

BLOCK_TOKENS, BLOCK_BYTES = 4, 1 << 16
LAYOUT = KvLayout(
    layout_id="peer-v1",
    engine_build="peer-1",
    block_tokens=BLOCK_TOKENS,
    slot_bytes=BLOCK_BYTES,
    dtype="f16",
)
FINGERPRINT = Fingerprint(base="base-1", weights="Q4_1")
WRITER, READER = Incarnation("prefill-worker-f1"), Incarnation("decode-worker-f1")
_SWEEP_S = 0.05
Order = dict[str, Any]


class ReaderEnd:
    """A decode worker's transfers, and hands that break them."""

    def __init__(self, settings: LinkSettings, *, slots: int, lease_s: float) -> None:
        self.incoming = IncomingTransfers(
            LAYOUT, slots=slots, lease_s=lease_s, name=READER, links=settings,
            fingerprint=FINGERPRINT,
        )  # fmt: skip
        self._targets = {t.endpoint.kind: t for t in self.incoming._held.targets}
        self._nixl_may_go = threading.Event()

    def do(self, order: Order) -> Any:
        """Carry an order out; what it gives is the answer."""
        method: Callable[..., Any] = getattr(self, f"do_{order.pop('do')}")
        return method(**order)

    def do_reserve(self, reserve: str, tokens: int) -> Any:
        request = decode(bytes.fromhex(reserve), Reserve)
        return encode(self.incoming.reserve(request, tokens=tokens, now_s=time.monotonic())).hex()

    def do_claim(self, job: str, tokens: int) -> Any:
        told = decode(bytes.fromhex(job), DecodeJob)
        blocks = self.incoming.claim(told, tokens=tokens, now_s=time.monotonic())
        seen = ["".join(sorted({chr(byte) for byte in bytes(block.data)})) for block in blocks]
        self.incoming.release(told.transfer_id)
        return seen

    def do_stopped(self, transfer: str, reason: str, writes: bool) -> None:
        self.incoming.writer_stopped(TransferId(transfer), reason, writes=writes)

    def do_cancel(self, transfer: str) -> None:
        self.incoming.release(TransferId(transfer), "cancelled by its scheduler")

    def do_look(self) -> Any:
        """Where every transfer stands, and what this process holds."""
        self.incoming.check()
        return {
            "transfers": {
                t.transfer_id: [t.state, t.reason]
                for t in self.incoming.transfers(time.monotonic(), ended=100)
            },
            "used": self.incoming.slots_used,
            "quarantined": self.incoming.slots_quarantined,
            "refusals": self.incoming.take_refusals(),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def do_memory(self) -> list[str]:
        """Which bytes each slot holds."""
        target = self.incoming._held.targets[0]
        slots = range(self.incoming.slots_total)
        views = [bytes(target.view(slot, BLOCK_BYTES)) for slot in slots]
        return ["".join(sorted({chr(byte) for byte in seen})) for seen in views]

    def do_flip(self, slot: int, at: int) -> None:
        """As a stray write would."""
        address = self._slot(slot)
        address[at] ^= 1

    def do_hold_nixl(self) -> None:
        """The thread of the NIXL agent does nothing until it may: what comes stays in sockets."""
        self._nixl_may_go.clear()
        plane = self._targets[NIXL]._plane  # type: ignore[attr-defined]
        plane.call(lambda _: self._nixl_may_go.wait(120))

    def do_let_nixl_go(self) -> None:
        self._nixl_may_go.set()

    def do_break(self, kind: str) -> None:
        """End a transport, and nothing else of this process."""
        target: Any = self._targets[kind]
        if kind == SHM:
            target._path.unlink()
        elif kind == NIXL:
            target._plane.close()
        else:
            assert kind == TCP
            stop_listening(target._listener)
            target._callers.hang_up()
            target._listener.close()

    def _slot(self, slot: int) -> memoryview:
        for kind in (SHM, NIXL, TCP):
            target: Any = self._targets.get(kind)
            if kind == SHM and target is not None:
                return target._map.slot(slot, BLOCK_BYTES)  # type: ignore[no-any-return]
            if kind == NIXL and target is not None:
                return target._slots[slot]  # type: ignore[no-any-return]
            if kind == TCP and target is not None:
                return target._gates._slots[slot]  # type: ignore[no-any-return]
        raise AssertionError

    def close(self) -> None:
        """Give everything up."""
        self._nixl_may_go.set()
        self.incoming.close()


class WriterEnd:
    """A prefill worker's transfers, and hands that stop in the middle."""

    def __init__(self, settings: LinkSettings) -> None:
        self.links = WriterLinks(WRITER, settings=settings)
        self._loop = asyncio.new_event_loop()
        self._open: dict[str, OutgoingTransfer] = {}
        self._held: list[memoryview] = []
        self._rest = b""

    def do(self, order: Order) -> Any:
        """Carry an order out; what it gives is the answer."""
        answer = getattr(self, f"do_{order.pop('do')}")(**order)
        return self._loop.run_until_complete(answer) if asyncio.iscoroutine(answer) else answer

    def do_who(self) -> Any:
        return [self.links.certificate.hex(), self.links.agent.hex()]

    async def do_open(self, ticket: str, salt: int, sent_s: float) -> None:
        told = decode(bytes.fromhex(ticket), Ticket)
        transfer = await self.links.transfer(told, sent_s=sent_s, salt=salt)
        self._open[told.transfer_id] = transfer

    def do_write(self, transfer: str, blocks: list[int], sign: str, n_bytes: int = 0) -> None:
        """Export blocks, as an engine does: it neither waits nor fails."""
        for index in blocks:
            view = self._open[transfer].buffer(index)
            view[:] = sign.encode() * BLOCK_BYTES
            self._open[transfer].written(index, n_bytes or BLOCK_BYTES)

    def do_begin(self, transfer: str, index: int, sign: str) -> None:
        """Stop in the middle of a block: of its export, or, over a wire, of its way."""
        told = self._open[transfer]
        link: Any = told._link
        ref = told._ticket.slots[index]
        if isinstance(link, TcpWriter):
            head = tcp_wire.pack_batch(7, [(ref, BLOCK_BYTES)], told._shown)
            stream = link._stream
            assert stream is not None
            block = memoryview(sign.encode() * BLOCK_BYTES)
            crossing = stream._crossing([memoryview(head), block])
            sealed = b"".join(bytes(part) for parts in crossing for part in parts)
            self._rest = sealed[-BLOCK_BYTES // 2 :]
            stream._send([memoryview(sealed[: -BLOCK_BYTES // 2])], stream.deadline_s(BLOCK_BYTES))
        elif isinstance(link, NixlWriter):
            self._post(link, ref, sign)
        else:
            view = told.buffer(index)
            view[: BLOCK_BYTES // 2] = sign.encode() * (BLOCK_BYTES // 2)
            self._held.append(view)

    def _post(self, link: NixlWriter, ref: SlotRef, sign: str) -> None:
        """The gate was open when it was looked at; what is posted may be taken in much later."""
        buffer = link.buffer(ref)
        buffer[:] = sign.encode() * BLOCK_BYTES
        gates = link._gates
        assert gates is not None
        gates[0][ref.slot] = ref.generation
        link._look_at_gates = lambda *_: iter(())  # type: ignore
        link.send([(ref, buffer.toreadonly())])
        link._shared.plane.call(lambda _: None).result(60)  # What was asked before is posted.
        del link._look_at_gates
        self._held.append(buffer)

    def do_finish(self, transfer: str, index: int, sign: str) -> None:
        """Go on from `begin`, whatever has happened meanwhile."""
        told = self._open[transfer]
        link: Any = told._link
        if isinstance(link, TcpWriter):
            stream = link._stream
            assert stream is not None
            stream._send([memoryview(self._rest)], stream.deadline_s(len(self._rest)))
        elif not isinstance(link, NixlWriter):
            self._held[-1][BLOCK_BYTES // 2 :] = sign.encode() * (BLOCK_BYTES // 2)
        while self._held:
            self._held.pop().release()
        if isinstance(link, NixlWriter):
            link.stop(told._ticket.slots[index])

    async def do_digests(self, transfer: str, within_s: float) -> Any:
        digests = await self._open[transfer].digests(within_s)
        return [[d.index, d.n_bytes, d.checksum] for d in digests]

    async def do_fails(self, transfer: str, within_s: float) -> str:
        """Wait, as a prefill in progress does, until its hand-off cannot succeed any more."""
        give_up_s = time.monotonic() + within_s
        told = self._open[transfer]
        while told.failure is None and time.monotonic() < give_up_s:
            await asyncio.sleep(LOOK_S)
            told.look()
        return "" if told.failure is None else str(told.failure)

    async def do_gone(self, transfer: str, within_s: float) -> bool:
        """Wait until the link knows that its reader is gone, as a hand-over without answer does."""
        told = self._open[transfer]
        for _ in range(int(within_s / LOOK_S)):
            if told.reader_is_gone():
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def do_close(self, transfer: str) -> bool:
        return self._open[transfer].close()

    def do_look(self) -> Any:
        writing = self.links._writing
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "unfinished": 0 if writing is None else writing.plane.unfinished,
        }

    def close(self) -> None:
        """Give everything up."""
        for transfer in self._open.values():
            transfer.close()
        self.links.close()
        self._loop.close()


def main() -> None:
    """Serve until the input ends."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)  # Libraries that print do not answer.
        _serve(answers)


def _serve(answers: TextIO) -> None:
    role, told = sys.argv[1], json.loads(sys.argv[2])
    settings = LinkSettings(
        kinds=tuple(told["kinds"]),
        directory=Path(told["directory"]),
        host=told.get("host", "127.0.0.1"),
        nixl_network=told.get("nixl_network", "loopback"),
        stall_s=told.get("stall_s", DEFAULT_LINKS.stall_s),
    )
    end: ReaderEnd | WriterEnd
    if role == "reader":
        end = ReaderEnd(settings, slots=told["slots"], lease_s=told["lease_s"])
    else:
        end = WriterEnd(settings)
    _say(answers, "ready")
    waiting = b""
    while True:
        if select.select([0], [], [], _SWEEP_S)[0]:
            come = os.read(0, 1 << 20)
            if not come:
                break
            *orders, waiting = (waiting + come).split(b"\n")
            for order in orders:
                _answer(answers, end, json.loads(order))
        if isinstance(end, ReaderEnd):
            end.incoming.sweep(time.monotonic())
    end.close()


def _answer(answers: TextIO, end: ReaderEnd | WriterEnd, order: Order) -> None:
    try:
        _say(answers, {"ok": end.do(order)})
    except DiptychError as err:
        _say(answers, {"failed": type(err).__name__, "why": str(err)})


def _say(answers: TextIO, what: Any) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
