"""When to start, restart and stop the processes of a stack. Pure: facts in, orders out.

    waiting ──(its turn)──▶ starting ──(ready)──▶ ready
       ▲                        │                   │
       │                    (exited)            (exited)
       └──(back-off over)── resting ◀───────────────┘
    any ──(stop)──▶ stopping ──(exited)──▶ stopped
    any ──(fewer wanted)──▶ leaving ──(exited)──▶ forgotten

Children come in stages: a stage's turn is when every child of the stages before it is ready, or has
been (a restart later on does not take the others down). Stopping goes the other way round, a
stage at a time: ask, and after `KILL_AFTER_S` kill.

Each service has as many children as are wanted; how many that is may change while they run. The
newest leave first: they are asked to drain, for which they have `KILL_LEAVING_AFTER_S`.

A child that dies is started again after a pause that doubles from 0.5 s to 10 s, and is forgiven
after 30 s of being ready. The whole stack stops when a child says that its settings are wrong (exit
code 2), or dies `HOPELESS_EXITS` times without having been ready once. A child that came later is
then given up instead: the others serve without it.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import assert_never

from diptych_cli.orders import (
    Begun,
    ChildExited,
    ChildReady,
    Effect,
    Event,
    Finish,
    Interrupt,
    Kill,
    Start,
    StopAsked,
    TellAllReady,
    TellExit,
    TellGivenUp,
    TellLeft,
    TellReady,
    TellScaled,
    Terminate,
    TimePassed,
    Wanted,
)

KILL_AFTER_S = 10.0
KILL_LEAVING_AFTER_S = 75.0
"""Longer than a service's own drain and its cut-off."""
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
    LEAVING = auto()
    STOPPING = auto()
    STOPPED = auto()


def replica(service: str, number: int) -> str:
    """The name of a service's child; they are numbered from 1."""
    return service if number == 1 else f"{service}-{number}"


@dataclass(slots=True)
class _Child:
    name: str
    service: str
    stage: int
    late: bool = False
    """Whether it came after the beginning: nobody's turn depends on it."""
    state: State = State.WAITING
    since_s: float = 0.0
    exits: int = 0
    ever_ready: bool = False

    def become(self, state: State, now_s: float) -> None:
        self.state = state
        self.since_s = now_s

    @property
    def running(self) -> bool:
        return self.state in (State.STARTING, State.READY, State.LEAVING, State.STOPPING)

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
        if self.state is State.LEAVING:
            return self.since_s + KILL_LEAVING_AFTER_S
        return None


@dataclass(slots=True)
class Supervisor:
    """The state of one stack.

    Args:
        stages: Services, in the order they are started.
        counts: How many children of a service are wanted; of those not named, one.
    """

    stages: tuple[tuple[str, ...], ...]
    counts: Mapping[str, int] = field(default_factory=dict)
    log: deque[Event] = field(default_factory=lambda: deque(maxlen=_LOG_LENGTH))
    _children: dict[str, _Child] = field(default_factory=dict)
    """By name, in the order they came."""
    _scaling: dict[str, int] = field(default_factory=dict)
    """Services on their way to what is wanted; how many children were given up on that way."""
    _begun_s: float = 0.0
    _told: bool = False
    _stopping: bool = False
    _exit_code: int = 0

    def __post_init__(self) -> None:
        for stage in self.stages:
            for service in stage:
                for _ in range(self.counts.get(service, 1)):
                    self._add(service, late=False)

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

    @property
    def stopping(self) -> bool:
        """Whether the stack is on its way out."""
        return self._stopping

    def state(self, name: str) -> State:
        """Where a child is."""
        return self._children[name].state

    def service(self, name: str) -> str:
        """What a child is one of."""
        return self._children[name].service

    def names(self) -> tuple[str, ...]:
        """Everybody, in the order they came."""
        return tuple(self._children)

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
            case Wanted(service, wanted):
                return self._scale(service, wanted, now_s)
            case _:
                assert_never(event)

    def check(self) -> None:
        """Raise if a child runs before its turn."""
        for child in self._children.values():
            if child.state in (State.STARTING, State.READY) and not self._has_turn(child):
                raise AssertionError(f"{child.name} runs before its turn")
        for service in self._scaling:
            if self._settled(service):
                raise AssertionError(f"{service} is as wanted and nobody was told")

    def _add(self, service: str, *, late: bool) -> None:
        numbers = (n for n in count(1) if replica(service, n) not in self._children)
        name = replica(service, next(numbers))
        stage = next(n for n, services in enumerate(self.stages) if service in services)
        self._children[name] = _Child(name=name, service=service, stage=stage, late=late)

    def _of(self, service: str) -> list[_Child]:
        return [child for child in self._children.values() if child.service == service]

    def _has_turn(self, child: _Child) -> bool:
        earlier = (c for c in self._children.values() if c.stage < child.stage and not c.late)
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
        return effects + self._proceed(now_s) + self._tell(now_s)

    def _tell(self, now_s: float) -> list[Effect]:
        """Tell of what has become complete."""
        effects: list[Effect] = []
        if not self._told and all(c.state is State.READY for c in self._children.values()):
            self._told = True
            effects.append(TellAllReady(now_s - self._begun_s))
        for service in [s for s in self._scaling if self._settled(s)]:
            running = tuple(child.name for child in self._of(service))
            effects.append(TellScaled(service, running, self._scaling.pop(service)))
        return effects

    def _settled(self, service: str) -> bool:
        return all(child.state is State.READY for child in self._of(service))

    def _exited(self, child: _Child, code: int, now_s: float) -> list[Effect]:
        if self._stopping:
            child.become(State.STOPPED, now_s)
            return self._stop_next(now_s)
        if child.state is State.LEAVING:
            del self._children[child.name]
            return [
                TellLeft(child.name, now_s - child.since_s),
                *self._proceed(now_s),
                *self._tell(now_s),
            ]
        healthy = child.state is State.READY and now_s - child.since_s >= FORGIVEN_AFTER_S
        child.exits = 1 if healthy else child.exits + 1
        if code == BAD_SETTINGS or self._hopeless(child):
            if child.late:
                return self._give_up(child, code, now_s)
            child.become(State.STOPPED, now_s)
            self._exit_code = 1
            return [TellExit(child.name, code, None), *self._stop(now_s)]
        child.become(State.RESTING, now_s)
        return [TellExit(child.name, code, child.pause_s)]

    def _hopeless(self, child: _Child) -> bool:
        return not child.ever_ready and child.exits >= HOPELESS_EXITS

    def _give_up(self, child: _Child, code: int, now_s: float) -> list[Effect]:
        del self._children[child.name]
        if child.service in self._scaling:
            self._scaling[child.service] += 1
        return [TellGivenUp(child.name, code), *self._tell(now_s)]

    def _scale(self, service: str, wanted: int, now_s: float) -> list[Effect]:
        if self._stopping:
            return []
        self._scaling[service] = 0
        staying = [child for child in self._of(service) if child.state is not State.LEAVING]
        effects: list[Effect] = []
        for child in reversed(staying[wanted:]):
            if child.running:
                child.become(State.LEAVING, now_s)
                effects.append(Terminate(child.name))
            else:
                del self._children[child.name]
        for _ in range(wanted - len(staying)):
            self._add(service, late=True)
        return effects + self._proceed(now_s) + self._tell(now_s)

    def _stop(self, now_s: float) -> list[Effect]:
        self._stopping = True
        self._scaling.clear()
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
                serves = child.state is State.READY
                child.become(State.STOPPING, now_s)
                effects.append(Interrupt(child.name) if serves else Terminate(child.name))
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
                child.since_s = now_s
                effects.append(Kill(child.name))
        return effects
