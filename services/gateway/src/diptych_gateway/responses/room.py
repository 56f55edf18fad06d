"""Responses, put together."""

from diptych_gateway.admission.room import AdmissionRoom
from diptych_gateway.idempotency.joining import Joining
from diptych_gateway.keeping.room import KeepingRoom
from diptych_gateway.responses.serving import Responses
from diptych_gateway.responses.turns import Turns


def responses_room(through: AdmissionRoom, keeping: KeepingRoom, joining: Joining) -> Responses:
    """The endpoints, and the turns behind them; requests go `through` admission."""
    turns = Turns(
        generations=through.generations,
        models=through.models,
        archive=keeping.archive,
        resumption=keeping.resumption,
        joining=joining,
    )
    return Responses(
        admission=through.admission,
        turns=turns,
        records=keeping.records,
        intake=through.intake,
    )
