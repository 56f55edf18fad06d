"""Composition root of both workers: the only module here that names concrete adapters."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import msgspec

from diptych_chassis.member import Member
from diptych_contracts.cards import GRAMMAR_PARAMETERS, ModelCard
from diptych_contracts.codecs import RAW
from diptych_contracts.errors import EngineGone, Permanent
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.sampling import Stopping
from diptych_contracts.transfers import LinkEndpoint
from diptych_engine.adapters import AdapterSettings, make_engine, read_options
from diptych_engine.folder_card import card_from_folder
from diptych_engine.gguf_card import card_from_gguf
from diptych_engine.llamacpp import LlamaCppEngine, LlamaCppSettings
from diptych_engine.llamacpp.settings import MAX_SEQUENCES, PREFIX_SEQUENCES
from diptych_engine.matching import Grammars
from diptych_engine.port import Engine, EngineSpec
from diptych_engine.request_loop import RequestLoop
from diptych_engine.sim import SimSettings, SimStepEngine
from diptych_engine.sim_card import sim_card, spoken_tokens
from diptych_engine.step_loop import StepLoop
from diptych_kvlink.incoming import IncomingTransfers
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.lockfile import host_id
from diptych_kvlink.writer_links import WriterLinks
from diptych_policy.codecs import CodecChoice, check_setting
from diptych_power.sim import SimulatedDevice
from diptych_telemetry import logger
from diptych_text.answer import AnswerText
from diptych_text.codec import TextCodec
from diptych_worker.announced_blocks import AnnouncedBlocks
from diptych_worker.device import Equipment
from diptych_worker.fitting import Opened, fit_parts
from diptych_worker.lots import open_lots
from diptych_worker.registering import Register
from diptych_worker.service import Worker
from diptych_worker.settings import OWN_ENGINES, WorkerSettings
from diptych_worker.tier_opening import open_tiering

log = logger("worker")

_FLUSH_S = 2.0
"""For KV that waits to be written to tiers, when a worker ends."""
_AGAIN_S = 1.0
"""How often an engine that does not answer yet is asked."""


async def serve(member: Member, settings: WorkerSettings, role: Role) -> None:
    """Run a worker until `member` is told to stop."""
    card = await asyncio.to_thread(read_card, settings)
    if settings.engine in OWN_ENGINES:
        engine = await asyncio.to_thread(load_engine, settings, card)
    else:
        engine = await open_engine(member, settings, role, card)
    device = SimulatedDevice(tdp_w=settings.device_watts)
    await run_worker(member, settings, role, card=card, on=Equipment(engine, device))


def read_card(settings: WorkerSettings) -> ModelCard:
    """The card of the configured model. Raises `Permanent` with one clear line."""
    if settings.model_path != Path():
        model = settings.model or settings.model_path.stem
        if settings.model_path.is_dir() and settings.engine not in OWN_ENGINES:
            card = card_from_folder(settings.model_path, model=model)
        else:
            card = card_from_gguf(settings.model_path, model=model)
    elif settings.engine == "sim":
        card = sim_card(model=settings.model or "sim")
    else:
        kinds = "a GGUF file" if settings.engine in OWN_ENGINES else "a GGUF file or a folder"
        raise Permanent(f"no model: set MODEL_PATH to {kinds}")
    limit = settings.context_tokens or card.context_tokens
    # The simulated engine has learned nothing that a longer context could go beyond.
    trained = limit if settings.engine == "sim" else card.context_tokens
    context_tokens = min(limit, trained, settings.kv_tokens)
    return msgspec.structs.replace(card, context_tokens=context_tokens)


def load_engine(settings: WorkerSettings, card: ModelCard) -> Engine:
    """The engine, its weights in memory and checked."""
    codec, answer_text = TextCodec.from_card(card), _stop_text(card)
    grammars = Grammars(codec, card.eos_ids) if card.grammars else None
    if settings.engine == "sim":
        return StepLoop(_sim(settings, card, codec), answer_text, grammars=grammars)
    return StepLoop(_llamacpp(settings, card), answer_text, grammars=grammars)


async def open_engine(
    member: Member, settings: WorkerSettings, role: Role, card: ModelCard
) -> Engine:
    """The engine this worker is put in front of, once it answers: it may start later than we do.

    Raises:
        Permanent: it never will, as it is set up. Says why in one line.
    """
    options = read_options(settings.engine_options)
    while True:
        loop = RequestLoop(
            make_engine(
                AdapterSettings(
                    name=settings.engine,
                    card=card,
                    role=role,
                    url=settings.engine_url,
                    engine_model=settings.engine_model,
                    options=options,
                    model_path=settings.model_path,
                    kv_tokens=settings.kv_tokens,
                    max_sequences=settings.max_sequences,
                )
            ),
            _stop_text(card),
        )
        try:
            await asyncio.to_thread(loop.open)
        except EngineGone as err:
            member.ready(False, f"waits for its engine: {err}")
            log.info("engine_awaited", engine=settings.engine, error=str(err))
        else:
            return loop
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_AGAIN_S):
                await member.stopping.wait()
            raise EngineGone("told to stop before its engine answered")


def _stop_text(card: ModelCard) -> Callable[[Stopping], AnswerText]:
    codec = TextCodec.from_card(card)

    def answer_text(stopping: Stopping) -> AnswerText:
        return AnswerText(codec, stopping.stop)

    return answer_text


def _llamacpp(settings: WorkerSettings, card: ModelCard) -> LlamaCppEngine:
    return LlamaCppEngine(
        settings.model_path,
        card,
        LlamaCppSettings(
            library=settings.library,
            threads=settings.threads or None,
            kv_tokens=settings.kv_tokens,
            max_sequences=settings.max_sequences,
            prefix_sequences=_prefix_sequences(settings),
            prefix_tokens=settings.prefix_tokens or settings.kv_tokens // 4,
            embedding_tokens=settings.embedding_tokens,
        ),
    )


def _sim(settings: WorkerSettings, card: ModelCard, codec: TextCodec) -> SimStepEngine:
    return SimStepEngine(
        SimSettings(
            spoken=spoken_tokens(codec),
            vocab_size=card.vocab_size,
            eos_ids=card.eos_ids,
            fingerprint=card.fingerprint,
            context_tokens=card.context_tokens,
            kv_tokens=settings.kv_tokens,
            max_sequences=settings.max_sequences,
            prefix_sequences=_prefix_sequences(settings),
            prefix_tokens=settings.prefix_tokens or settings.kv_tokens // 4,
        )
    )


def _prefix_sequences(settings: WorkerSettings) -> int:
    spare = MAX_SEQUENCES - settings.max_sequences
    return max(0, min(PREFIX_SEQUENCES, spare)) if settings.prefix_cache else 0


async def run_worker(
    member: Member,
    settings: WorkerSettings,
    role: Role,
    *,
    card: ModelCard,
    on: Equipment,
) -> None:
    """Join engine and device to the bus and the KV links, and serve."""
    opened = await _opened(member, settings, role, card=card, on=on)
    parts = fit_parts(opened)
    worker = Worker(member, parts, drain_s=settings.drain_s)
    on.engine.start(parts.news.heard, paused=parts.news.unheard)
    try:
        await worker.run()
    finally:
        await parts.prompts.close()
        await asyncio.to_thread(on.engine.stop)  # before the links: it may be writing
        await asyncio.to_thread(opened.writers.close)  # it may wait for a hung peer's deadline
        await asyncio.to_thread(parts.take_over.parking.close)
        opened.incoming.close()
        if opened.tiering is not None:
            await opened.tiering.close(_FLUSH_S)


async def _opened(
    member: Member,
    settings: WorkerSettings,
    role: Role,
    *,
    card: ModelCard,
    on: Equipment,
) -> Opened:
    link_settings = _link_settings(member, settings, on)
    incoming, writers = _links(member, settings, on, link_settings)
    card = offered_card(card, on.engine.spec)
    lots = open_lots(settings, role, on.engine.spec.layout, clock=member.now_s)
    register = _register(member, settings, role, card=card, on=on, endpoints=incoming.endpoints)
    register.parks(tuple(lot.room for lot in lots.values()))
    blocks = AnnouncedBlocks(member.bus, member.incarnation)
    return Opened(
        member=member,
        settings=settings,
        on=on,
        register=register,
        incoming=incoming,
        writers=writers,
        link_settings=link_settings,
        lots=lots,
        blocks=blocks,
        tiering=await open_tiering(member, settings, on, blocks),
    )


def offered_card(card: ModelCard, spec: EngineSpec) -> ModelCard:
    """`card`, which says what the engine can do: vectors, parameters, and how much it holds."""
    theirs = spec.layout.slot_bytes == 0
    context_tokens = min(card.context_tokens, spec.context_tokens)
    return msgspec.structs.replace(
        card,
        context_tokens=context_tokens if theirs else card.context_tokens,
        embedding_size=spec.embedding_size,
        embedding_tokens=spec.embedding_tokens,
        unsupported=spec.unsupported,
        grammars=card.grammars and not set(GRAMMAR_PARAMETERS) <= set(spec.unsupported),
    )


def _links(
    member: Member, settings: WorkerSettings, on: Equipment, link_settings: LinkSettings
) -> tuple[IncomingTransfers, WriterLinks]:
    """Both ends of the KV links. Raises `Permanent` for a codec nobody knows."""
    check_setting(settings.kv_codec, settings.kv_codecs)
    incoming = IncomingTransfers(
        on.engine.spec.layout,
        slots=settings.transfer_slots,
        lease_s=settings.lease_s,
        name=member.incarnation,
        links=link_settings,
        fingerprint=on.engine.spec.fingerprint,
    )
    codecs = CodecChoice(
        settings.kv_codec,
        settings.kv_codecs,
        budget_s=settings.kv_codec_budget_s,
        block=(on.engine.spec.layout.slot_bytes, on.engine.spec.layout.block_tokens),
    )
    me, now_s = member.incarnation, member.now_s
    return incoming, WriterLinks(me, settings=link_settings, clock=now_s, codecs=codecs)


def _link_settings(member: Member, settings: WorkerSettings, on: Equipment) -> LinkSettings:
    return LinkSettings(
        kinds=settings.links if on.engine.spec.layout.slot_bytes else (),
        host=settings.kv_host,
        port=settings.kv_port,
        tls=settings.kv_tls == "required",
        nixl_network=settings.kv_nixl,
        clock=member.now_s,
        codecs=settings.kv_codecs,
        seal=settings.kv_seal == "required",
        adapter=on.links,
    )


def _register(
    member: Member,
    settings: WorkerSettings,
    role: Role,
    *,
    card: ModelCard,
    on: Equipment,
    endpoints: tuple[LinkEndpoint, ...],
) -> Register:
    """What a worker offers."""
    spec, device = on.engine.spec, on.device
    registration = WorkerRegistration(
        worker=member.incarnation,
        role=role,
        engine=spec.engine,
        model=card.model,
        fingerprint=spec.fingerprint,
        layout=spec.layout,
        endpoints=endpoints if spec.layout.slot_bytes else (),
        hand_off=spec.hand_off,
        max_sequences=spec.max_sequences,
        kv_tokens=spec.kv_tokens,
        context_tokens=card.context_tokens,
        host=host_id(),
        codecs=tuple(dict.fromkeys((RAW, *settings.kv_codecs))),
        kv_reuse=settings.kv_reuse and spec.prefix_sequences > 0,
        cap_min_w=device.cap_min_w,
        cap_default_w=device.cap_default_w,
    )
    return Register(member.bus, registration, card)
