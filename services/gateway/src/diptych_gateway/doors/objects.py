"""Small answers: models and health."""

import msgspec

from diptych_contracts.cards import ModelCard


class ModelObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str
    context_length: int
    """An extension: prompt and answer together, in tokens."""


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelObject]


class Health(msgspec.Struct):
    ok: bool
    reasons: list[str]


def model_object(card: ModelCard) -> ModelObject:
    """A model as clients see it."""
    return ModelObject(
        id=card.model,
        created=card.created_unix_s,
        owned_by=card.owner,
        context_length=card.context_tokens,
    )
