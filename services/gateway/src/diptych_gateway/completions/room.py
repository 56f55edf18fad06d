"""Chat and the older completions, put together."""

from dataclasses import dataclass

from diptych_bus.port import Bus
from diptych_gateway.admission.room import AdmissionRoom
from diptych_gateway.completions.chat import ChatCompletions
from diptych_gateway.completions.chat_resuming import ChatResumption
from diptych_gateway.completions.text import Completions
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.keeping.resuming import Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsRoom:
    """Both endpoints."""

    chat: ChatCompletions
    text: Completions


def completions_room(
    bus: Bus, through: AdmissionRoom, resumption: Resumption, joining: Joining
) -> CompletionsRoom:
    """The room; requests go `through` admission."""
    again = ChatResumption(
        bus=bus,
        admission=through.admission,
        generations=through.generations,
        models=through.models,
        resumption=resumption,
    )
    return CompletionsRoom(
        chat=ChatCompletions(
            admission=through.admission,
            generations=through.generations,
            intake=through.intake,
            resumption=again,
            joining=joining,
        ),
        text=Completions(
            admission=through.admission,
            generations=through.generations,
            intake=through.intake,
            resumption=again,
            joining=joining,
        ),
    )
