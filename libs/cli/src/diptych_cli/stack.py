"""What the embedded stack consists of: commands and environments, and nothing that runs."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NATS = "nats"
DRAIN_S = 60.0
"""For a process that is wanted no more: streams may run on for so long. Ctrl-C interrupts, and
that takes a few seconds at most."""


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
    gateways: int = 1
    schedulers: int = 1
    threads: int = 1
    """Per worker."""
    log_level: str = "info"
    trust: Path = Path("trust.pem")
    """What its processes believe of each other."""

    @property
    def nats_url(self) -> str:
        """Of the stack's own server."""
        return f"tls://127.0.0.1:{self.nats_port}"

    @property
    def base_url(self) -> str:
        """What clients are told."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"


@dataclass(frozen=True, slots=True)
class Scalable:
    """A service whose number of processes may change."""

    service: str
    least: int
    most: int = 64


SCALABLE = {
    "prefill": Scalable("prefill-worker", 0),
    "decode": Scalable("decode-worker", 1),
    "gateways": Scalable("gateway", 1),
    "schedulers": Scalable("scheduler", 1),
}
"""By the word users type. Without prefill workers the decode workers do both."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run as one process of a service, and what to add to its environment."""

    service: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


Stages = tuple[tuple[ChildSpec, ...], ...]


def stages(plan: Plan, nats_command: tuple[str, ...]) -> Stages:
    """The stack's services, in the order they are started.

    NATS first; then everybody who works behind the scenes; the gateway last, so that its port
    opens when there is somebody to answer.
    """
    behind = (
        _service(plan, "prefill-worker", worker_settings(plan)),
        _service(plan, "decode-worker", worker_settings(plan)),
        _service(plan, "scheduler", {}),
        _service(plan, "power-governor", {}),
    )
    # Gateways come and go behind one port, which the supervisor holds for them.
    front = {"HOST": plan.host, "PORT": str(plan.port), "REUSE_PORT": "true"}
    return (
        (ChildSpec(NATS, tethered(nats_command), {}),),
        behind,
        (_service(plan, "gateway", front),),
    )


def counts(plan: Plan) -> dict[str, int]:
    """How many processes of a service to start; of those not named, one."""
    wanted = (plan.prefill, plan.decode, plan.gateways, plan.schedulers)
    return {kind.service: n for kind, n in zip(SCALABLE.values(), wanted, strict=True)}


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


def _service(plan: Plan, service: str, settings: Mapping[str, str]) -> ChildSpec:
    command = tethered((sys.executable, "-m", package(service)))
    shared = {
        "NATS_URL": plan.nats_url,
        "TRUST": str(plan.trust),
        "LOG_FORMAT": "json",
        "LOG_LEVEL": plan.log_level,
        "DRAIN_S": f"{DRAIN_S:g}",
    }
    return ChildSpec(service, command, variables("all", shared) | variables(service, settings))
