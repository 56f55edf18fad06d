"""The composition root: the only module that names concrete adapters."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.types import ASGIApp

from diptych_chassis.member import Member
from diptych_contracts.ids import new_request_id
from diptych_gateway.admission.accepting import Acceptance, Identity
from diptych_gateway.admission.admitting import Door
from diptych_gateway.admission.generating import Generations
from diptych_gateway.admission.models import Models
from diptych_gateway.batches.room import Neighbours, batch_endpoints, batch_room
from diptych_gateway.completions.chat import ChatCompletions
from diptych_gateway.completions.chat_resuming import ChatResumption
from diptych_gateway.completions.text import Completions
from diptych_gateway.doors.routes import Generating, Guarding, Reasons, application
from diptych_gateway.idempotency.claims import Claims
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.keeping.archive import Archive
from diptych_gateway.keeping.in_flight import InFlight
from diptych_gateway.keeping.keeper import Keeper
from diptych_gateway.keeping.records import Records
from diptych_gateway.keeping.resuming import Resumption
from diptych_gateway.listening.intake import Intake
from diptych_gateway.listening.server import ConnectionLimits, HttpServer
from diptych_gateway.responses.serving import Responses
from diptych_gateway.responses.turns import Turns
from diptych_gateway.service import Gateway
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.sockets.budget import Budget
from diptych_gateway.sockets.chat_socket import ChatSocket
from diptych_gateway.sockets.connections import SocketRoom
from diptych_gateway.sockets.responses_socket import ResponsesSocket
from diptych_gateway.tenancy.allowances import Allowances
from diptych_gateway.tenancy.keyring import Keyring
from diptych_gateway.tenancy.metering import Metering
from diptych_gateway.texts.embedders import Embedders
from diptych_gateway.texts.embedding import Embeddings
from diptych_gateway.texts.tokenizing import Tokenizing
from diptych_policy.admission import Admission

SERVICE = "gateway"
_WAITING_FRAMES = 32
"""Memory for turns that wait in their lanes, in frames of the largest size."""
_REMEMBERED_CHARS = 64 * 1024 * 1024
"""Of conversations that WebSockets remember, all together."""


async def serve(member: Member, settings: GatewaySettings) -> None:
    """One life of a gateway."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as executor:
        await assemble(member, settings, executor).run()


def assemble(member: Member, settings: GatewaySettings, executor: ThreadPoolExecutor) -> Gateway:
    """A gateway, ready to run."""
    bus, me, now_s = member.bus, member.incarnation, member.now_s
    models = Models(bus, executor, member.patience, parsers=settings.parsers())
    records = Records(bus, me)
    archive = Archive(bus)
    claims = Claims(bus)
    keeper = Keeper(records, archive, resume_grace_s=settings.resume_grace_s, ended=claims.ended)
    in_flight = InFlight(now_s, records, keeper)
    resumption = Resumption(bus, me, in_flight=in_flight, keeper=keeper, now_s=now_s)
    keyring = Keyring(bus, host=settings.host, allowed=settings.allow_anonymous)
    allowances = Allowances(bus, me, now_s)
    admission = Admission(settings.max_in_flight)
    deadlines = settings.deadlines().of
    door = Door(bus=bus, admission=admission, deadlines=deadlines, now_s=now_s)
    generations = Generations(
        settings=settings,
        identity=Identity(me, deadlines, settings.default_max_tokens),
        now_s=now_s,
        acceptance=Acceptance(
            bus, models, executor=executor, rng=member.rng, unix_ms=member.unix_ms
        ),
        in_flight=in_flight,
        keeper=keeper,
        door=door,
        allowances=allowances,
        renewed=keyring.renewed,
    )
    joining = Joining(
        bus=bus, generations=generations, resumption=resumption, records=records, claims=claims
    )
    turns = Turns(
        generations=generations,
        models=models,
        archive=archive,
        resumption=resumption,
        joining=joining,
    )
    intake = Intake(
        executor,
        max_bodies=settings.max_bodies,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_s,
    )
    chat_resumption = ChatResumption(
        bus=bus,
        admission=admission,
        generations=generations,
        models=models,
        resumption=resumption,
    )
    chat = ChatCompletions(
        admission=admission,
        generations=generations,
        intake=intake,
        resumption=chat_resumption,
        joining=joining,
    )
    completions = Completions(
        admission=admission,
        generations=generations,
        intake=intake,
        resumption=chat_resumption,
        joining=joining,
    )
    responses = Responses(admission=admission, turns=turns, records=records, intake=intake)
    embeddings = _embeddings(member, generations, models=models, intake=intake, executor=executor)
    reasons = _reasons(member, admission)
    batches = batch_room(
        member,
        settings,
        batch_endpoints(chat, completions, responses, embeddings),
        Neighbours(
            intake=intake, claims=claims, records=records, executor=executor, reasons=reasons
        ),
    )
    room = SocketRoom(
        admission=admission,
        sockets=Admission(settings.max_sockets),
        waiting=Budget(_WAITING_FRAMES * settings.max_body_bytes),
        generations=generations,
        intake=intake,
        new_id=partial(new_request_id, member.rng),
    )
    generating = Generating(
        chat=chat,
        completions=completions,
        responses=responses,
        batch_room=batches,
        socket=ResponsesSocket(room=room, turns=turns, remembered=Budget(_REMEMBERED_CHARS)),
        chat_socket=ChatSocket(room=room),
        text=Tokenizing(
            admission=admission,
            intake=intake,
            models=models,
            executor=executor,
            now_s=now_s,
        ),
        embeddings=embeddings,
    )
    guarding = Guarding(
        keyring=keyring,
        told=allowances.headers,
        open_metrics=settings.open_metrics,
        origins=settings.cors_origins,
    )
    app = application(generating, models, guarding=guarding, reasons=reasons, rng=member.rng)
    return Gateway(
        member=member,
        server=_server(app, settings),
        models=models,
        embedders=embeddings.embedders,
        in_flight=in_flight,
        records=records,
        archive=archive,
        claims=claims,
        batch_room=batches,
        resumption=resumption,
        keyring=keyring,
        allowances=allowances,
        metering=Metering(bus),
        admission=admission,
        door=door,
        reasons=reasons,
        drain_s=settings.drain_s,
    )


def _embeddings(
    member: Member,
    generations: Generations,
    *,
    models: Models,
    intake: Intake,
    executor: ThreadPoolExecutor,
) -> Embeddings:
    return Embeddings(
        bus=member.bus,
        admission=generations.door.admission,
        intake=intake,
        models=models,
        embedders=Embedders(member.bus, models, member.now_s),
        allowances=generations.allowances,
        renewed=generations.renewed,
        executor=executor,
        now_s=member.now_s,
        timeout_s=generations.settings.embeddings_s,
    )


def _server(app: ASGIApp, settings: GatewaySettings) -> HttpServer:
    return HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        limits=ConnectionLimits(
            max_connections=settings.max_connections,
            max_frame_bytes=settings.max_body_bytes,
            ping_s=settings.socket_ping_s,
        ),
        reuse_port=settings.reuse_port,
    )


def _reasons(member: Member, admission: Admission) -> Reasons:
    def reasons() -> list[str]:
        found = {
            "the bus is away": not member.bus.connected,
            "draining": admission.draining,
        }
        return [reason for reason, holds in found.items() if holds]

    return reasons
