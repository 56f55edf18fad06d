"""What KV could cross between this machine's devices and others, and what stands in the way."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from diptych_cli.checks import Finding, Grade
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_kvlink.nixl_library import DEVICES, ISOLATED, LOOPBACK, TRANSPORTS, why_not_offered
from diptych_policy.routing import links_between

_RDMA_TRANSPORTS = ("rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ib", "ud", "all")
_MOST_NVLINKS = 18


def machine(sys: Path = Path("/sys"), proc: Path = Path("/proc")) -> Iterator[Finding]:
    """Each means of moving KV, as found on this machine."""
    network = os.environ.get("DIPTYCH_ALL__KV_NIXL", LOOPBACK)
    rdma = rdma_devices(sys)
    yield nixl(network)
    yield transports(network, rdma)
    yield rdma_found(rdma)
    yield copies_between_processes(proc)
    yield numa(sys, rdma)
    yield nvlinks()


def nixl(network: str) -> Finding:
    """Whether workers of this machine offer the nixl link."""
    why = why_not_offered(network)
    if why:
        return Finding(Grade.NOTE, "link nixl", "not offered", f"{why}; shm and tcp are")
    return Finding(Grade.FINE, "link nixl", f"offered on {network}")


def transports(network: str, rdma: dict[str, int]) -> Finding:
    """What UCX is told to take: left alone it takes TCP without a word where RDMA is missing."""
    told = os.environ.get(TRANSPORTS, "")
    if network == LOOPBACK:
        return Finding(Grade.FINE, TRANSPORTS, told or "tcp,cma on lo, set by the workers")
    found = f"{told or 'not set'}; {DEVICES} {os.environ.get(DEVICES) or 'not set'}"
    if not told or not os.environ.get(DEVICES):
        return Finding(Grade.NOTE, TRANSPORTS, found, f"KV_NIXL={ISOLATED} needs both")
    if not set(told.split(",")) & set(_RDMA_TRANSPORTS):
        return Finding(Grade.NOTE, TRANSPORTS, found, "names no RDMA transport: KV goes by TCP")
    if not rdma:
        advice = "no RDMA device here: UCX falls back to TCP without a word"
        return Finding(Grade.NOTE, TRANSPORTS, found, advice)
    return Finding(Grade.FINE, TRANSPORTS, found)


def rdma_devices(sys: Path) -> dict[str, int]:
    """Each RDMA device with a port that is up, and its NUMA node (-1: not said)."""
    found = {}
    for device in sorted((sys / "class/infiniband").glob("*")):
        states = [_text(port / "state") for port in device.glob("ports/*")]
        if any("ACTIVE" in state for state in states):
            found[device.name] = _number(device / "device/numa_node")
    return found


def rdma_found(rdma: dict[str, int]) -> Finding:
    """The RDMA devices."""
    if not rdma:
        return Finding(Grade.NOTE, "RDMA", "no device with an active port", "KV goes by TCP")
    return Finding(Grade.FINE, "RDMA", ", ".join(f"{name} (NUMA {n})" for name, n in rdma.items()))


def copies_between_processes(proc: Path) -> Finding:
    """Whether one process may copy into another's memory, which nixl does on one host."""
    scope = _text(proc / "sys/kernel/yama/ptrace_scope")
    if scope in ("", "0"):
        return Finding(Grade.FINE, "cma", "processes of one user may copy to each other")
    advice = "nixl falls back to TCP on this host without a word; shm is not concerned"
    return Finding(Grade.NOTE, "cma", f"kernel.yama.ptrace_scope is {scope}", advice)


def numa(sys: Path, rdma: dict[str, int]) -> Finding:
    """Memory nodes, and whether devices are on others than this process may run on."""
    nodes = {int(node.name[4:]): node for node in (sys / "devices/system/node").glob("node[0-9]*")}
    mine = {n for n, node in nodes.items() if _cpus(_text(node / "cpulist")) & _own_cpus()}
    found = f"{len(nodes) or 1} node(s), this process on {sorted(mine) or [0]}"
    away = [name for name, node in rdma.items() if node >= 0 and mine and node not in mine]
    if away:
        advice = (
            f"{', '.join(away)} on another node: each byte crosses between sockets; pin workers"
        )
        return Finding(Grade.NOTE, "NUMA", found, advice)
    if len(mine) > 1:
        return Finding(Grade.NOTE, "NUMA", found, "pin each worker to the node of its device")
    return Finding(Grade.FINE, "NUMA", found)


def nvlinks() -> Finding:
    """NVLink between this machine's GPUs, as NVML tells."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return Finding(Grade.FINE, "NVLink", "no NVIDIA driver here")
    if nvml.nvmlInit_v2() != 0:
        return Finding(Grade.NOTE, "NVLink", "NVML does not start", "see nvidia-smi")
    try:
        active = [_active_links(nvml, gpu) for gpu in range(_gpus(nvml))]
    finally:
        nvml.nvmlShutdown()
    found = ", ".join(f"GPU {gpu}: {n} links" for gpu, n in enumerate(active)) or "no GPU"
    if len(active) > 1 and not all(active):
        return Finding(Grade.NOTE, "NVLink", found, "KV between GPUs goes through PCIe")
    return Finding(Grade.FINE, "NVLink", found)


def pairs(registrations: list[WorkerRegistration]) -> Iterator[Finding]:
    """The link of each pair of a running stack, and why it is none faster."""
    for prefill in registrations:
        for decode in registrations:
            if (prefill.role, decode.role) == (Role.PREFILL, Role.DECODE):
                yield pair(prefill, decode)


def pair(prefill: WorkerRegistration, decode: WorkerRegistration) -> Finding:
    """What KV of `prefill` takes to `decode`."""
    links = links_between(prefill, decode)
    about = f"{prefill.worker} to {decode.worker}"
    why = "; ".join(_not_taken(prefill, decode))
    if not links:
        return Finding(Grade.NOTE, about, "no link", why or "other model or KV layout")
    found = " then ".join(links)
    if links[0] == "tcp":
        return Finding(Grade.NOTE, about, found, why or "the fastest either offers")
    return Finding(Grade.FINE, about, f"{found} ({why})" if why else found)


def _not_taken(prefill: WorkerRegistration, decode: WorkerRegistration) -> Iterator[str]:
    offered = {endpoint.kind: endpoint for endpoint in decode.endpoints}
    spoken = {endpoint.kind for endpoint in prefill.endpoints}
    for kind in ("shm", "nixl", "tcp"):
        if kind not in offered or kind not in spoken:
            who = " nor ".join(
                worker.worker
                for worker, kinds in ((prefill, spoken), (decode, set(offered)))
                if kind not in kinds
            )
            yield f"{kind}: not offered by {who}"
        elif offered[kind].host not in ("", prefill.host):
            yield f"{kind}: reaches one host only, they are on two"


def _active_links(nvml: ctypes.CDLL, gpu: int) -> int:
    handle, state = ctypes.c_void_p(), ctypes.c_uint()
    if nvml.nvmlDeviceGetHandleByIndex_v2(gpu, ctypes.byref(handle)) != 0:
        return 0
    return sum(
        nvml.nvmlDeviceGetNvLinkState(handle, link, ctypes.byref(state)) == 0 and state.value == 1
        for link in range(_MOST_NVLINKS)
    )


def _gpus(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0


def _own_cpus() -> set[int]:
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
