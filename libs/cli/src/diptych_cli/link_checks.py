"""What one machine or process has for KV to cross, and what stands in the way."""

from collections.abc import Iterator

from diptych_cli.checks import Finding, Grade
from diptych_contracts.link_reports import LinksReport
from diptych_kvlink.nixl_library import DEVICES, ISOLATED, LOOPBACK, TRANSPORTS

_RDMA_TRANSPORTS = ("rc", "rc_x", "rc_v", "rc_verbs", "rc_mlx5", "dc", "dc_x", "ib", "ud", "all")


def machine(report: LinksReport) -> Iterator[Finding]:
    """Each means of moving KV, as `report` tells of it."""
    yield nixl(report)
    yield transports(report)
    yield rdma_found(report)
    yield copies_between_processes(report)
    yield numa(report)
    yield nvlinks(report)


def nixl(report: LinksReport) -> Finding:
    """Whether the nixl link is offered."""
    if report.nixl_missing:
        advice = f"{report.nixl_missing}; shm and tcp are"
        return Finding(Grade.NOTE, "link nixl", "not offered", advice)
    return Finding(Grade.FINE, "link nixl", f"offered on {report.nixl_network}")


def transports(report: LinksReport) -> Finding:
    """What UCX is told to take: left alone it takes TCP without a word where RDMA is missing."""
    told, devices = report.ucx_tls, report.ucx_net_devices
    if report.nixl_network == LOOPBACK:
        found = f"{told} on {devices or 'lo'}" if told else "tcp,cma on lo, set by the workers"
        return Finding(Grade.FINE, TRANSPORTS, found)
    found = f"{told or 'not set'}; {DEVICES} {devices or 'not set'}"
    advice = silent_tcp(report)
    if not told or not devices:
        advice = f"KV_NIXL={ISOLATED} needs both"
    return Finding(Grade.NOTE if advice else Grade.FINE, TRANSPORTS, found, advice)


def silent_tcp(report: LinksReport) -> str:
    """Why UCX would take TCP for the nixl link without a word; empty: it would not."""
    if report.nixl_network == LOOPBACK:
        scope = report.ptrace_scope
        blocked = scope not in ("", "0")
        return f"kernel.yama.ptrace_scope is {scope}: UCX falls back to TCP" if blocked else ""
    if not set(report.ucx_tls.split(",")) & set(_RDMA_TRANSPORTS):
        return "names no RDMA transport: nixl goes by TCP"
    if not report.rdma:
        return "no RDMA device here: UCX falls back to TCP without a word"
    return ""


def rdma_found(report: LinksReport) -> Finding:
    """The RDMA devices."""
    if not report.rdma:
        return Finding(
            Grade.NOTE, "RDMA", "no device with an active port", "between hosts KV goes by TCP"
        )
    told = ", ".join(f"{device.name} (NUMA {device.numa_node})" for device in report.rdma)
    return Finding(Grade.FINE, "RDMA", told)


def copies_between_processes(report: LinksReport) -> Finding:
    """Whether one process may copy into another's memory, which nixl does on one host."""
    if report.ptrace_scope in ("", "0"):
        return Finding(Grade.FINE, "cma", "processes of one user may copy to each other")
    advice = "nixl falls back to TCP on this host without a word; shm is not concerned"
    found = f"kernel.yama.ptrace_scope is {report.ptrace_scope}"
    return Finding(Grade.NOTE, "cma", found, advice)


def numa(report: LinksReport) -> Finding:
    """Memory nodes, and whether devices are on others than the process may run on."""
    mine = list(report.numa_nodes) or [0]
    found = f"{report.numa_count or 1} node(s), this process on {mine}"
    away = far_devices(report)
    if away:
        advice = (
            f"{', '.join(away)} on another node: each byte crosses between sockets; pin workers"
        )
        return Finding(Grade.NOTE, "NUMA", found, advice)
    if len(mine) > 1:
        return Finding(Grade.NOTE, "NUMA", found, "pin each worker to the node of its device")
    return Finding(Grade.FINE, "NUMA", found)


def far_devices(report: LinksReport) -> list[str]:
    """RDMA devices on a memory node that the process does not run on.

    Where UCX is told which devices to take, of those only.
    """
    named = {each.partition(":")[0] for each in report.ucx_net_devices.split(",")}
    used = [device for device in report.rdma if device.name in named] or list(report.rdma)
    return [
        device.name
        for device in used
        if device.numa_node >= 0 and report.numa_nodes and device.numa_node not in report.numa_nodes
    ]


def nvlinks(report: LinksReport) -> Finding:
    """NVLink between the machine's GPUs."""
    if report.gpus_unknown:
        missing = report.gpus_unknown.startswith("no ")
        return Finding(Grade.FINE if missing else Grade.NOTE, "NVLink", report.gpus_unknown)
    found = ", ".join(
        f"GPU {number}: {gpu.nvlinks} links, NUMA {gpu.numa_node}"
        for number, gpu in enumerate(report.gpus)
    )
    bare = [pair for pair in report.gpu_pairs if not pair.nvlink]
    if bare:
        told = ", ".join(f"{p.first} and {p.second} ({p.path or 'path unknown'})" for p in bare)
        advice = f"no NVLink between GPUs {told}: KV between them goes through PCIe"
        return Finding(Grade.NOTE, "NVLink", found, advice)
    return Finding(Grade.FINE, "NVLink", found or "no GPU")
