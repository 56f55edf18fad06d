"""One run: start the stack, load it, strike it, and see what is left."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from diptych_testkit.chaos.asking import asks, catalogue
from diptych_testkit.chaos.auditing import audit
from diptych_testkit.chaos.checking import Outcome, Told
from diptych_testkit.chaos.clients import LIMIT_S, Clients
from diptych_testkit.chaos.crew import Crew
from diptych_testkit.chaos.options import Options
from diptych_testkit.chaos.pauses import Struck
from diptych_testkit.chaos.plan import Fault, make_plan
from diptych_testkit.chaos.table import Report, broken_promises, lines
from diptych_testkit.chaos.undisturbed import Undisturbed
from diptych_testkit.chaos.watching import Watch
from diptych_testkit.live_stack import MODEL, LiveStack

SETTLING_S = 3.0
"""At least this lies between the end of one fault and the next: one process at a time is what is
promised for. Streams that are still being recovered are waited for."""
_RECOVERY_S = 40.0
_OVERTIME_PER_FAULT_S = 10.0
_WARM_S = 5.0
_REFUSED_PAUSE_S = 0.1
_INTERRUPTED = "the run was interrupted"
_OVERTIME_S = 420.0
"""Beyond the load: start, faults that took longer, the last requests and the audit."""
_CLOSING_S = 60.0


def main(options: Options) -> int:
    """Run; gives the exit code: 0 if every promise was kept."""
    logging.getLogger("diptych.bus").setLevel(logging.ERROR)  # its server is killed on purpose
    print_(f"chaos: seed {options.seed} (make chaos SEED={options.seed} replays its plan)")
    prompts = catalogue()
    undisturbed = Undisturbed(prompts, engine=options.engine)
    print_("chaos: the undisturbed answers …")
    computed = undisturbed.compute()
    print_(f"chaos: … are {'computed' if computed else 'remembered'}")
    with _folder(options) as folder:
        stack = LiveStack(folder, engine=options.engine)
        crew = Crew(stack)
        run = Run(options, crew, undisturbed)
        limit_s = 60 * options.minutes + _OVERTIME_S + _OVERTIME_PER_FAULT_S * run.report.planned
        dead_man = threading.Timer(limit_s + _CLOSING_S, _give_up, (crew,))
        dead_man.daemon = True
        dead_man.start()
        try:
            asyncio.run(run.whole(limit_s))
        except (KeyboardInterrupt, asyncio.CancelledError):
            run.report.broken_off = _INTERRUPTED
        finally:
            crew.close()
            dead_man.cancel()
        for line in lines(run.report):
            print_(line)
        return 1 if broken_promises(run.report) else 0


def print_(line: str) -> None:
    """Say it at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def _folder(options: Options) -> Iterator[Path]:
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        yield options.folder
        return
    with tempfile.TemporaryDirectory(prefix="diptych-chaos-") as name:
        yield Path(name)


def _give_up(crew: Crew) -> None:
    """The event loop itself hangs: leave no process behind."""
    sys.stderr.write("chaos: the run hangs; giving up\n")
    crew.close()
    os._exit(70)


class Run:
    """The moving parts of one run.

    Args:
        options: What is wanted.
        crew: The stack, not started yet.
        undisturbed: What answers should be.
    """

    def __init__(self, options: Options, crew: Crew, undisturbed: Undisturbed) -> None:
        self._options = options
        self._crew = crew
        self._undisturbed = undisturbed
        self._plan = make_plan(options.seed, minutes=options.minutes, faults=options.faults)
        self._told: list[Told] = []
        self._stop = asyncio.Event()
        self._striking = False
        self.report = Report(
            options.seed, 0.0, len(self._plan), options.streams, any_pace=options.any_pace
        )

    async def whole(self, limit_s: float) -> None:
        """Start, load, strike and audit, within `limit_s`; whatever goes wrong is in the report."""
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            async with asyncio.timeout(limit_s):
                await self._crew.start()
                await self._under_load()
        except TimeoutError:
            self.report.broken_off = f"the run was cut off after {limit_s:g} s"
        except Exception as err:
            traceback.print_exc()
            self.report.broken_off = f"the run itself failed: {err!r}"

    async def _under_load(self) -> None:
        watch = await Watch.start(self._crew.stack)
        clients = Clients(self._crew.gateway_urls, MODEL, catalogue())
        looking = asyncio.create_task(self._crew.look_after())
        try:
            began_s = time.monotonic()
            await self._load_and_strike(clients, watch)
            self.report.took_s = time.monotonic() - began_s
            looking.cancel()
            await audit(self.report, self._told, self._crew, watch, self._undisturbed)
        finally:
            looking.cancel()
            await clients.close()
            await watch.close()

    async def _load_and_strike(self, clients: Clients, watch: Watch) -> None:
        slots = [
            asyncio.create_task(self._slot(clients, slot)) for slot in range(self._options.streams)
        ]
        counting = asyncio.create_task(self._count(clients))
        try:
            await asyncio.sleep(_WARM_S)
            await self._strike_all(clients, watch)
            counting.cancel()
            self._stop.set()
            await asyncio.wait(slots, timeout=LIMIT_S + SETTLING_S)
        finally:
            self._stop.set()
            counting.cancel()
            for slot in slots:
                slot.cancel()
            for done in await asyncio.gather(*slots, return_exceptions=True):
                if isinstance(done, Exception):
                    raise done

    async def _slot(self, clients: Clients, slot: int) -> None:
        """One request after another."""
        for number, ask in enumerate(asks(self._options.seed, slot, len(catalogue()))):
            if self._stop.is_set():
                return
            told = await clients.tell(ask, slot + number)
            self._told.append(told)
            if told.outcome is Outcome.REFUSED:
                await asyncio.sleep(_REFUSED_PAUSE_S)

    async def _count(self, clients: Clients) -> None:
        """Note how many streams there are; a gateway or NATS that is away refuses some."""
        least = {True: self._options.streams, False: self._options.streams}
        await asyncio.sleep(_WARM_S)
        while True:
            least[self._striking] = min(least[self._striking], clients.in_flight)
            self.report.least_in_flight = least[False]
            self.report.least_while_struck = least[True]
            await asyncio.sleep(0.1)

    async def _strike_all(self, clients: Clients, watch: Watch) -> None:
        began_s = time.monotonic()
        for fault in self._plan:
            await asyncio.sleep(max(0.0, began_s + fault.at_s - time.monotonic()))
            await self._strike(fault, watch)
            await asyncio.sleep(SETTLING_S)
            self._striking = False
            await clients.until_flowing(_RECOVERY_S)
        left_s = began_s + 60 * self._options.minutes - time.monotonic()
        await asyncio.sleep(max(0.0, left_s))

    async def _strike(self, fault: Fault, watch: Watch) -> None:
        victim = self._crew.victim(fault)
        member = victim.incarnation if victim is not None else ""
        hit = watch.hit(fault.target, member)
        print_(
            f"chaos: {fault.number + 1}/{len(self._plan)} {fault.name} {member} {fault.for_s:g} s"
        )
        began_s = time.monotonic()
        self._striking = True
        await self._crew.strike(fault)
        self.report.struck.append(Struck(fault, member, began_s, time.monotonic(), hit))
