"""Who is alive, judged by beats.

Silence counts only while the observer hears *itself*: its own beat, published to and received back
from the bus, must be fresh. With the bus frozen, or the observer itself just thawed, everybody
would look dead at once and every request would be prefilled again. So:

- while the own beat is stale, or a tick came late, judging is suspended: nobody is lost, and
  `judged_s` (the clock that deadlines use) stands still;
- when it resumes, every member's silence restarts from zero with a grace on top: others may need
  longer to come back to the bus;
- unless it was a hiccup, short and without a loss of the connection, as a busy machine has many:
  then silence only stands still meanwhile, or each would put off every death by the grace.

A member may say that its next beat will take longer, and is believed within a limit. One that was
lost and beats again was frozen, or was never dead: `MemberFound` says that it `returned`.
"""

from collections import OrderedDict
from dataclasses import dataclass

from diptych_contracts.ids import Incarnation


@dataclass(frozen=True, slots=True)
class MemberFound:
    """A member beats for the first time, or again after it was lost."""

    member: Incarnation
    returned: bool = False
    """Whether it was lost before."""


@dataclass(frozen=True, slots=True)
class MemberLost:
    """A member has been silent for `silent_s`."""

    member: Incarnation
    silent_s: float


_REMEMBERED = 1024


@dataclass(slots=True)
class _Suspension:
    """Judging does not go on."""

    since_s: float
    judging_since_s: float
    cut: bool = False
    """Whether the connection to the bus was lost."""


class Liveness:
    """Turns beats and ticks into `MemberFound` and `MemberLost`.

    Args:
        me: The observer, whose own beats tell whether it may judge.
        silence_s: Silence after which a member is lost; beats come every 0.1 s.
        own_fresh_s: How old the observer's own beat may be.
        grace_s: Added to every member's patience after judging was suspended.
        hiccup_s: The longest suspension that needs no grace.
        max_patience_s: The longest silence that a member may announce.
    """

    def __init__(
        self,
        me: Incarnation,
        *,
        silence_s: float = 1.0,
        own_fresh_s: float = 0.3,
        grace_s: float = 2.0,
        hiccup_s: float = 0.5,
        max_patience_s: float = 30.0,
    ) -> None:
        self._me = me
        self._silence_s = silence_s
        self._own_fresh_s = own_fresh_s
        self._grace_s = grace_s
        self._hiccup_s = hiccup_s
        self._max_patience_s = max_patience_s
        self._own_seen_s: float | None = None
        self._patient_from_s: dict[Incarnation, float] = {}
        self._announced: set[Incarnation] = set()
        """Members whose silence was announced."""
        self._mourned: OrderedDict[Incarnation, None] = OrderedDict()
        """Members that were lost, the last of them."""
        self._left_s: dict[Incarnation, float] = {}
        self._starting_s: dict[Incarnation, float] = {}
        """Members that beat and are not ready yet, by their last beat."""
        self._judging_since_s: float | None = None
        self._suspension: _Suspension | None = None
        self._last_tick_s: float | None = None
        self.judged_s = 0.0

    @property
    def judging(self) -> bool:
        """Whether silence counts at the moment."""
        return self._judging_since_s is not None

    def alive(self, member: Incarnation) -> bool:
        """Whether `member` has beaten and was not lost since."""
        return member in self._patient_from_s

    def absent(self, member: Incarnation, *, now_s: float) -> bool:
        """Whether `member` would have been heard by now if it were alive.

        A gateway may have stored its first request before the first beat that says it is ready.
        """
        since_s = self._judging_since_s
        return (
            since_s is not None
            and member not in self._patient_from_s
            and member not in self._starting_s
            and now_s - since_s > self._silence_s + self._grace_s
        )

    def beat(
        self, member: Incarnation, *, now_s: float, ready: bool = True, patience_s: float = 0.0
    ) -> list[MemberFound]:
        """A beat of `member` has arrived; its next one may take `patience_s` longer than usual.

        A member counts from its first ready beat on: before that it holds nothing that could be
        lost, and loading weights can starve its beats.
        """
        if member == self._me:
            self._own_seen_s = now_s
        found = member not in self._patient_from_s
        if found and not ready:
            self._starting_s[member] = now_s
            return []
        self._starting_s.pop(member, None)
        self._left_s.pop(member, None)
        self._heard(member, now_s, min(patience_s, self._max_patience_s))
        if not found:
            return []
        returned = member in self._mourned
        self._mourned.pop(member, None)
        return [MemberFound(member, returned)]

    def _heard(self, member: Incarnation, now_s: float, patience_s: float) -> None:
        until_s = now_s + patience_s
        if member in self._announced:  # what was announced before is over
            self._announced.discard(member)
        else:
            until_s = max(until_s, self._patient_from_s.get(member, now_s))
        if patience_s > 0:
            self._announced.add(member)
        self._patient_from_s[member] = until_s

    def left(self, member: Incarnation, *, now_s: float) -> None:
        """A member said that it goes: its silence is no loss."""
        self._starting_s.pop(member, None)
        self._announced.discard(member)
        if self._patient_from_s.pop(member, None) is not None:
            self._left_s[member] = now_s

    def departed(self, *, now_s: float) -> list[Incarnation]:
        """Those that said they go and are silent since: what they still held is lost with them.

        A worker whose registration has only expired beats on, and is found again.
        """
        gone = [m for m, left_s in self._left_s.items() if now_s - left_s > self._silence_s]
        for member in gone:
            del self._left_s[member]
        return gone

    def tick(self, *, now_s: float, connected: bool = True) -> list[MemberLost]:
        """Time has passed; call at least every `own_fresh_s`.

        Args:
            now_s: The observer's clock.
            connected: Whether the observer's own connection to the bus stands.
        """
        last_s, self._last_tick_s = self._last_tick_s, now_s
        own_fresh = self._own_seen_s is not None and now_s - self._own_seen_s <= self._own_fresh_s
        slept = last_s is not None and now_s - last_s > 2 * self._own_fresh_s
        if not own_fresh or slept or not connected:
            self._suspend(now_s if last_s is None else last_s, cut=not connected)
            return []
        if self._judging_since_s is None:
            self._resume(now_s)
        elif last_s is not None:
            self.judged_s += now_s - last_s
        return self._lost(now_s)

    def _suspend(self, since_s: float, *, cut: bool) -> None:
        if self._judging_since_s is not None:
            self._suspension = _Suspension(since_s, self._judging_since_s)
            self._judging_since_s = None
        if self._suspension is not None:
            self._suspension.cut |= cut

    def _resume(self, now_s: float) -> None:
        suspension, self._suspension = self._suspension, None
        if suspension is None or suspension.cut or now_s - suspension.since_s > self._hiccup_s:
            self._judging_since_s = now_s
            for member, patient_from_s in self._patient_from_s.items():
                self._patient_from_s[member] = max(patient_from_s, now_s + self._grace_s)
            return
        stood_s = now_s - suspension.since_s
        self._judging_since_s = suspension.judging_since_s + stood_s
        for member, patient_from_s in self._patient_from_s.items():
            shifted_s = min(patient_from_s + stood_s, now_s)
            self._patient_from_s[member] = max(patient_from_s, shifted_s)

    def _lost(self, now_s: float) -> list[MemberLost]:
        patience_s = self._silence_s + self._grace_s
        for member, seen_s in list(self._starting_s.items()):
            if now_s - seen_s > patience_s:
                del self._starting_s[member]
        lost = [
            MemberLost(member, now_s - seen_s)
            for member, seen_s in self._patient_from_s.items()
            if now_s - seen_s > self._silence_s
        ]
        for loss in lost:
            del self._patient_from_s[loss.member]
            self._announced.discard(loss.member)
            self._mourned[loss.member] = None
            if len(self._mourned) > _REMEMBERED:
                self._mourned.popitem(last=False)
        return lost
