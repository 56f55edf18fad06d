"""What the supervisor of a stack is told, and what it orders."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Begun:
    """The supervisor runs."""


@dataclass(frozen=True, slots=True)
class ChildReady:
    """A child serves."""

    name: str


@dataclass(frozen=True, slots=True)
class ChildExited:
    """A child is gone; negative codes are signals."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the stack to end; asking twice kills."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """It is `wake_s` or later."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """So many children of a service are wanted from now on."""

    service: str
    count: int


Event = Begun | ChildReady | ChildExited | StopAsked | TimePassed | Wanted


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a child to finish what it holds and end; asked twice it ends at once."""

    name: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Ask a child to end soon: somebody waits."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a child."""

    name: str


@dataclass(frozen=True, slots=True)
class TellReady:
    """A child became ready after `took_s`."""

    name: str
    took_s: float


@dataclass(frozen=True, slots=True)
class TellAllReady:
    """The stack serves for the first time."""

    took_s: float


@dataclass(frozen=True, slots=True)
class TellExit:
    """A child died; it is started again in `again_in_s`, or never (None)."""

    name: str
    code: int
    again_in_s: float | None


@dataclass(frozen=True, slots=True)
class TellLeft:
    """A child that is wanted no more has ended, `took_s` after it was asked to."""

    name: str
    took_s: float


@dataclass(frozen=True, slots=True)
class TellGivenUp:
    """A child that came later can never serve: one less is wanted."""

    name: str
    code: int


@dataclass(frozen=True, slots=True)
class TellScaled:
    """As many children of a service are ready as are wanted, and nobody else is left of it."""

    service: str
    running: tuple[str, ...]
    given_up: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Nothing runs any more."""

    exit_code: int


Ending = Terminate | Interrupt | Kill
Told = TellReady | TellAllReady | TellExit | TellLeft | TellGivenUp
"""For the user to read."""
Effect = Start | Ending | Told | TellScaled | Finish
