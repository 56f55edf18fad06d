import ctypes
from pathlib import Path
from typing import Any

from diptych_contracts.link_reports import GpuPair
from diptych_kvlink.nvml import gpus

NOT_SUPPORTED = 3


class StrictNvml:
    """NVML as its header says: of known functions only, in order, on handles that it gave out."""

    def __init__(self, *, nvlinks: list[int], over_nvlink: set[tuple[int, int]], starts: int = 0):
        self._links = nvlinks
        self._over_nvlink = over_nvlink
        self._starts = starts
        self.running = False
        self.calls: list[str] = []

    def nvmlInit_v2(self) -> int:
        self.calls.append("init")
        self.running = self._starts == 0
        return self._starts

    def nvmlShutdown(self) -> int:
        assert self.running, "shut down, and never started"
        self.running = False
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        assert self.running
        assert isinstance(count._obj, ctypes.c_uint)
        count._obj.value = len(self._links)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:
        assert self.running
        assert index.value < len(self._links)
        handle._obj.value = 0x1000 + index.value
        return 0

    def nvmlDeviceGetName(self, handle: ctypes.c_void_p, name: Any, length: Any) -> int:
        self._index(handle)
        assert length.value >= 96
        name.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: ctypes.c_void_p, info: Any) -> int:
        pci = info._obj
        assert ctypes.sizeof(pci) == 68
        pci.domain, pci.bus, pci.device = 0, 0x10 + self._index(handle), 0
        return 0

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: ctypes.c_uint, state: Any) -> int:
        index = self._index(handle)
        if self._links[index] == 0:
            return NOT_SUPPORTED
        state._obj.value = int(link.value < self._links[index])
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, which: Any, status: Any) -> int:
        assert which.value == 2, "NVML_P2P_CAPS_INDEX_NVLINK"
        pair = (self._index(one), self._index(other))
        status._obj.value = 0 if pair in self._over_nvlink else 5
        return 0

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Any, other: Any, level: Any) -> int:
        assert self._index(one) != self._index(other)
        level._obj.value = 50
        return 0

    def _index(self, handle: ctypes.c_void_p) -> int:
        assert self.running
        assert handle.value is not None
        index = handle.value - 0x1000
        assert 0 <= index < len(self._links)
        return index


def test_each_gpu_is_told_with_its_links_and_its_memory_node(tmp_path: Path) -> None:
    for bus, node in (("10", "0"), ("11", "1")):
        slot = tmp_path / f"bus/pci/devices/0000:{bus}:00.0"
        slot.mkdir(parents=True)
        (slot / "numa_node").write_text(f"{node}\n")
    nvml = StrictNvml(nvlinks=[18, 12], over_nvlink={(0, 1)})

    told = gpus(tmp_path, load=lambda: nvml)

    assert [(gpu.bus_id, gpu.numa_node, gpu.nvlinks) for gpu in told.found] == [
        ("0000:10:00.0", 0, 18),
        ("0000:11:00.0", 1, 12),
    ]
    assert told.found[0].name == "NVIDIA H100 80GB HBM3"
    assert told.pairs == (GpuPair(first=0, second=1, nvlink=True, path="across sockets"),)
    assert told.unknown == ""
    assert not nvml.running


def test_gpus_without_nvlink_are_told_so(tmp_path: Path) -> None:
    nvml = StrictNvml(nvlinks=[0, 0, 0], over_nvlink=set())
    told = gpus(tmp_path, load=lambda: nvml)
    assert [gpu.nvlinks for gpu in told.found] == [0, 0, 0]
    assert [(p.first, p.second, p.nvlink) for p in told.pairs] == [
        (0, 1, False),
        (0, 2, False),
        (1, 2, False),
    ]
    assert [gpu.numa_node for gpu in told.found] == [-1, -1, -1]


def test_where_there_is_no_driver_nothing_is_asked() -> None:
    def absent() -> object:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert gpus(load=absent).unknown == "no NVIDIA driver here"


def test_a_driver_that_does_not_start_is_told_of() -> None:
    nvml = StrictNvml(nvlinks=[], over_nvlink=set(), starts=9)
    assert gpus(load=lambda: nvml).unknown.startswith("NVML does not start")
    assert nvml.calls == ["init"]
