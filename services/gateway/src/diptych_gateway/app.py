"""The composition root: the packages' rooms, put together."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from starlette.types import ASGIApp

from diptych_chassis.member import Member
from diptych_gateway.admission.room import AdmissionRoom, admission_room
from diptych_gateway.batches.room import Neighbours, batch_endpoints, batch_room
from diptych_gateway.completions.room import completions_room
from diptych_gateway.doors.routes import Generating, Guarding, application
from diptych_gateway.idempotency.claims import Claims
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.keeping.room import KeepingRoom, keeping_room
from diptych_gateway.listening.server import ConnectionLimits, HttpServer
from diptych_gateway.responses.room import responses_room
from diptych_gateway.service import Gateway
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.sockets.room import sockets_room
from diptych_gateway.tenancy.room import TenancyRoom, tenancy_room
from diptych_gateway.texts.room import texts_room

SERVICE = "gateway"


async def serve(member: Member, settings: GatewaySettings) -> None:
    """One life of a gateway."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as executor:
        await assemble(member, settings, executor).run()


def assemble(member: Member, settings: GatewaySettings, executor: ThreadPoolExecutor) -> Gateway:
    """A gateway, ready to run."""
    ground = _ground(member, settings, executor)
    generating = _generating(ground)
    return Gateway(
        member=member,
        server=_server(_application(ground, generating), settings),
        models=ground.through.models,
        embedders=generating.embeddings.embedders,
        in_flight=ground.keeping.in_flight,
        records=ground.keeping.records,
        archive=ground.keeping.archive,
        claims=ground.claims,
        batch_room=generating.batch_room,
        resumption=ground.keeping.resumption,
        keyring=ground.tenancy.keyring,
        allowances=ground.tenancy.allowances,
        metering=ground.tenancy.metering,
        admission=ground.through.admission,
        door=ground.through.door,
        reasons=ground.reasons,
        drain_s=settings.drain_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """What all routes stand on."""

    member: Member
    settings: GatewaySettings
    executor: ThreadPoolExecutor
    tenancy: TenancyRoom
    claims: Claims
    keeping: KeepingRoom
    through: AdmissionRoom

    def reasons(self) -> list[str]:
        """Why this gateway does not serve."""
        found = {
            "the bus is away": not self.member.bus.connected,
            "draining": self.through.admission.draining,
        }
        return [reason for reason, holds in found.items() if holds]


def _ground(member: Member, settings: GatewaySettings, executor: ThreadPoolExecutor) -> _Ground:
    tenancy = tenancy_room(member, settings)
    claims = Claims(member.bus)
    keeping = keeping_room(member, resume_grace_s=settings.resume_grace_s, ended=claims.ended)
    return _Ground(
        member=member,
        settings=settings,
        executor=executor,
        tenancy=tenancy,
        claims=claims,
        keeping=keeping,
        through=admission_room(member, settings, executor, tenancy=tenancy, keeping=keeping),
    )


def _generating(ground: _Ground) -> Generating:
    member, settings, through = ground.member, ground.settings, ground.through
    resumption, records = ground.keeping.resumption, ground.keeping.records
    joining = Joining(
        bus=member.bus,
        generations=through.generations,
        resumption=resumption,
        records=records,
        claims=ground.claims,
    )
    completions = completions_room(member.bus, through, resumption, joining)
    responses = responses_room(through, ground.keeping, joining)
    sockets = sockets_room(member, settings, through, responses.turns)
    texts = texts_room(member, through, ground.executor, embeddings_s=settings.embeddings_s)
    endpoints = batch_endpoints(completions.chat, completions.text, responses, texts.embeddings)
    shared = Neighbours(
        intake=through.intake,
        claims=ground.claims,
        records=records,
        executor=ground.executor,
        reasons=ground.reasons,
    )
    return Generating(
        chat=completions.chat,
        completions=completions.text,
        responses=responses,
        batch_room=batch_room(member, settings, endpoints, shared),
        socket=sockets.responses,
        chat_socket=sockets.chat,
        text=texts.tokenizing,
        embeddings=texts.embeddings,
    )


def _application(ground: _Ground, generating: Generating) -> ASGIApp:
    guarding = Guarding(
        keyring=ground.tenancy.keyring,
        told=ground.tenancy.allowances.headers,
        open_metrics=ground.settings.open_metrics,
        origins=ground.settings.cors_origins,
        administering=ground.tenancy.administering,
    )
    return application(
        generating,
        ground.through.models,
        guarding=guarding,
        reasons=ground.reasons,
        rng=ground.member.rng,
    )


def _server(app: ASGIApp, settings: GatewaySettings) -> HttpServer:
    return HttpServer(
        app,
        host=settings.host,
        port=settings.port,
        limits=ConnectionLimits(
            max_connections=settings.max_connections,
            slow_reader_s=settings.slow_reader_s,
            max_frame_bytes=settings.max_body_bytes,
            ping_s=settings.socket_ping_s,
        ),
        reuse_port=settings.reuse_port,
    )
