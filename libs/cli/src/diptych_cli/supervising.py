"""When to start, restart and stop the processes of a stack. Pure: facts in, orders out.

    waiting ──(its turn)──▶ starting ──(ready)──▶ ready
       ▲                        │                   │
       │                    (exited)            (exited)
       └──(back-off over)── resting ◀───────────────┘
    any ──(stop)──▶ stopping ──(exited)──▶ stopped

Children come in stages: a stage's turn is when every child of the stages before it is ready, or has
been (a restart later on does not take the others down). Stopping goes the other way round, a
stage at a time: ask, and after `KILL_AFTER_S` kill.

A child that dies is started again after a pause that doubles from 0.5 s to 10 s, and is forgiven
after 30 s of being ready. The whole stack stops when a child says that its settings are wrong (exit
code 2), or dies `HOPELESS_EXITS` times without having been ready once.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import assert_never

KILL_AFTER_S = 10.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
FORGIVEN_AFTER_S = 30.0
HOPELESS_EXITS = 5
BAD_SETTINGS = 2
_LOG_LENGTH = 256


class State(Enum):
    """Where a child is in its life."""

    WAITING = auto()
    STARTING = auto()
    READY = auto()
    RESTING = auto()
    STOPPING = auto()
    STOPPED = auto()


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


Event = Begun | ChildReady | ChildExited | StopAsked | TimePassed


@dataclass(frozen=True, slots=True)
class Start:
    """Start a child."""

    name: str


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a child to end."""

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
class Finish:
    """Nothing runs any more."""

    exit_code: int


Effect = Start | Terminate | Kill | TellReady | TellAllReady | TellExit | Finish


@dataclass(slots=True)
class _Child:
    name: str
    stage: int
    state: State = State.WAITING
    since_s: float = 0.0
    exits: int = 0
    ever_ready: bool = False

    def become(self, state: State, now_s: float) -> None:
        self.state = state
        self.since_s = now_s

    @property
    def running(self) -> bool:
        return self.state in (State.STARTING, State.READY, State.STOPPING)

    @property
    def pause_s(self) -> float:
        return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.exits - 1)))

    @property
    def wake_s(self) -> float | None:
        """When time alone changes something for this child."""
        if self.state is State.RESTING:
            return self.since_s + self.pause_s
        if self.state is State.STOPPING:
            return self.since_s + KILL_AFTER_S
        return None


@dataclass(slots=True)
class Supervisor:
    """The state of one stack.

    Args:
        stages: Names of the children, in the order they are started.
    """

    stages: tuple[tuple[str, ...], ...]
    log: deque[Event] = field(default_factory=lambda: deque(maxlen=_LOG_LENGTH))
    _children: dict[str, _Child] = field(init=False)
    _begun_s: float = 0.0
    _told: bool = False
    _stopping: bool = False
    _exit_code: int = 0

    def __post_init__(self) -> None:
        self._children = {
            name: _Child(name=name, stage=stage)
            for stage, names in enumerate(self.stages)
            for name in names
        }

    @property
    def wake_s(self) -> float | None:
        """When to say `TimePassed`, if nothing else happens before."""
        times = [c.wake_s for c in self._children.values() if c.wake_s is not None]
        return min(times, default=None)

    @property
    def unready(self) -> tuple[str, ...]:
        """Children that have been started and do not serve."""
        states = (State.STARTING, State.RESTING)
        return tuple(c.name for c in self._children.values() if c.state in states)

    def state(self, name: str) -> State:
        """Where a child is."""
        return self._children[name].state

    def handle(self, event: Event, *, now_s: float) -> list[Effect]:
        """What to do about `event`."""
        self.log.append(event)
        match event:
            case Begun():
                self._begun_s = now_s
                return self._proceed(now_s)
            case ChildReady(name):
                return self._ready(self._children[name], now_s)
            case ChildExited(name, code):
                return self._exited(self._children[name], code, now_s)
            case StopAsked():
                return self._kill_all() if self._stopping else self._stop(now_s)
            case TimePassed():
                return self._time_passed(now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise if a child runs before its turn."""
        for child in self._children.values():
            if child.state in (State.STARTING, State.READY) and not self._has_turn(child):
                raise AssertionError(f"{child.name} runs before its turn")

    def _has_turn(self, child: _Child) -> bool:
        earlier = (c for c in self._children.values() if c.stage < child.stage)
        return all(c.ever_ready for c in earlier)

    def _proceed(self, now_s: float) -> list[Effect]:
        """Start whoever waits and has its turn."""
        effects: list[Effect] = []
        for child in self._children.values():
            if child.state is State.WAITING and self._has_turn(child):
                child.become(State.STARTING, now_s)
                effects.append(Start(child.name))
        return effects

    def _ready(self, child: _Child, now_s: float) -> list[Effect]:
        if child.state is not State.STARTING:
            return []
        effects: list[Effect] = [TellReady(child.name, now_s - child.since_s)]
        child.become(State.READY, now_s)
        child.ever_ready = True
        effects += self._proceed(now_s)
        if not self._told and all(c.state is State.READY for c in self._children.values()):
            self._told = True
            effects.append(TellAllReady(now_s - self._begun_s))
        return effects

    def _exited(self, child: _Child, code: int, now_s: float) -> list[Effect]:
        if self._stopping:
            child.become(State.STOPPED, now_s)
            return self._stop_next(now_s)
        healthy = child.state is State.READY and now_s - child.since_s >= FORGIVEN_AFTER_S
        child.exits = 1 if healthy else child.exits + 1
        if code == BAD_SETTINGS or self._hopeless(child):
            child.become(State.STOPPED, now_s)
            self._exit_code = 1
            return [TellExit(child.name, code, None), *self._stop(now_s)]
        child.become(State.RESTING, now_s)
        return [TellExit(child.name, code, child.pause_s)]

    def _hopeless(self, child: _Child) -> bool:
        return not child.ever_ready and child.exits >= HOPELESS_EXITS

    def _stop(self, now_s: float) -> list[Effect]:
        self._stopping = True
        for child in self._children.values():
            if not child.running:
                child.become(State.STOPPED, now_s)
        return self._stop_next(now_s)

    def _stop_next(self, now_s: float) -> list[Effect]:
        """Ask the last stage that still runs to end; none left: finished."""
        left = [c for c in self._children.values() if c.state is not State.STOPPED]
        if not left:
            return [Finish(self._exit_code)]
        last = max(child.stage for child in left)
        effects: list[Effect] = []
        for child in left:
            if child.stage == last and child.state is not State.STOPPING:
                child.become(State.STOPPING, now_s)
                effects.append(Terminate(child.name))
        return effects

    def _kill_all(self) -> list[Effect]:
        return [Kill(c.name) for c in self._children.values() if c.running]

    def _time_passed(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for child in self._children.values():
            if child.wake_s is None or now_s < child.wake_s:
                continue
            if child.state is State.RESTING:
                child.become(State.STARTING, now_s)
                effects.append(Start(child.name))
            else:
                child.become(State.STOPPING, now_s)
                effects.append(Kill(child.name))
        return effects
