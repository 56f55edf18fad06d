"""What this machine and this process have for KV to cross: read from the kernel, never changed."""

import os
from pathlib import Path

from diptych_contracts.ids import Incarnation
from diptych_contracts.link_reports import LinksReport, RdmaDevice
from diptych_kvlink import nvml
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.lockfile import host_id
from diptych_kvlink.nixl_library import DEVICES, TRANSPORTS, why_not_offered

SYS, PROC = Path("/sys"), Path("/proc")


def survey(
    worker: Incarnation,
    settings: LinkSettings,
    *,
    codec: str = "",
    sys: Path = SYS,
    proc: Path = PROC,
    gpus: bool = True,
) -> LinksReport:
    """All of it. May take a second where there are GPUs: not for an event loop.

    Args:
        worker: Whose process this is.
        settings: What it is told of its links.
        codec: How it asks to encode what it writes.
        sys: Where the kernel tells of devices.
        proc: Where it tells of itself.
        gpus: Whether GPUs are asked for too.
    """
    nodes = numa_nodes(sys)
    graphics = nvml.gpus(sys) if gpus else nvml.Gpus(unknown="not asked for")
    return LinksReport(
        worker=worker,
        host=host_id(),
        pid=os.getpid(),
        numa_nodes=tuple(sorted(node for node, cpus in nodes.items() if cpus & own_cpus())),
        numa_count=len(nodes),
        rdma=tuple(
            RdmaDevice(name=name, numa_node=node) for name, node in rdma_devices(sys).items()
        ),
        gpus=graphics.found,
        gpu_pairs=graphics.pairs,
        gpus_unknown=graphics.unknown,
        ptrace_scope=_text(proc / "sys/kernel/yama/ptrace_scope"),
        ucx_tls=os.environ.get(TRANSPORTS, ""),
        ucx_net_devices=os.environ.get(DEVICES, ""),
        nixl_network=settings.nixl_network,
        nixl_missing=why_not_offered(settings.nixl_network),
        tls=settings.tls,
        seal=settings.seal,
        codec=codec,
    )


def rdma_devices(sys: Path = SYS) -> dict[str, int]:
    """Each RDMA device with a port that is up, and its memory node (-1: not said)."""
    found = {}
    for device in sorted((sys / "class/infiniband").glob("*")):
        states = [_text(port / "state") for port in device.glob("ports/*")]
        if any("ACTIVE" in state for state in states):
            found[device.name] = _number(device / "device/numa_node")
    return found


def numa_nodes(sys: Path = SYS) -> dict[int, set[int]]:
    """Memory nodes, each with its cores."""
    return {
        int(node.name[4:]): _cpus(_text(node / "cpulist"))
        for node in sorted((sys / "devices/system/node").glob("node[0-9]*"))
    }


def own_cpus() -> set[int]:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _cpus(text: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else -1
