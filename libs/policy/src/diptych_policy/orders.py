"""Which orders count: whether this sender may give this order, to me, now, for the first time.

Whether it is really the sender's is verified before (`chassis.orders`). Then, in this order:

1. Its subject is mine: what was said to another is not for me.
2. The sender's role has the right to give it.
3. It was issued already, has not expired, and was never meant to hold longer than `MAX_VALID_MS`.
4. It is newer than what I have obeyed. Where one leads (`Rule.led`), epochs order all of them: a
   governor that was only frozen cannot undo what its successor ordered, and a restarted one takes
   the lead at a higher revision. Elsewhere each sender and epoch counts by itself.

What was obeyed is remembered for `MAX_VALID_MS`: by then every older order has expired. So a bus
that lost its store, and counts revisions from one again, is obeyed again a minute later.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from diptych_contracts.control import ForgetTenant, Scale
from diptych_contracts.ids import Incarnation
from diptych_contracts.orders import Order
from diptych_contracts.power import PowerSetPoint
from diptych_contracts.wire import Message

MAX_VALID_MS = 60_000
SKEW_MS = 2_000
"""How far two members' ideas of the bus's clock may differ."""


class Refusal(StrEnum):
    """Why an order is not obeyed."""

    UNREADABLE = "unreadable"
    UNSIGNED = "unsigned"
    FORGED = "forged"
    """The signature is not the sender's, or the sender is nobody (any more)."""
    FOREIGN = "foreign"
    """It was said to another."""
    FORBIDDEN = "forbidden"
    """The sender's role has no right to give it."""
    EXPIRED = "expired"
    EARLY = "early"
    """It is of the future."""
    TOO_LONG = "too_long"
    """It wants to be obeyed for longer than an order may."""
    OLD_EPOCH = "old_epoch"
    """Somebody else leads by now."""
    REPLAYED = "replayed"
    """It was obeyed already, or a newer one was."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Who may give an order."""

    roles: frozenset[str]
    led: bool
    """Whether one sender at a time leads, by its epoch."""


RULES: Mapping[type[Message], Rule] = {
    PowerSetPoint: Rule(frozenset({"power-governor"}), led=True),
    Scale: Rule(frozenset({"operator"}), led=False),
    ForgetTenant: Rule(frozenset({"operator"}), led=False),
}
"""Every order there is. What is not here is none, whoever signs it."""


@dataclass(slots=True)
class _Obeyed:
    epoch: int
    sequence: int
    unix_ms: int


class Obedience:
    """What one process has obeyed on one subject.

    Args:
        subject: Where it is told.
    """

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._obeyed: dict[tuple[type[Message], Incarnation | None, int], _Obeyed] = {}

    def judge(self, order: Order, kind: type[Message], *, unix_ms: int) -> Refusal | None:
        """Whether `order` (of a message of type `kind`) is to be obeyed; if so it is remembered.

        Args:
            order: What its sender really said.
            kind: The type of its body.
            unix_ms: The bus's clock, now.
        """
        rule = RULES.get(kind)
        if order.subject != self._subject:
            return Refusal.FOREIGN
        if rule is None or order.role not in rule.roles:
            return Refusal.FORBIDDEN
        return _untimely(order, unix_ms) or self._repeated(order, kind, rule, unix_ms=unix_ms)

    def _repeated(
        self, order: Order, kind: type[Message], rule: Rule, *, unix_ms: int
    ) -> Refusal | None:
        self._forget(unix_ms)
        key = (kind, None, 0) if rule.led else (kind, order.sender, order.epoch)
        last = self._obeyed.get(key)
        if last is not None and order.epoch < last.epoch:
            return Refusal.OLD_EPOCH
        if last is not None and order.epoch == last.epoch and order.sequence <= last.sequence:
            return Refusal.REPLAYED
        self._obeyed[key] = _Obeyed(order.epoch, order.sequence, unix_ms)
        return None

    def _forget(self, unix_ms: int) -> None:
        over = [
            key
            for key, obeyed in self._obeyed.items()
            if unix_ms - obeyed.unix_ms > MAX_VALID_MS + 2 * SKEW_MS
        ]
        for key in over:
            del self._obeyed[key]


def _untimely(order: Order, unix_ms: int) -> Refusal | None:
    if order.expires_unix_ms - order.issued_unix_ms > MAX_VALID_MS:
        return Refusal.TOO_LONG
    if order.issued_unix_ms > unix_ms + SKEW_MS:
        return Refusal.EARLY
    if unix_ms > order.expires_unix_ms + SKEW_MS:
        return Refusal.EXPIRED
    return None
