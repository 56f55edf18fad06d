"""GPUs of this machine and NVLink between them, as NVIDIA's management library tells.

Asked through `ctypes`: where there is a driver, `libnvidia-ml.so.1` comes with it, and nothing has
to be installed. Nothing is changed, and the library is let go again.
"""

import ctypes
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from diptych_contracts.link_reports import GpuFound, GpuPair

_MOST_NVLINKS = 18
_OVER_NVLINK = 2
"""`NVML_P2P_CAPS_INDEX_NVLINK`"""
_PATHS = {
    0: "one board",
    10: "one switch",
    20: "several switches",
    30: "host bridge",
    40: "one socket",
    50: "across sockets",
}
"""`nvmlGpuTopologyLevel_t`"""


class Gpus(NamedTuple):
    """What was found, or why nothing could be."""

    found: tuple[GpuFound, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    unknown: str = ""


class _PciInfo(ctypes.Structure):
    _fields_ = (
        ("bus_id_legacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pci_device_id", ctypes.c_uint),
        ("pci_sub_system_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


def _driver() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")


def gpus(sys: Path = Path("/sys"), *, load: Callable[[], Any] = _driver) -> Gpus:
    """All GPUs, and how each two of them reach each other. May take a second.

    Args:
        sys: Where the kernel tells which memory node a PCI slot belongs to.
        load: Opens the library; raises `OSError` where there is none.
    """
    try:
        nvml = load()
    except OSError:
        return Gpus(unknown="no NVIDIA driver here")
    if nvml.nvmlInit_v2() != 0:
        return Gpus(unknown="NVML does not start: see nvidia-smi")
    try:
        handles = _handles(nvml)
        return Gpus(
            tuple(_gpu(nvml, handle, sys) for handle in handles),
            tuple(
                _pair(nvml, (first, handles[first]), (second, handles[second]))
                for first, second in combinations(range(len(handles)), 2)
            ),
        )
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> list[ctypes.c_void_p]:
    count, found = ctypes.c_uint(), []
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)) == 0:
            found.append(handle)
    return found


def _gpu(nvml: Any, handle: ctypes.c_void_p, sys: Path) -> GpuFound:
    name, pci = ctypes.create_string_buffer(96), _PciInfo()
    nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name)))
    known = nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)) == 0
    bus_id = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0" if known else ""
    return GpuFound(
        name=name.value.decode("utf-8", "replace"),
        bus_id=bus_id,
        numa_node=_numa_node(sys, bus_id),
        nvlinks=_links_up(nvml, handle),
    )


def _links_up(nvml: Any, handle: ctypes.c_void_p) -> int:
    state, up = ctypes.c_uint(), 0
    for link in range(_MOST_NVLINKS):
        told = nvml.nvmlDeviceGetNvLinkState(handle, ctypes.c_uint(link), ctypes.byref(state))
        up += told == 0 and state.value == 1
    return up


def _pair(
    nvml: Any, first: tuple[int, ctypes.c_void_p], second: tuple[int, ctypes.c_void_p]
) -> GpuPair:
    status, level = ctypes.c_int(-1), ctypes.c_int(-1)
    told = nvml.nvmlDeviceGetP2PStatus(
        first[1], second[1], ctypes.c_int(_OVER_NVLINK), ctypes.byref(status)
    )
    near = nvml.nvmlDeviceGetTopologyCommonAncestor(first[1], second[1], ctypes.byref(level))
    return GpuPair(
        first=first[0],
        second=second[0],
        nvlink=told == 0 and status.value == 0,
        path=_PATHS.get(level.value, "") if near == 0 else "",
    )


def _numa_node(sys: Path, bus_id: str) -> int:
    try:
        return int((sys / "bus/pci/devices" / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return -1
