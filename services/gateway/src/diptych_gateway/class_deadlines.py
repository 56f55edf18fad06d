"""How long each stage of a request may take, by its class.

A setting has one value for every class, or three: interactive, standard, batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from diptych_contracts.requests import Deadlines, PriorityClass
from diptych_contracts.streams import TOTAL_DEADLINE_S

Seconds = tuple[float, ...]
ByClass = Mapping[PriorityClass, float]
_CLASSES = tuple(PriorityClass)


@dataclass(frozen=True, slots=True)
class ClassDeadlines:
    """All deadlines a gateway gives."""

    accept_s: ByClass
    """Judged here."""
    of: Mapping[PriorityClass, Deadlines]
    """Judged by schedulers and workers; they travel in the request."""


def by_class(name: str, values: Seconds) -> ByClass:
    """`values` of the setting `name`, spread over the classes.

    Raises:
        ValueError: neither one nor three, or one that is no time.
    """
    if len(values) not in (1, len(_CLASSES)):
        expected = ", ".join(_CLASSES)
        raise ValueError(f"{name}: expected one value or three ({expected}), got {len(values)}")
    if min(values) <= 0:
        raise ValueError(f"{name}: expected more than 0 s, got {min(values):g}")
    spread = values * len(_CLASSES) if len(values) == 1 else values
    return dict(zip(_CLASSES, spread, strict=True))


def class_deadlines(
    *,
    accept_s: Seconds,
    first_token_s: Seconds,
    inter_token_s: Seconds,
    transfer_s: Seconds,
    total_s: Seconds,
) -> ClassDeadlines:
    """The deadlines that these settings make.

    Raises:
        ValueError: names the setting.
    """
    first, inter = (
        by_class("FIRST_TOKEN_S", first_token_s),
        by_class("INTER_TOKEN_S", inter_token_s),
    )
    transfer, total = by_class("TRANSFER_S", transfer_s), by_class("TOTAL_S", total_s)
    if max(total_s) > TOTAL_DEADLINE_S:
        raise ValueError(
            f"TOTAL_S: expected at most {TOTAL_DEADLINE_S:g} s, for which requests and their "
            f"tokens are stored, got {max(total_s):g}"
        )
    return ClassDeadlines(
        accept_s=by_class("ACCEPT_S", accept_s),
        of={
            c: Deadlines(
                first_token_s=first[c],
                inter_token_s=inter[c],
                transfer_s=transfer[c],
                total_s=total[c],
            )
            for c in _CLASSES
        },
    )
