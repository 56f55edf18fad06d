"""What every route goes through, put together: bodies, models, places, stored requests."""

from concurrent.futures import Executor
from dataclasses import dataclass

from diptych_chassis.member import Member
from diptych_gateway.admission.accepting import Acceptance, Identity
from diptych_gateway.admission.admitting import Door
from diptych_gateway.admission.generating import Generations
from diptych_gateway.admission.models import Models
from diptych_gateway.keeping.room import KeepingRoom
from diptych_gateway.listening.intake import Intake
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.tenancy.room import TenancyRoom
from diptych_policy.admission import Admission
from diptych_policy.voices import KEY_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRoom:
    """From a client's bytes to a request under way."""

    models: Models
    intake: Intake
    admission: Admission
    door: Door
    generations: Generations


def admission_room(
    member: Member,
    settings: GatewaySettings,
    executor: Executor,
    *,
    tenancy: TenancyRoom,
    keeping: KeepingRoom,
) -> AdmissionRoom:
    """The room; `executor` has the work that would hold up the event loop."""
    bus, now_s = member.bus, member.now_s
    models = Models(bus, executor, member.patience, parsers=settings.parsers())
    admission = Admission(settings.max_in_flight)
    deadlines = settings.deadlines().of
    door = Door(bus=bus, admission=admission, deadlines=deadlines, now_s=now_s)
    generations = Generations(
        settings=settings,
        identity=Identity(
            member.incarnation,
            deadlines,
            settings.default_max_tokens,
            key=member.secret_bytes(KEY_BYTES),
        ),
        now_s=now_s,
        acceptance=Acceptance(
            bus, models, executor=executor, rng=member.rng, unix_ms=member.unix_ms
        ),
        in_flight=keeping.in_flight,
        keeper=keeping.keeper,
        door=door,
        allowances=tenancy.allowances,
        renewed=tenancy.keyring.renewed,
    )
    return AdmissionRoom(
        models=models,
        intake=_intake(settings, executor),
        admission=admission,
        door=door,
        generations=generations,
    )


def _intake(settings: GatewaySettings, executor: Executor) -> Intake:
    return Intake(
        executor,
        max_bodies=settings.max_bodies,
        max_bytes=settings.max_body_bytes,
        timeout_s=settings.body_s,
    )
