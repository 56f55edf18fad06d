"""A worker's parts, made of what was opened for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from diptych_chassis.member import Member
from diptych_contracts.fleet import Role
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.parking import Lot
from diptych_kvlink.surveying import survey
from diptych_kvlink.writer_links import WriterLinks
from diptych_policy.job_admission import JobAdmission
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.decode_peer import DecodePeer
from diptych_worker.decoding import Decoding
from diptych_worker.device import Equipment
from diptych_worker.embedding import EmbedDesk
from diptych_worker.engine_handing_over import EngineHandOver
from diptych_worker.engine_news import EngineNews
from diptych_worker.handing_over import HandOver
from diptych_worker.held_prefixes import HeldPrefixes
from diptych_worker.metering import WorkerMetrics
from diptych_worker.orphaned import Orphans
from diptych_worker.parking import Parking
from diptych_worker.prompts import Prompts
from diptych_worker.registering import Register
from diptych_worker.reporting import Reports
from diptych_worker.service import Parts
from diptych_worker.settings import WorkerSettings
from diptych_worker.taking_over import TakeOver
from diptych_worker.tiering import Tiering


@dataclass(frozen=True, slots=True)
class Opened:
    """What is open before a worker serves: its place on the bus, engine, links and stores of KV."""

    member: Member
    settings: WorkerSettings
    on: Equipment
    register: Register
    incoming: IncomingTransfers
    writers: WriterLinks
    link_settings: LinkSettings
    lots: Mapping[str, Lot]
    blocks: AnnouncedBlocks
    tiering: Tiering | None


@dataclass(frozen=True, slots=True)
class _Books:
    """What several parts write into."""

    admission: JobAdmission
    metrics: WorkerMetrics
    orphans: Orphans


def fit_parts(opened: Opened) -> Parts:
    """The parts of a worker, each joined to those it needs."""
    member, on = opened.member, opened.on
    books = _books(opened)
    take_over = _take_over(opened, books)
    embedding = EmbedDesk(
        member,
        on.engine,
        model=opened.register.card.model,
        draining=lambda: books.admission.draining,
    )
    return Parts(
        engine=on.engine,
        admission=books.admission,
        news=_news(opened, books),
        hand_over=_hand_over(opened, books),
        take_over=take_over,
        writing=opened.writers,
        survey=partial(
            survey, member.incarnation, opened.link_settings, codec=opened.settings.kv_codec
        ),
        decoding=_decoding(opened, books, take_over),
        embedding=embedding,
        prompts=Prompts(member.bus, now_s=member.now_s),
        blocks=opened.blocks,
        register=opened.register,
        reports=_reports(opened, books, take_over, embedding),
        device=on.device,
        tiering=opened.tiering,
    )


def _books(opened: Opened) -> _Books:
    spec = opened.on.engine.spec
    return _Books(
        admission=JobAdmission(max_sequences=spec.max_sequences, kv_tokens=spec.kv_tokens),
        metrics=WorkerMetrics(opened.register.card.model, spec),
        orphans=Orphans(opened.member.now_s),
    )


def _news(opened: Opened, books: _Books) -> EngineNews:
    member = opened.member
    return EngineNews(
        member.bus,
        member.incarnation,
        opened.on.device,
        books.metrics,
        blocks=opened.blocks,
        now_s=member.now_s,
        tiering=opened.tiering,
    )


def _hand_over(opened: Opened, books: _Books) -> HandOver | EngineHandOver:
    member, engine = opened.member, opened.on.engine
    peer = DecodePeer(member.bus, transfer_s=opened.settings.transfer_s, now_s=member.now_s)
    terms = engine.spec.hand_off
    if terms is None:
        return HandOver(peer, engine, opened.writers, metrics=books.metrics, tiering=opened.tiering)
    return EngineHandOver(
        peer,
        engine,
        terms,
        outgoing=opened.writers.outgoing,
        metrics=books.metrics,
        orphans=books.orphans,
    )


def _take_over(opened: Opened, books: _Books) -> TakeOver:
    spec, now_s = opened.on.engine.spec, opened.member.now_s
    admission, metrics = books.admission, books.metrics
    base = spec.fingerprint.base
    pins = opened.on.engine.pins if opened.settings.kv_reuse else None
    return TakeOver(
        opened.incoming,
        admission,
        spec,
        parking=Parking(opened.lots, admission, model_base=base, metrics=metrics, now_s=now_s),
        held=HeldPrefixes(pins, spec),
        metrics=metrics,
        now_s=now_s,
    )


def _decoding(opened: Opened, books: _Books, take_over: TakeOver) -> Decoding:
    member = opened.member
    return Decoding(
        member.bus,
        opened.on.engine,
        worker=member.incarnation,
        imported=take_over.imported,
        remained=books.metrics.remained,
        now_s=member.now_s,
        tiering=opened.tiering,
    )


def _reports(opened: Opened, books: _Books, take_over: TakeOver, embedding: EmbedDesk) -> Reports:
    return Reports(
        opened.member,
        opened.on.engine,
        admission=books.admission,
        take_over=take_over,
        device=opened.on.device,
        metrics=books.metrics,
        waits=opened.register.registration.role is Role.PREFILL,
        embedding=embedding,
        orphans=books.orphans,
        moving=lambda: opened.writers.codecs.slowest_bytes_s,
    )
