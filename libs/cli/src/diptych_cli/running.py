"""The processes of one stack, running: the shell of `supervising`."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from diptych_chassis import cancelling
from diptych_cli import children, door, orders, readiness, stack, supervising, welcome
from diptych_cli.control import Control
from diptych_cli.issuing import RENEW_EVERY_S, Issuing
from diptych_cli.merged_log import MergedLog
from diptych_cli.supervising import Supervisor
from diptych_contracts import subjects
from diptych_contracts.fleet import Beat
from diptych_contracts.ids import Incarnation

_PATIENCE_S = 15.0
_KEYS_LOOK_S = 1.0
_EXIT_NOT_RUN = 127


class Stack:
    """The processes of one stack, and the supervisor that decides about them.

    Args:
        me: The supervisor, whose orders come on `control.<me>`.
        plan: What the user asked for.
        stages: What to run.
        log: Where the processes' lines go.
        identities: Who each process is.
    """

    def __init__(
        self,
        me: Incarnation,
        plan: stack.Plan,
        stages: stack.Stages,
        *,
        log: MergedLog,
        identities: Issuing,
    ) -> None:
        self._me = me
        self._identities = identities
        self._plan = plan
        self._specs = {spec.service: spec for stage in stages for spec in stage}
        self._log = log
        self._supervisor = Supervisor(
            tuple(tuple(spec.service for spec in stage) for stage in stages), stack.counts(plan)
        )
        self._control = Control(
            self._apply, subject=subjects.control(me), trust=identities.access.trust
        )
        self._children: dict[str, children.Child] = {}
        self._names: dict[int, str] = {}
        self._details: dict[str, str] = {}
        self._may_open = door.is_harmless(plan.host)
        self._refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._finished: asyncio.Future[int]
        self._tasks: asyncio.TaskGroup
        log.expect(list(self._supervisor.names()))

    async def run(self) -> int:
        """Start everything, attend to it, and stop it when asked; gives the exit code."""
        self._finished = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as self._tasks:
            side = (
                self._tasks.create_task(self._listen()),
                self._tasks.create_task(self._tell_of_waiting()),
                self._tasks.create_task(self._keep_identities()),
            )
            self._on_signals(self._stop)
            self._apply(orders.Begun())
            code = await self._finished
            for task in side:
                await cancelling.end(task)
        return 1 if self._refused else code

    def _on_signals(self, act: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, act)

    def _stop(self) -> None:
        self._log.plain("\nstopping (again to kill)")
        self._apply(orders.StopAsked())

    def _apply(self, event: orders.Event) -> None:
        for effect in self._supervisor.handle(event, now_s=time.monotonic()):
            self._perform(effect)
        if self._supervisor.stopping:
            self._control.stop()
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (wake_s := self._supervisor.wake_s) is not None:
            delay_s = max(0.0, wake_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(
                delay_s, self._apply, orders.TimePassed()
            )

    def _perform(self, effect: orders.Effect) -> None:
        match effect:
            case orders.Start(name):
                spec = self._specs[self._supervisor.service(name)]
                self._tasks.create_task(self._attend(name, spec))
            case orders.Terminate(name) | orders.Interrupt(name) | orders.Kill(name):
                self._signal(name, effect)
            case orders.TellScaled():
                self._control.scaled(effect)
            case orders.Finish(exit_code):
                self._finished.set_result(exit_code)
            case _:
                self._tell(effect)

    def _signal(self, name: str, order: orders.Ending) -> None:
        child = self._children.get(name)
        match order:
            case orders.Terminate() if child:
                child.terminate()
            case orders.Interrupt() if child:
                child.interrupt()
            case orders.Kill() if child:
                self._log.say(name, "killed: it did not stop in time", "warning")
                child.kill()

    def _tell(self, told: orders.Told) -> None:
        match told:
            case orders.TellReady(name, took_s):
                self._log.say(name, f"ready after {took_s:.1f} s")
            case orders.TellAllReady(took_s):
                self._log.plain(welcome.text(self._plan, took_s))
            case orders.TellLeft(name, took_s):
                self._log.say(name, f"finished what it held and left after {took_s:.1f} s")
            case orders.TellExit(name, code, again_in_s):
                self._tell_exit(name, code, again_in_s)
            case orders.TellGivenUp(name, code):
                self._log.show_tail(name)
                self._log.say(name, f"cannot work ({_how(code)}): given up", "error")
            case _:
                assert_never(told)

    async def _attend(self, name: str, spec: stack.ChildSpec) -> None:
        """One life of one child, from start to exit."""
        if spec.service != stack.NATS:
            spec, shown = self._identified(spec)
        else:
            shown = None
        try:
            await self._live(name, spec)
        finally:
            if shown is not None:
                self._identities.withdraw(shown)

    def _identified(self, spec: stack.ChildSpec) -> tuple[stack.ChildSpec, Path]:
        """A life of its own: with its own name and key."""
        shown = self._identities.issue(spec.service)
        own = stack.variables(spec.service, {"IDENTITY": str(shown)})
        return replace(spec, environment={**spec.environment, **own}), shown

    async def _live(self, name: str, spec: stack.ChildSpec) -> None:
        try:
            child = await children.start(name, spec)
        except OSError as err:
            self._log.say(name, f"cannot be started: {err}", "error")
            self._apply(orders.ChildExited(name, _EXIT_NOT_RUN))
            return
        self._children[name] = child
        self._names[child.pid] = name
        if self._supervisor.state(name) in (supervising.State.STOPPING, supervising.State.LEAVING):
            child.terminate()  # asked to end while it was being started
        code = await child.attend(self._log.line)
        del self._names[child.pid], self._children[name]
        self._details.pop(name, None)
        if spec.service != stack.NATS:
            sweep()
        self._apply(orders.ChildExited(name, code))

    async def _listen(self) -> None:
        def on_server() -> None:
            self._tasks.create_task(self._begin_behind())

        def on_beat(beat: Beat) -> None:
            name = self._names.get(beat.pid)
            if name is None:
                return
            self._details[name] = beat.detail
            if beat.ready and name in self._supervisor.unready:
                self._apply(orders.ChildReady(name))

        await readiness.listen(
            self._plan.nats_url,
            self._identities.access,
            on_server=on_server,
            on_beat=on_beat,
            answers={subjects.control(self._me): self._control.answer},
        )

    async def _keep_identities(self) -> None:
        """Renew them, and have the server know when keys are rotated or somebody is revoked."""
        loop = asyncio.get_running_loop()
        renew_at_s = loop.time() + RENEW_EVERY_S
        while True:
            await asyncio.sleep(_KEYS_LOOK_S)
            if self._identities.rotated() and (child := self._children.get(stack.NATS)):
                self._log.say(stack.NATS, "reads its keys again")
                child.reload()
            if loop.time() >= renew_at_s:
                renew_at_s += RENEW_EVERY_S
                self._identities.renew()

    async def _begin_behind(self) -> None:
        """The bus is there: go on, unless the gateway would refuse in the end."""
        if not self._may_open:
            me = self._identities.operator
            why = await door.refusal(self._plan.nats_url, self._plan.host, me)
            if why is not None:
                self._log.say("gateway", why, "error")
                self._refused = True
                self._apply(orders.StopAsked())
                return
            self._may_open = True
        self._apply(orders.ChildReady(stack.NATS))

    async def _tell_of_waiting(self) -> None:
        while True:
            await asyncio.sleep(_PATIENCE_S)
            for name in self._supervisor.unready:
                why = self._details.get(name) or "no sign of life yet"
                self._log.say(name, f"still waiting for it: {why}", "warning")

    def _tell_exit(self, name: str, code: int, again_in_s: float | None) -> None:
        self._log.show_tail(name)
        if again_in_s is None:
            why = f"cannot work like this ({_how(code)}): stopping the stack"
            self._log.say(name, why, "error")
        else:
            again = f"starting again in {again_in_s:g} s"
            self._log.say(name, f"died ({_how(code)}); {again}", "warning")


def sweep() -> None:
    """Take away what dead processes left in shared memory."""
    from diptych_kvlink.lockfile import sweep_leftovers

    sweep_leftovers()


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
