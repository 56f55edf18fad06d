import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.ids import Incarnation, RequestId, transfer_id
from diptych_contracts.jobs import BlockDigest, DecodeJob, Generation
from diptych_contracts.journal import Report
from diptych_contracts.sampling import Sampling, Stopping
from diptych_contracts.transfers import LinkEndpoint, Reserve, SlotRef, Ticket
from diptych_contracts.wire import encode
from diptych_kvlink import nixl_writer
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.link_identity import LinkIdentity
from diptych_kvlink.links import (
    KINDS,
    NIXL,
    SHM,
    TCP,
    LinkSettings,
    offered,
    open_link,
    open_writing,
)
from diptych_kvlink.nixl_writer import NixlWriting
from diptych_kvlink.port import LinkWriter
from diptych_kvlink.presence import Presence
from diptych_kvlink.verifying import context_salt

BLOCK_TOKENS = 4
SLOT_BYTES = 6000
LAYOUT = KvLayout(
    layout_id="test-v1",
    engine_build="test-1",
    block_tokens=BLOCK_TOKENS,
    slot_bytes=SLOT_BYTES,
    dtype="f16",
)
FINGERPRINT = Fingerprint(base="base-1", weights="Q4_1")
WRITER = Incarnation("prefill-worker-a1")
IDENTITIES: defaultdict[str, LinkIdentity] = defaultdict(LinkIdentity)
"""Every writer's own."""
WRITINGS: dict[str, NixlWriting] = {}
"""Every writer's NIXL agent, made when it is first wanted: 0.1 s each."""
HERE = offered(LinkSettings(kinds=KINDS))
"""The kinds that work on this machine."""


def writing(writer: str, kind: str) -> NixlWriting | None:
    """The writer's NIXL agent, for a link of that kind."""
    if kind != NIXL:
        return None
    if writer not in WRITINGS:
        made = open_writing(Incarnation(writer), LinkSettings(kinds=KINDS))
        assert made is not None
        WRITINGS[writer] = made
    return WRITINGS[writer]


def generation(request: str, attempt: int = 1, budget_ms: int = 60_000) -> Generation:
    return Generation(
        request_id=RequestId(request),
        attempt=attempt,
        gateway=Incarnation("gateway-1"),
        model="m",
        tenant="default",
        prompt_ids=(1, 2, 3),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=8),
        budget_ms=budget_ms,
    )


@dataclass
class Reader:
    """A decode worker's transfers over every link, and a writer over one of them."""

    incoming: IncomingTransfers
    settings: LinkSettings
    kind: str
    writer: Incarnation = WRITER
    links: list[LinkWriter] = field(default_factory=list)
    certificates: dict[str, bytes] = field(default_factory=dict)
    """Of writers that are processes of their own."""

    agents: dict[str, bytes] = field(default_factory=dict)
    """Likewise."""

    @property
    def endpoint(self) -> LinkEndpoint:
        """As tickets have it."""
        targets = self.incoming._held.targets
        return next(t.endpoint for t in targets if t.endpoint.kind == self.kind)

    def quarantined(self, slots: int) -> int:
        """How many of `slots` closed under a writer's hands the link has to keep back."""
        return 0 if self.kind == TCP else slots

    def memory(self, ref: SlotRef) -> bytes:
        return bytes(self.incoming._held.targets[0].view(ref.slot, SLOT_BYTES))

    def sweep_until_free(self, now_s: float, *, slots: int = 0) -> None:
        """Sweep until no more than `slots` are used; over NIXL writers are asked first."""
        give_up_s = time.monotonic() + 60
        while self.incoming.slots_used > slots and time.monotonic() < give_up_s:
            self.incoming.sweep(now_s)
            time.sleep(0.01)
        assert self.incoming.slots_used == slots

    def request(self, request: str = "r1", **changes: object) -> Reserve:
        attempt = changes.pop("attempt", 1)
        budget_ms = changes.pop("budget_ms", 60_000)
        fields: dict[str, object] = {
            "transfer_id": transfer_id(RequestId(request), attempt),
            "generation": generation(request, attempt, budget_ms),
            "prefill_worker": WRITER,
            "link": self.kind,
            "layout": LAYOUT,
            "fingerprint": FINGERPRINT,
        }
        fields |= changes
        writer = str(fields["prefill_worker"])
        known = self.certificates.get(writer) or IDENTITIES[writer].certificate
        agent = self.agents.get(writer, b"")
        if not agent and (own := writing(writer, str(fields["link"]))) is not None:
            agent = own.agent
        return Reserve(**({"certificate": known, "agent": agent} | fields))

    def reserve(
        self, request: str = "r1", *, tokens: int = 10, now_s: float = 0.0, **changes: object
    ) -> Ticket:
        return self.incoming.reserve(self.request(request, **changes), tokens=tokens, now_s=now_s)

    def link(self) -> LinkWriter:
        self.links.append(
            open_link(
                self.endpoint,
                writer=self.writer,
                settings=self.settings,
                identity=IDENTITIES[self.writer],
                writing=writing(self.writer, self.kind),
            )
        )
        return self.links[-1]

    def put(self, ticket: Ticket, index: int, data: bytes, link: LinkWriter | None = None) -> None:
        """Block `index` of `ticket`."""
        ref, link = ticket.slots[index], link or self.link()
        if self.kind == NIXL:  # Its memory is made ready first, as `WriterLinks` does.
            link.connect()
        buffer = link.buffer(ref)[: len(data)]
        buffer[:] = data
        link.send([(ref, buffer.toreadonly())], b"" if ticket.seal is None else encode(ticket.seal))
        link.confirm()

    @property
    def salt(self) -> int:
        """Of the context that every `generation` here has."""
        return context_salt(generation("any"), FINGERPRINT.base)

    def write(self, ticket: Ticket, *, tokens: int = 10) -> tuple[BlockDigest, ...]:
        link = self.link()
        digests = []
        for index in range(len(ticket.slots)):
            left = tokens - index * BLOCK_TOKENS
            n_bytes = SLOT_BYTES if left >= BLOCK_TOKENS else 1500 * left
            data = block_bytes(ticket, index, n_bytes)
            self.put(ticket, index, data, link)
            checksum = xxhash.xxh3_64_intdigest(data, self.salt)
            digests.append(BlockDigest(index=index, n_bytes=n_bytes, checksum=checksum))
        return tuple(digests)

    def job(self, ticket: Ticket, blocks: tuple[BlockDigest, ...], **changes: object) -> DecodeJob:
        request, _, attempt = ticket.transfer_id.rpartition(".")
        fields: dict[str, object] = {
            "generation": generation(request, int(attempt)),
            "prefill_worker": WRITER,
            "transfer_id": ticket.transfer_id,
            "first_ids": (7,),
            "blocks": blocks,
            "report": Report(),
            "seal": ticket.seal,
        }
        return DecodeJob(**(fields | changes))


def block_bytes(ticket: Ticket, index: int, n_bytes: int) -> bytes:
    stem = f"{ticket.transfer_id}/{index};".encode()
    return (stem * (n_bytes // len(stem) + 1))[:n_bytes]


@pytest.fixture(params=HERE)
def kind(request: pytest.FixtureRequest) -> str:
    """The link that blocks cross; a test of one link overrides it."""
    return str(request.param)


@pytest.fixture
def stall_s() -> float:
    """How patient links are; a test of a stall overrides it."""
    return 60.0


@pytest.fixture(autouse=True)
def patient_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a first contact may take long: the machine is busy."""
    monkeypatch.setattr(nixl_writer, "_CONNECT_S", 60.0)


@pytest.fixture
def settings(tmp_path: Path, stall_s: float, request: pytest.FixtureRequest) -> LinkSettings:
    asked = request.getfixturevalue("kind") if "kind" in request.fixturenames else ""
    kinds = KINDS if asked == NIXL else (SHM, TCP)
    return LinkSettings(kinds=kinds, directory=tmp_path, stall_s=stall_s, clock=lambda: 0.0)


@pytest.fixture
def make_reader(settings: LinkSettings, kind: str) -> Iterator[Callable[..., Reader]]:
    readers: list[Reader] = []

    def make(*, slots: int = 8, lease_s: float = 10.0) -> Reader:
        incoming = IncomingTransfers(
            LAYOUT,
            slots=slots,
            lease_s=lease_s,
            name=f"decode-worker-{len(readers)}",
            links=settings,
            fingerprint=FINGERPRINT,
        )
        readers.append(Reader(incoming, settings, kind))
        return readers[-1]

    yield make
    for reader in readers:
        reader.incoming.check()
        for link in reader.links:
            link.close()
        reader.incoming.close()


@pytest.fixture
def reader(make_reader: Callable[..., Reader]) -> Reader:
    return make_reader()


@pytest.fixture
def writer_presence(tmp_path: Path) -> Iterator[Presence]:
    presence = Presence(WRITER, tmp_path)
    yield presence
    presence.close()


@pytest.fixture
def link_thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield thread
