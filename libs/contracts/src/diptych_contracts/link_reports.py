"""What a worker's process finds of the means by which KV could cross: `control.<worker>`."""

from diptych_contracts.ids import Incarnation
from diptych_contracts.wire import Message


class LinksAsk(Message, frozen=True, kw_only=True, tag="links_ask.1"):
    """To a worker: what is there for KV to cross, where you run?"""

    gpus: bool = True
    """Whether GPUs are asked for too: their driver may have to wake."""


class RdmaDevice(Message, frozen=True, kw_only=True, tag="rdma_device.1"):
    """A device with an active port."""

    name: str
    numa_node: int = -1
    """-1: not said."""


class GpuFound(Message, frozen=True, kw_only=True, tag="gpu_found.1"):
    """A GPU, as NVML tells of it."""

    name: str
    bus_id: str = ""
    numa_node: int = -1
    """Of its PCI slot; -1: not said."""
    nvlinks: int = 0
    """How many of its links are up."""


class GpuPair(Message, frozen=True, kw_only=True, tag="gpu_pair.1"):
    """How two GPUs of one host reach each other."""

    first: int = 0
    second: int = 0
    nvlink: bool = False
    """Whether one may copy to the other over NVLink, through a switch or not."""
    path: str = ""
    """Their nearest common ancestor on PCIe: `one switch`, `host bridge`, `across sockets`."""


class LinksReport(Message, frozen=True, kw_only=True, tag="links_report.1"):
    """What one process finds."""

    worker: Incarnation
    host: str = ""
    """As in its registration."""
    pid: int = 0
    numa_nodes: tuple[int, ...] = ()
    """Memory nodes whose cores this process may run on."""
    numa_count: int = 0
    """Memory nodes in all; 0: not said."""
    rdma: tuple[RdmaDevice, ...] = ()
    gpus: tuple[GpuFound, ...] = ()
    gpu_pairs: tuple[GpuPair, ...] = ()
    gpus_unknown: str = ""
    """Why nothing is known of GPUs; empty: `gpus` are all there are."""
    ptrace_scope: str = ""
    """`kernel.yama.ptrace_scope`: above 0, processes may not copy to each other."""
    ucx_tls: str = ""
    ucx_net_devices: str = ""
    nixl_network: str = ""
    """The worker's `KV_NIXL`."""
    nixl_missing: str = ""
    """Why the nixl link is not offered; empty: it is."""
    tls: bool = True
    """Whether it takes KV over tcp through TLS only."""
    seal: bool = False
    """Whether it wants blocks sealed where a link has no TLS."""
    codec: str = ""
    """How it asks to encode what it writes."""
