"""What a client saw of its request, and whether that is what it was promised.

The answer is checked piece by piece: an answer's text comes in one piece per token that yields
text, each with its place, so a lost, repeated or reordered token shows as such.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from diptych_testkit.chaos.asking import Api, Ask, Leaving


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that one token made showable."""

    place: int
    """Chat: the token's index. Responses: which piece it is. Both start at 0."""
    text: str


class Outcome(StrEnum):
    """How a request ended, as its client saw it."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    """Its client left or had it cancelled."""
    FAILED = "failed"
    """Its stream ended with an error that says why."""
    BROKEN = "broken off"
    """The connection ended without a word and nothing can be resumed."""
    REFUSED = "refused"
    """It was not accepted, and the client was told."""
    HUNG = "hung"
    """No terminal event came in time."""


@dataclass(slots=True)
class Told:
    """One request and everything its client was told."""

    ask: Ask
    began_s: float
    gateway: int = 0
    """Which replica it was sent to."""
    request_id: str = ""
    pieces: list[Piece] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    """When each piece came."""
    ended_s: float = 0.0
    outcome: Outcome = Outcome.HUNG
    detail: str = ""
    finish: str = ""
    """`stop` or `length`, if it finished."""
    ends: int = 0
    """Terminal events seen."""
    resumed: int = 0

    @property
    def resumable(self) -> bool:
        """Whether its client could come back for the rest."""
        return self.ask.api is Api.RESPONSES and bool(self.request_id)

    def say(self, piece: Piece, now_s: float) -> None:
        """A piece of text came."""
        self.pieces.append(piece)
        self.times_s.append(now_s)


@dataclass(frozen=True, slots=True)
class Expected:
    """The undisturbed answer."""

    pieces: tuple[Piece, ...]
    finish: str


@dataclass(frozen=True, slots=True)
class Damage:
    """Tokens that are not as they should be."""

    lost: int = 0
    repeated: int = 0
    reordered: int = 0
    changed: int = 0

    def __add__(self, other: "Damage") -> "Damage":
        return Damage(
            self.lost + other.lost,
            self.repeated + other.repeated,
            self.reordered + other.reordered,
            self.changed + other.changed,
        )

    def __bool__(self) -> bool:
        return self != NONE


NONE = Damage()


def compare(seen: Sequence[Piece], expected: Sequence[Piece], *, complete: bool) -> Damage:
    """What is wrong with `seen`; one that is not complete may end anywhere."""
    texts = {piece.place: piece.text for piece in expected}
    known: set[int] = set()
    last = -1
    lost = repeated = reordered = changed = 0
    for piece in seen:
        if piece.place in known:
            repeated += 1
            continue
        known.add(piece.place)
        reordered += piece.place < last
        changed += texts.get(piece.place) != piece.text
        last = max(last, piece.place)
    lost = sum(place not in known and (complete or place < last) for place in texts)
    return Damage(lost, repeated, reordered, changed)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of one request."""

    told: Told
    damage: Damage
    broken: tuple[str, ...]
    """The promises that were not kept."""


def judge(told: Told, expected: Expected, *, gateway_struck: bool) -> Verdict:
    """Whether a request was served as promised.

    Args:
        told: What its client saw.
        expected: The undisturbed answer.
        gateway_struck: Whether its gateway died or was frozen while it ran: without resume intent
            it may be cancelled then, or break off.
    """
    complete = told.outcome is Outcome.FINISHED
    damage = compare(told.pieces, expected.pieces, complete=complete)
    broken = list(_broken(told, expected, gateway_struck=gateway_struck))
    broken += [f"{name} tokens: {count}" for name, count in _counts(damage) if count]
    return Verdict(told, damage, tuple(broken))


def _counts(damage: Damage) -> Iterable[tuple[str, int]]:
    for name in ("lost", "repeated", "reordered", "changed"):
        yield name, getattr(damage, name)


def _broken(told: Told, expected: Expected, *, gateway_struck: bool) -> Iterable[str]:
    if told.ends > 1:
        yield f"{told.ends} terminal events"
    excused = gateway_struck and not told.ask.resume
    match told.outcome:
        case Outcome.HUNG:
            yield f"no terminal event: {told.detail}"
        case Outcome.FAILED if not excused:
            yield f"failed: {told.detail}"
        case Outcome.BROKEN if told.resumable or not gateway_struck:
            yield f"broken off: {told.detail}"
        case Outcome.CANCELLED if told.ask.leaving is Leaving.NEVER:
            yield f"cancelled, though its client stayed: {told.detail}"
        case Outcome.FINISHED if told.finish != expected.finish:
            yield f"ended with {told.finish!r} instead of {expected.finish!r}"
