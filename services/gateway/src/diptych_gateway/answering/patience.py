"""How long a stream may stay silent: pure counting, moved by one ticker for all streams."""

from dataclasses import dataclass, replace
from enum import Enum, auto
from math import inf


class Due(Enum):
    """What a tick asks for."""

    NOTHING = auto()
    KEEP_ALIVE = auto()
    EXPIRE = auto()
    """Nobody spoke of the request for too long, or its whole time is up: mark it as ending."""
    GIVE_UP = auto()
    """The end that was asked for did not come either: tell the client without it."""
    DISCONNECT = auto()
    """The client reads nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """In seconds."""

    silence_s: float
    total_s: float
    keep_alive_s: float
    slow_reader_s: float
    last_word_s: float = 2.0
    """How long the journal has to say the end that `EXPIRE` asked for."""


@dataclass(slots=True)
class Patience:
    """The timers of one stream."""

    limits: Limits
    age_s: float = 0.0
    silent_s: float = 0.0
    """Since the journal last spoke of the request; stands still while the bus is away."""
    quiet_s: float = 0.0
    """Since the client was last sent something."""
    blocked_s: float | None = None
    """How long the present send has been waiting for the client; None while nothing waits."""

    expired_s: float | None = None
    """Since `EXPIRE` was due."""

    def heard(self) -> None:
        """The journal spoke of the request."""
        self.silent_s = 0.0

    def ended(self) -> None:
        """The journal has said all: only the client can take too long now."""
        self.limits = replace(self.limits, silence_s=inf, total_s=inf)

    def sending(self) -> None:
        """A send began."""
        self.blocked_s = 0.0

    def sent(self) -> None:
        """It is done."""
        self.blocked_s = None
        self.quiet_s = 0.0

    def tick(self, elapsed_s: float, *, connected: bool) -> Due:
        """Count `elapsed_s` and say what is due."""
        self.age_s += elapsed_s
        self.quiet_s += elapsed_s
        if connected:
            self.silent_s += elapsed_s
        if self.blocked_s is not None:
            self.blocked_s += elapsed_s
            return Due.DISCONNECT if self.blocked_s > self.limits.slow_reader_s else Due.NOTHING
        if self.expired_s is not None:
            self.expired_s += elapsed_s
            return Due.GIVE_UP if self.expired_s > self.limits.last_word_s else Due.NOTHING
        if self.silent_s > self.limits.silence_s or self.age_s > self.limits.total_s:
            self.expired_s = 0.0
            return Due.EXPIRE
        if self.quiet_s >= self.limits.keep_alive_s:
            return Due.KEEP_ALIVE
        return Due.NOTHING
