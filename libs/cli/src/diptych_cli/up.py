"""`diptych up`: the whole stack on this machine, in the foreground. The shell of `supervising`."""

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from diptych_bus import server
from diptych_chassis import cancelling
from diptych_cli import children, folders, models, readiness, stack, supervising, welcome
from diptych_cli.failing import CliError
from diptych_cli.merged_log import MergedLog
from diptych_cli.supervising import Supervisor
from diptych_contracts.fleet import Beat

_PATIENCE_S = 15.0
_EXIT_NOT_RUN = 127
_LEVELS = ("warning", "info", "debug")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `diptych up` was asked for."""

    port: int
    host: str
    model: str
    directory: Path | None
    prefill: int
    decode: int
    threads: int | None
    verbosity: int


def up(options: UpOptions) -> int:
    """Run the stack until Ctrl-C; gives the exit code.

    Raises:
        CliError: the port is in use, or the model cannot be had.
    """
    require_free(options.host, options.port)
    model, path = models.located(options.model)
    _sweep()
    plan = _plan(options, model, path)
    store = options.directory or folders.state() / str(options.port)
    config = server.write_config(store / "nats", port=plan.nats_port)
    stages = stack.stages(plan, tuple(server.command(config)))
    log = MergedLog(
        sys.stdout,
        level=_LEVELS[min(options.verbosity, len(_LEVELS) - 1)],
        colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )
    return asyncio.run(Stack(plan, stages, log).run())


def require_free(host: str, port: int) -> None:
    """Make sure that nobody listens on `port`.

    Raises:
        CliError: somebody does, or the address is not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as err:
        raise CliError(
            f"cannot listen on {host}:{port}: {err.strerror}; choose another port, "
            f"e.g. make up PORT={port + 1} or diptych up --port {port + 1}"
        ) from err


def cores() -> int:
    """Cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _plan(options: UpOptions, model: str, path: Path) -> stack.Plan:
    workers = options.prefill + options.decode
    return stack.Plan(
        host=options.host,
        port=options.port,
        nats_port=_free_port(),
        model=model,
        model_path=path,
        prefill=options.prefill,
        decode=options.decode,
        threads=options.threads or max(1, cores() // workers),
        log_level="debug" if options.verbosity > 1 else "info",
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sweep() -> None:
    from diptych_kvlink.lockfile import sweep_leftovers

    sweep_leftovers()


class Stack:
    """The processes of one stack, and the supervisor that decides about them."""

    def __init__(self, plan: stack.Plan, stages: stack.Stages, log: MergedLog) -> None:
        self._plan = plan
        self._specs = {spec.name: spec for stage in stages for spec in stage}
        self._log = log
        self._supervisor = Supervisor(tuple(tuple(s.name for s in stage) for stage in stages))
        self._children: dict[str, children.Child] = {}
        self._names: dict[int, str] = {}
        self._details: dict[str, str] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._finished: asyncio.Future[int]
        self._tasks: asyncio.TaskGroup
        log.expect(list(self._specs))

    async def run(self) -> int:
        """Start everything, attend to it, and stop it when asked; gives the exit code."""
        self._finished = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as self._tasks:
            side = (
                self._tasks.create_task(self._listen()),
                self._tasks.create_task(self._tell_of_waiting()),
            )
            self._on_signals(self._stop)
            self._apply(supervising.Begun())
            code = await self._finished
            for task in side:
                await cancelling.end(task)
        return code

    def _on_signals(self, act: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, act)

    def _stop(self) -> None:
        self._log.plain("\nstopping (again to kill)")
        self._apply(supervising.StopAsked())

    def _apply(self, event: supervising.Event) -> None:
        for effect in self._supervisor.handle(event, now_s=time.monotonic()):
            self._perform(effect)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if (wake_s := self._supervisor.wake_s) is not None:
            delay_s = max(0.0, wake_s - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(
                delay_s, self._apply, supervising.TimePassed()
            )

    def _perform(self, effect: supervising.Effect) -> None:
        match effect:
            case supervising.Start(name):
                self._tasks.create_task(self._attend(self._specs[name]))
            case supervising.Terminate(name):
                if child := self._children.get(name):
                    child.terminate()
            case supervising.Kill(name):
                self._log.say(name, "killed: it did not stop in time", "warning")
                if child := self._children.get(name):
                    child.kill()
            case supervising.TellReady(name, took_s):
                self._log.say(name, f"ready after {took_s:.1f} s")
            case supervising.TellAllReady(took_s):
                self._log.plain(welcome.text(self._plan, took_s))
            case supervising.TellExit():
                self._tell_exit(effect)
            case supervising.Finish(exit_code):
                self._finished.set_result(exit_code)

    async def _attend(self, spec: stack.ChildSpec) -> None:
        """One life of one child, from start to exit."""
        try:
            child = await children.start(spec)
        except OSError as err:
            self._log.say(spec.name, f"cannot be started: {err}", "error")
            self._apply(supervising.ChildExited(spec.name, _EXIT_NOT_RUN))
            return
        self._children[spec.name] = child
        self._names[child.pid] = spec.name
        if self._supervisor.state(spec.name) is supervising.State.STOPPING:
            child.terminate()  # asked to end while it was being started
        code = await child.attend(self._log.line)
        del self._names[child.pid], self._children[spec.name]
        if spec.name != stack.NATS:
            _sweep()
        self._apply(supervising.ChildExited(spec.name, code))

    async def _listen(self) -> None:
        def on_server() -> None:
            self._apply(supervising.ChildReady(stack.NATS))

        def on_beat(beat: Beat) -> None:
            name = self._names.get(beat.pid)
            if name is None:
                return
            self._details[name] = beat.detail
            if beat.ready and name in self._supervisor.unready:
                self._apply(supervising.ChildReady(name))

        await readiness.listen(self._plan.nats_url, on_server=on_server, on_beat=on_beat)

    async def _tell_of_waiting(self) -> None:
        while True:
            await asyncio.sleep(_PATIENCE_S)
            for name in self._supervisor.unready:
                why = self._details.get(name) or "no sign of life yet"
                self._log.say(name, f"still waiting for it: {why}", "warning")

    def _tell_exit(self, exit_: supervising.TellExit) -> None:
        self._log.show_tail(exit_.name)
        how = f"killed by signal {-exit_.code}" if exit_.code < 0 else f"exit code {exit_.code}"
        if exit_.again_in_s is None:
            self._log.say(exit_.name, f"cannot work like this ({how}): stopping the stack", "error")
        else:
            again = f"starting again in {exit_.again_in_s:g} s"
            self._log.say(exit_.name, f"died ({how}); {again}", "warning")
