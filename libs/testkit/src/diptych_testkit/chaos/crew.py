"""The processes of the stack under chaos: struck, started again, and gone at the end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from diptych_kvlink.lockfile import sweep_leftovers
from diptych_testkit.chaos.plan import Fault, Kind, Target
from diptych_testkit.live_stack import LiveStack, Process
from diptych_testkit.ports import free_port

REPLICAS = {
    Target.PREFILL: 2,
    Target.DECODE: 2,
    Target.SCHEDULER: 2,
    Target.GOVERNOR: 1,
    Target.GATEWAY: 2,
}
SEATS = 24
"""Of a worker's engine: one decode worker can take all streams."""
RUNG_S = 10.0
"""How long processes may take to leave at the end."""
_BURNERS = 2 * (os.cpu_count() or 1)
_BURN = """
import sys, time
end_s = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end_s:
    pass
"""
"""It ends by itself, whatever becomes of who started it."""


@dataclass(slots=True)
class Replica:
    """One place in the stack, filled by one process after another."""

    target: Target
    number: int
    settings: dict[str, str]
    process: Process
    incarnation: str = ""
    down: bool = False
    """Whether it was killed on purpose and has no successor yet."""


@dataclass(slots=True)
class Crash:
    """A process that ended by itself."""

    who: str
    code: int
    last_words: str


@dataclass(slots=True)
class Crew:
    """Every process."""

    stack: LiveStack
    replicas: list[Replica] = field(default_factory=list)
    crashes: list[Crash] = field(default_factory=list)
    _burning: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    async def start(self) -> None:
        """Start every service and wait until they serve."""
        for target, count in REPLICAS.items():
            for number in range(count):
                settings = _settings(self.stack, target, number)
                process = self.stack.start(target, **settings)
                self.replicas.append(Replica(target, number, settings, process))
        for replica in self.replicas:
            await self._until_ready(replica)
        await asyncio.to_thread(self.stack.wait_for_model)

    @property
    def gateway_urls(self) -> list[str]:
        """Where clients go."""
        gateways = self.of(Target.GATEWAY)
        return [f"http://127.0.0.1:{replica.settings['PORT']}/v1" for replica in gateways]

    def of(self, target: Target) -> list[Replica]:
        """The replicas of a service."""
        return [replica for replica in self.replicas if replica.target is target]

    def victim(self, fault: Fault) -> Replica | None:
        """Whom a fault strikes; None if it is no service."""
        replicas = self.of(fault.target)
        return replicas[fault.replica % len(replicas)] if replicas else None

    def scheduler_logs(self) -> Iterator[Path]:
        """The log of every scheduler that ever ran."""
        return (p.log for p in self.stack.processes if p.service == Target.SCHEDULER)

    async def strike(self, fault: Fault) -> None:
        """Do it, and undo it after `for_s`; returns when the victim serves again."""
        victim = self.victim(fault)
        nats = self.stack.nats
        match fault.kind, fault.target:
            case Kind.BURN, _:
                await self._burn(fault.for_s)
            case Kind.KILL, Target.NATS:
                await nats.kill()
                await asyncio.sleep(fault.for_s)
                await nats.start()
            case Kind.FREEZE, Target.NATS:
                nats.freeze()
                await asyncio.sleep(fault.for_s)
                nats.thaw()
            case Kind.KILL, _ if victim is not None:
                victim.down = True
                victim.process.kill()
                await asyncio.sleep(fault.for_s)
                await self._replace(victim)
            case Kind.FREEZE, _ if victim is not None:
                victim.process.signal(signal.SIGSTOP)
                await asyncio.sleep(fault.for_s)
                victim.process.signal(signal.SIGCONT)
            case _:
                raise AssertionError(f"nobody to strike: {fault}")

    async def look_after(self) -> None:
        """Note and replace processes that end by themselves, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            for replica in self.replicas:
                code = replica.process.popen.poll()
                if code is not None and not replica.down:
                    who = f"{replica.target} {replica.incarnation}"
                    self.crashes.append(Crash(who, code, replica.process.last_words()))
                    replica.down = True
                    try:
                        await self._replace(replica)
                    except AssertionError as err:
                        self.crashes.append(Crash(f"the next {replica.target}", 0, str(err)))

    async def _replace(self, replica: Replica) -> None:
        # In this thread: a tethered process dies with the thread that started it.
        replica.process = self.stack.start(replica.target, **replica.settings)
        replica.down = False
        await self._until_ready(replica)

    async def _until_ready(self, replica: Replica) -> None:
        await asyncio.to_thread(replica.process.wait_ready)
        replica.incarnation = await asyncio.to_thread(lambda: replica.process.incarnation)

    async def _burn(self, for_s: float) -> None:
        self._ignite(for_s)
        try:
            await asyncio.sleep(for_s)
        finally:
            self._douse()

    def _ignite(self, for_s: float) -> None:
        command = (sys.executable, "-c", _BURN, str(for_s))
        self._burning = [subprocess.Popen(command) for _ in range(_BURNERS)]

    def _douse(self) -> None:
        while self._burning:
            burner = self._burning.pop()
            burner.kill()
            burner.wait()

    def close(self) -> None:
        """End everybody and leave nothing behind; blocks for `RUNG_S` at most."""
        self._douse()
        popens = [process.popen for process in self.stack.processes]
        for popen in popens:
            if popen.poll() is None:
                popen.send_signal(signal.SIGCONT)
                popen.terminate()
        give_up_s = time.monotonic() + RUNG_S
        for popen in popens:
            try:
                popen.wait(max(0.01, give_up_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                popen.kill()
                popen.wait()
        self.stack.nats.stop_blocking()
        sweep_leftovers()


def _settings(stack: LiveStack, target: Target, number: int) -> dict[str, str]:
    if target in (Target.PREFILL, Target.DECODE):
        return {"MAX_SEQUENCES": str(SEATS)}
    if target is Target.GATEWAY:
        return {"PORT": str(stack.port if number == 0 else free_port())}
    return {}
