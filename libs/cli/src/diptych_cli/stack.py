"""What the embedded stack consists of: commands and environments, and nothing that runs."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NATS = "nats"
DRAIN_S = 4.0
"""Ctrl-C should not take long: shorter than the supervisor's patience before it kills."""
WORKERS = ("prefill-worker", "decode-worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the user asked for, resolved."""

    host: str
    port: int
    nats_port: int
    model: str
    model_path: Path
    prefill: int = 1
    decode: int = 1
    threads: int = 1
    """Per worker."""
    log_level: str = "info"

    @property
    def nats_url(self) -> str:
        """Of the stack's own server."""
        return f"nats://127.0.0.1:{self.nats_port}"

    @property
    def base_url(self) -> str:
        """What clients are told."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: its name in the log, what to run, and what to add to its environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


Stages = tuple[tuple[ChildSpec, ...], ...]


def stages(plan: Plan, nats_command: tuple[str, ...]) -> Stages:
    """The stack's processes, in the order they are started.

    NATS first; then everybody who works behind the scenes; the gateway last, so that its port
    opens when there is somebody to answer.
    """
    workers = [
        _worker(plan, service, number)
        for service, replicas in zip(WORKERS, (plan.prefill, plan.decode), strict=True)
        for number in range(1, replicas + 1)
    ]
    behind = (*workers, _service(plan, "scheduler", {}), _service(plan, "power-governor", {}))
    front = {"HOST": plan.host, "PORT": str(plan.port)}
    return (
        (ChildSpec(NATS, tethered(nats_command), {}),),
        behind,
        (_service(plan, "gateway", front),),
    )


def tethered(command: tuple[str, ...]) -> tuple[str, ...]:
    """`command`, tied to this process: killed when it dies, however it dies."""
    return (sys.executable, "-m", "diptych_chassis.tether", str(os.getpid()), "--", *command)


def python() -> str:
    """This interpreter, as short as it can be typed from here."""
    here = os.path.relpath(sys.executable)
    return sys.executable if here.startswith("..") else here


def package(service: str) -> str:
    """The import package of a service."""
    return f"diptych_{service.replace('-', '_')}"


def worker_settings(plan: Plan) -> dict[str, str]:
    """What a worker of this stack must be told, by setting."""
    return {"MODEL": plan.model, "MODEL_PATH": str(plan.model_path), "THREADS": str(plan.threads)}


def variables(service: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as environment variables of `service`."""
    start = f"DIPTYCH_{service.upper().replace('-', '_')}__"
    return {start + name: value for name, value in settings.items()}


def _worker(plan: Plan, service: str, number: int) -> ChildSpec:
    spec = _service(plan, service, worker_settings(plan))
    name = service if number == 1 else f"{service}-{number}"
    return ChildSpec(name, spec.command, spec.environment)


def _service(plan: Plan, service: str, settings: Mapping[str, str]) -> ChildSpec:
    command = tethered((sys.executable, "-m", package(service)))
    shared = {
        "NATS_URL": plan.nats_url,
        "LOG_FORMAT": "json",
        "LOG_LEVEL": plan.log_level,
        "DRAIN_S": f"{DRAIN_S:g}",
    }
    return ChildSpec(service, command, variables("all", shared) | variables(service, settings))
