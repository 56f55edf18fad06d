"""The composition root: the only module that names concrete adapters."""

from concurrent.futures import ThreadPoolExecutor

from diptych_chassis.member import Member
from diptych_gateway.accepting import Acceptance, Identity
from diptych_gateway.chat import ChatCompletions, deadlines
from diptych_gateway.in_flight import InFlight
from diptych_gateway.models import Models
from diptych_gateway.records import Records
from diptych_gateway.routes import Reasons, application
from diptych_gateway.server import HttpServer
from diptych_gateway.service import Gateway
from diptych_gateway.settings import GatewaySettings
from diptych_policy.admission import Admission

SERVICE = "gateway"


async def serve(member: Member, settings: GatewaySettings) -> None:
    """One life of a gateway."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize") as executor:
        await assemble(member, settings, executor).run()


def assemble(member: Member, settings: GatewaySettings, executor: ThreadPoolExecutor) -> Gateway:
    """A gateway, ready to run."""
    models = Models(member.bus, executor)
    records = Records(member.bus, member.incarnation)
    in_flight = InFlight(member.now_s, records)
    admission = Admission(settings.max_in_flight)
    chat = ChatCompletions(
        settings=settings,
        identity=Identity(member.incarnation, deadlines(settings), settings.default_max_tokens),
        now_s=member.now_s,
        admission=admission,
        acceptance=Acceptance(member.bus, models, executor=executor, rng=member.rng),
        in_flight=in_flight,
    )
    reasons = _reasons(member, admission)
    app = application(chat, models, reasons=reasons, rng=member.rng)
    return Gateway(
        member=member,
        server=HttpServer(
            app, host=settings.host, port=settings.port, reuse_port=settings.reuse_port
        ),
        models=models,
        in_flight=in_flight,
        records=records,
        admission=admission,
        reasons=reasons,
        drain_s=settings.drain_s,
    )


def _reasons(member: Member, admission: Admission) -> Reasons:
    def reasons() -> list[str]:
        found = {
            "the bus is away": not member.bus.connected,
            "draining": admission.draining,
        }
        return [reason for reason, holds in found.items() if holds]

    return reasons
