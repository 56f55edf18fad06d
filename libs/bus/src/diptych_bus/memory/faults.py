"""Faults a test asks for, drawn from its own seed."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

HEALED_S = 0.25
"""A follower looks for what it missed after so long a silence."""


def _every(_subject: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Faults:
    """How often core messages and PubAcks go wrong; fractions in [0, 1].

    Delayed messages overtake nobody but are overtaken: that is the reordering. A lost PubAck leaves
    the message stored: `append` sends it again, `store` and `record` raise `BusAway`. What readers
    are promised in order is only late: `live.<gateway>` (followers) and `$KV.<bucket>` (watches,
    whose writes may lose their answers too). `$JS.ACK.<stream>` are the pullers' acknowledgements.
    """

    rng: Random
    drop_frac: float = 0.0
    duplicate_frac: float = 0.0
    delay_frac: float = 0.0
    delay_s: float = 0.05
    """The longest delay."""
    lost_ack_frac: float = 0.0
    affects: Callable[[str], bool] = _every
    """Which subjects."""

    def copies(self, subject: str) -> tuple[float, ...]:
        """The delay of each copy of a core message that arrives; empty if it is dropped."""
        if not self.affects(subject):
            return (0.0,)
        if self._strikes(self.drop_frac):
            return ()
        copies = 2 if self._strikes(self.duplicate_frac) else 1
        return tuple(self._delay_s() for _ in range(copies))

    def lag_s(self, subject: str) -> float:
        """How late a reader hears of something it will hear of for certain."""
        copies = self.copies(subject)
        return copies[0] if copies else HEALED_S

    def loses_ack(self, subject: str) -> bool:
        """Whether the answer to a stored message is lost."""
        return self.affects(subject) and self._strikes(self.lost_ack_frac)

    def _delay_s(self) -> float:
        return self.rng.uniform(0.0, self.delay_s) if self._strikes(self.delay_frac) else 0.0

    def _strikes(self, frac: float) -> bool:
        return frac > 0.0 and self.rng.random() < frac
