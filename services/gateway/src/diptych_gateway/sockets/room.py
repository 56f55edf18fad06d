"""WebSockets, put together."""

from dataclasses import dataclass
from functools import partial

from diptych_chassis.member import Member
from diptych_contracts.ids import new_request_id
from diptych_gateway.admission.room import AdmissionRoom
from diptych_gateway.responses.turns import Turns
from diptych_gateway.settings import GatewaySettings
from diptych_gateway.sockets.budget import Budget
from diptych_gateway.sockets.chat_socket import ChatSocket
from diptych_gateway.sockets.connections import SocketRoom
from diptych_gateway.sockets.responses_socket import ResponsesSocket
from diptych_policy.admission import Admission

_WAITING_FRAMES = 32
"""Memory for turns that wait in their lanes, in frames of the largest size."""
_REMEMBERED_CHARS = 64 * 1024 * 1024
"""Of conversations that WebSockets remember, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sockets:
    """Both endpoints."""

    responses: ResponsesSocket
    chat: ChatSocket


def sockets_room(
    member: Member, settings: GatewaySettings, through: AdmissionRoom, turns: Turns
) -> Sockets:
    """The endpoints; requests go `through` admission."""
    room = SocketRoom(
        admission=through.admission,
        sockets=Admission(settings.max_sockets),
        waiting=Budget(_WAITING_FRAMES * settings.max_body_bytes),
        generations=through.generations,
        intake=through.intake,
        new_id=partial(new_request_id, member.rng),
    )
    return Sockets(
        responses=ResponsesSocket(room=room, turns=turns, remembered=Budget(_REMEMBERED_CHARS)),
        chat=ChatSocket(room=room),
    )
