"""Embeddings and tokens of texts, put together."""

from concurrent.futures import Executor
from dataclasses import dataclass

from diptych_chassis.member import Member
from diptych_gateway.admission.room import AdmissionRoom
from diptych_gateway.texts.embedders import Embedders
from diptych_gateway.texts.embedding import Embeddings
from diptych_gateway.texts.tokenizing import Tokenizing


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsRoom:
    """Both endpoints."""

    embeddings: Embeddings
    tokenizing: Tokenizing


def texts_room(
    member: Member, through: AdmissionRoom, executor: Executor, *, embeddings_s: float
) -> TextsRoom:
    """The room; `embeddings_s` is the longest time for the vectors of one request."""
    models, generations = through.models, through.generations
    return TextsRoom(
        embeddings=Embeddings(
            bus=member.bus,
            admission=through.admission,
            intake=through.intake,
            models=models,
            embedders=Embedders(member.bus, models, member.now_s),
            allowances=generations.allowances,
            renewed=generations.renewed,
            executor=executor,
            now_s=member.now_s,
            timeout_s=embeddings_s,
        ),
        tokenizing=Tokenizing(
            admission=through.admission,
            intake=through.intake,
            models=models,
            executor=executor,
            now_s=member.now_s,
        ),
    )
