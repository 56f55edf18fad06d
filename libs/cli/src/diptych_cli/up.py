"""`diptych up`: the whole stack on this machine, in the foreground."""

import asyncio
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from diptych_bus import server
from diptych_cli import checked_settings, door, folders, issuing, models, presence, stack
from diptych_cli.failing import CliError
from diptych_cli.merged_log import MergedLog
from diptych_cli.running import Stack, sweep
from diptych_contracts.ids import Incarnation, new_incarnation
from diptych_identity.authority import OPERATOR_CREDS, TRUST

_LEVELS = ("warning", "info", "debug")
_NEVER_GIVEN = (10_000, 32_000)
"""Ports below those that Linux gives to clients (`net.ipv4.ip_local_port_range`)."""
_TRIES = 100
_random = SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `diptych up` was asked for."""

    port: int
    host: str
    model: str
    directory: Path | None
    prefill: int
    decode: int
    gateways: int
    schedulers: int
    threads: int | None
    durable: bool = False
    """Whether requests and tokens are on the disk before they count."""
    verbosity: int


def up(options: UpOptions) -> int:
    """Run the stack until Ctrl-C; gives the exit code.

    Raises:
        CliError: a setting is wrong, the port or the folder is in use, or the model cannot be had.
    """
    checked_settings.require_right(os.environ)
    store = options.directory or folders.state() / str(options.port)
    with held(options.host, options.port):
        door.check_new(options.host, store)
        model, path = models.located(options.model)
        sweep()
        me = new_incarnation("supervisor", SystemRandom())
        keys = (store / issuing.FOLDER).absolute()
        plan = _plan(options, model, path, keys)
        with presence.claimed(store, _stack_file(plan, me, keys)):
            identities = issuing.Issuing(issuing.authority(store.absolute()), me)
            config = server.write_config(
                store.absolute() / "nats",
                port=plan.nats_port,
                durable=options.durable,
                guard=identities.guard,
            )
            stages = stack.stages(plan, tuple(server.command(config)))
            running = Stack(me, plan, stages, log=_log(options), identities=identities)
            return asyncio.run(running.run())


@contextmanager
def held(host: str, port: int) -> Iterator[None]:
    """Keep `port` for the gateways to come, which share it, and for nobody else.

    Raises:
        CliError: somebody listens there, or the address is not this machine's.
    """
    require_free(host, port)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        # Bound, never listening: no connection comes here. Without SO_REUSEADDR nobody who does not
        # share the port can bind it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
        yield


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


def _plan(options: UpOptions, model: str, path: Path, keys: Path) -> stack.Plan:
    workers = options.prefill + options.decode
    return stack.Plan(
        host=options.host,
        port=options.port,
        nats_port=_free_port(),
        model=model,
        model_path=path,
        prefill=options.prefill,
        decode=options.decode,
        gateways=options.gateways,
        schedulers=options.schedulers,
        threads=options.threads or max(1, cores() // max(1, workers)),
        log_level="debug" if options.verbosity > 1 else "info",
        trust=keys / TRUST,
    )


def _stack_file(plan: stack.Plan, me: Incarnation, keys: Path) -> presence.StackFile:
    return presence.StackFile(
        supervisor=me,
        pid=os.getpid(),
        port=plan.port,
        base_url=plan.base_url,
        nats_url=plan.nats_url,
        model=plan.model,
        identity=str(keys / OPERATOR_CREDS),
        trust=str(plan.trust),
    )


def _log(options: UpOptions) -> MergedLog:
    return MergedLog(
        sys.stdout,
        level=_LEVELS[min(options.verbosity, len(_LEVELS) - 1)],
        colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ,
    )


def _free_port() -> int:
    """One that stays free: the kernel gives it to no client while the server starts again."""
    for _ in range(_TRIES):
        port = _random.randrange(*_NEVER_GIVEN)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
