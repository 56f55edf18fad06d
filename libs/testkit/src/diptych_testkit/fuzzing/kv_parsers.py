"""What workers tell each other of KV: reservations, jobs, addresses, and files of memory."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from diptych_contracts.cards import KvLayout
from diptych_contracts.errors import DiptychError
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import BlockDigest, DecodeJob
from diptych_contracts.journal import Report
from diptych_contracts.transfers import LinkEndpoint, Release, Reserve, SlotRef, Ticket
from diptych_contracts.wire import decode, encode
from diptych_kvlink.agreement import check_ticket
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.links import SHM, LinkSettings, open_link
from diptych_kvlink.lockfile import PREFIX, host_id, sweep_leftovers
from diptych_kvlink.pool_file import PoolShape, map_pool
from diptych_kvlink.shm import ShmPool
from diptych_kvlink.tcp_address import TcpAddress
from diptych_testkit.builders import FINGERPRINT, a_generation
from diptych_testkit.fuzzing.bending import NUMBERS, bent_bytes, bent_text, bent_tree
from diptych_testkit.fuzzing.bus_parsers import message_kinds
from diptych_testkit.fuzzing.cases import Parser
from diptych_testkit.fuzzing.kv_wire_parsers import office

_KEY = bytes(range(16))
_SLOTS, _SLOT_BYTES, _BLOCK_TOKENS = 4, 256, 4
_LAYOUT = KvLayout(
    layout_id="fuzz",
    engine_build="1",
    block_tokens=_BLOCK_TOKENS,
    slot_bytes=_SLOT_BYTES,
    dtype="f16",
)
_WRITER = Incarnation("prefill-worker-1")


def parsers() -> list[Parser]:
    """All of them."""
    return [
        Parser(name="kv-tickets", make=_messages, read=_transfers, cases=500),
        Parser(name="kv-addresses", make=_address, read=_open, cases=2500),
        Parser(name="kv-files", make=_pool_file, read=_map, cases=1500),
    ]


@cache
def _folder() -> Path:
    """Memory that only these fuzzers share; it goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="diptych-fuzz-")
    _kept.append(folder)
    return Path(folder.name)


_kept: list[Any] = []
_numbers: Iterator[int] = count()


def _settings() -> LinkSettings:
    return LinkSettings(kinds=(SHM,), directory=_folder(), tls=False, stall_s=0.2)


def _reserve() -> Reserve:
    generation = a_generation("r1")
    return Reserve(
        transfer_id=transfer_id(RequestId("r1"), 1),
        generation=generation,
        prefill_worker=_WRITER,
        link=SHM,
        layout=_LAYOUT,
        fingerprint=FINGERPRINT,
        lease_ms=1000,
    )


def _job() -> DecodeJob:
    checksum = 0
    blocks = (BlockDigest(index=0, n_bytes=_SLOT_BYTES // 2, checksum=checksum),)
    return DecodeJob(
        generation=a_generation("r1"),
        prefill_worker=_WRITER,
        transfer_id=transfer_id(RequestId("r1"), 1),
        first_ids=(7,),
        blocks=blocks,
        report=Report(),
    )


def _sealed_job() -> DecodeJob:
    """One whose ticket somebody else has sealed."""
    seal = office().seal(a_generation("r1"), _WRITER, slots=bytes(32), deadline_s=9.0)
    return msgspec.structs.replace(_job(), seal=seal)


def _bent(rng: Random, message: Any, names: tuple[str, ...]) -> Any:
    """`message` with other values of its types; itself if nobody could read it."""
    try:
        tree = bent_tree(rng, msgspec.msgpack.decode(encode(message)), names)
        return decode(msgspec.msgpack.encode(tree), type(message))
    except (DiptychError, OverflowError, RecursionError, UnicodeError, msgspec.MsgspecError):
        return message


def _messages(rng: Random) -> list[tuple[str, Any, int]]:
    """Reservations, claims and releases, some of them bent, in any order."""
    made: list[tuple[str, Any, int]] = []
    names = (*sorted({f for k in message_kinds().values() for f in k.__struct_fields__}), SHM)
    for _ in range(rng.randrange(2, 10)):
        kind = rng.choice(("reserve", "reserve", "claim", "release", "sweep"))
        good: Any = {
            "reserve": _reserve(),
            "claim": rng.choice((_job, _job, _sealed_job))(),
            "release": Release(transfer_id=transfer_id(RequestId("r1"), 1)),
            "sweep": None,
        }[kind]
        if good is not None and rng.random() < 0.6:
            good = _bent(rng, good, names)
        made.append((kind, good, rng.choice((3, 3, 3, 1, 16, 17, 0, -4, 10**9))))
    return made


def _transfers(messages: list[tuple[str, Any, int]]) -> None:
    """Whatever comes in whatever order, no slot is lost, and nothing is read unverified."""
    incoming = IncomingTransfers(
        _LAYOUT,
        slots=_SLOTS,
        lease_s=5.0,
        name=f"decode-worker-{next(_numbers)}",
        links=_settings(),
        fingerprint=FINGERPRINT,
    )
    try:
        for now_s, (kind, message, tokens) in enumerate(messages):
            with suppress(DiptychError):
                _take(incoming, kind, message, tokens, now_s=float(now_s))
            incoming.check()
        incoming.sweep(1e9)
        incoming.sweep(2e9)
        incoming.check()
        assert all(t.reason for t in incoming.transfers(3e9)), "a ticket outlived its lease"
    finally:
        incoming.close()


def _take(
    incoming: IncomingTransfers, kind: str, message: Any, tokens: int, *, now_s: float
) -> None:
    match kind:
        case "reserve":
            ticket = incoming.reserve(message, tokens=tokens, now_s=now_s)
            assert isinstance(ticket, Ticket)
            assert decode(encode(ticket), Ticket) == ticket
            with suppress(DiptychError):
                check_ticket(ticket, message, tokens=tokens)
        case "claim":
            if message.seal is None:  # One that counts, so that the rest is looked at too.
                ticket = incoming.reserve(_reserve(), tokens=3, now_s=now_s)
                message = msgspec.structs.replace(message, seal=ticket.seal)
            incoming.claim(message, tokens=tokens, now_s=now_s)
        case "release":
            incoming.writer_stopped(message.transfer_id)
        case _:
            incoming.sweep(now_s)


def _address(rng: Random) -> LinkEndpoint:
    folder = _folder()
    tcp = "127.0.0.1:1/reader-1/" + _KEY.hex()
    text = rng.choice((tcp, str(folder / f"{PREFIX}x"), f"{folder}/../{PREFIX}x", "[::1]:1/r/00"))
    if rng.random() < 0.8:
        words = ("/", ":", "..", "\0", "a" * 70, ".", "é", "\u0660", "%", "[", "]", "_")
        text = bent_text(rng, text, words)
    good = LinkEndpoint(
        kind=rng.choice(("tcp", "shm", "shm", "rdma", "")),
        host=rng.choice((host_id(folder), host_id(folder), "", "x")),
        address=text,
        slots=rng.choice((_SLOTS, *(n for n in NUMBERS if isinstance(n, int) and abs(n) < 2**63))),
        slot_bytes=_SLOT_BYTES,
    )
    return good


def _open(endpoint: LinkEndpoint) -> None:
    """As a writer does. Names of other machines are not looked up here."""
    if endpoint.kind == "tcp":
        address = TcpAddress.parse(endpoint.address)
        assert TcpAddress.parse(str(address)) == address
        assert address.key.hex() not in address.where or len(address.key) < len(_KEY)
        odd = not address.host.isascii() or len(address.host) > 63 or not address.host[:1].isalnum()
        if not (odd or address.host in ("127.0.0.1", "::1")):
            return
    link = open_link(endpoint, writer=_WRITER, settings=_settings())
    try:
        if endpoint.kind == "tcp":
            link.connect()
        link.buffer(SlotRef(slot=1, generation=1))
    finally:
        link.close()


def _pool_file(rng: Random) -> tuple[LinkEndpoint, bytes, str]:
    shape = PoolShape(slots=_SLOTS, slot_bytes=_SLOT_BYTES)
    data = _pool_bytes(shape)
    if rng.random() < 0.8:
        head = bent_bytes(rng, data[:64])
        data = head + data[64:]
    numbers = [n for n in NUMBERS if isinstance(n, int) and abs(n) < 2**63]
    endpoint = LinkEndpoint(
        kind=SHM,
        host=host_id(_folder()),
        address=str(_folder() / f"{PREFIX}file"),
        slots=rng.choice((_SLOTS, _SLOTS, _SLOTS, *numbers)),
        slot_bytes=rng.choice((_SLOT_BYTES, _SLOT_BYTES, _SLOT_BYTES, *numbers)),
    )
    return endpoint, data, rng.choice(("file", "file", "file", "link", "folder", "none"))


@cache
def _pool_bytes(shape: PoolShape) -> bytes:
    pool = ShmPool("seed", shape, _folder())
    try:
        return Path(pool.endpoint.address).read_bytes()
    finally:
        pool.close()


def _map(case: tuple[LinkEndpoint, bytes, str]) -> None:
    endpoint, data, kind = case
    path = Path(endpoint.address)
    target = path.with_name("elsewhere")
    try:
        match kind:
            case "file":
                path.write_bytes(data)
                path.chmod(0o600)
            case "link":
                target.write_bytes(data)
                target.chmod(0o600)
                path.symlink_to(target)
            case "folder":
                path.mkdir()
        mapped = map_pool(endpoint, _folder())
        assert kind == "file"
        assert (mapped.shape.slots, mapped.shape.slot_bytes) == (
            endpoint.slots,
            endpoint.slot_bytes,
        )
        mapped.close()
    finally:
        sweep_leftovers(_folder())
        for left in (path, target):
            if left.is_dir():
                left.rmdir()
            else:
                left.unlink(missing_ok=True)
