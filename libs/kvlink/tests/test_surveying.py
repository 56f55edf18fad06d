import os
from pathlib import Path

import pytest

from diptych_contracts.ids import Incarnation
from diptych_contracts.link_reports import GpuFound, RdmaDevice
from diptych_kvlink import nixl_library, surveying
from diptych_kvlink.links import LinkSettings
from diptych_kvlink.nvml import Gpus

ME = Incarnation("p-1")


@pytest.fixture
def sys(tmp_path: Path) -> Path:
    """A machine with two memory nodes, a device that is up and one that is not."""
    for name, state, node in (("mlx5_0", "4: ACTIVE", "1"), ("mlx5_1", "1: DOWN", "0")):
        device = tmp_path / "class/infiniband" / name
        (device / "ports/1").mkdir(parents=True)
        (device / "ports/1/state").write_text(f"{state}\n")
        (device / "device").mkdir()
        (device / "device/numa_node").write_text(f"{node}\n")
    for node, cpus in ((0, "0-3"), (1, "4-7,9")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
    return tmp_path


def test_a_process_tells_where_it_runs_and_what_is_there(
    sys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveying, "own_cpus", lambda: {5, 9})
    monkeypatch.setenv("UCX_TLS", "rc,tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    monkeypatch.setattr(nixl_library, "MODULES", ("nixl_that_is_not_here",))
    (tmp_path / "proc/sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("1\n")
    settings = LinkSettings(nixl_network="isolated", tls=False, seal=True)
    found = Gpus(found=(GpuFound(name="H100"),))
    monkeypatch.setattr(surveying.nvml, "gpus", lambda sys: found)

    report = surveying.survey(ME, settings, codec="int8", sys=sys, proc=tmp_path / "proc")

    assert (report.worker, report.pid) == (ME, os.getpid())
    assert (report.numa_nodes, report.numa_count) == ((1,), 2)
    assert report.rdma == (RdmaDevice(name="mlx5_0", numa_node=1),)
    assert [gpu.name for gpu in report.gpus] == ["H100"]
    assert (report.ucx_tls, report.ucx_net_devices) == ("rc,tcp", "mlx5_0:1")
    assert report.ptrace_scope == "1"
    assert report.nixl_missing.startswith("none of nixl_that_is_not_here")
    assert (report.nixl_network, report.tls, report.seal, report.codec) == (
        "isolated",
        False,
        True,
        "int8",
    )


def test_a_machine_that_says_nothing_is_told_as_such(tmp_path: Path) -> None:
    report = surveying.survey(ME, LinkSettings(), sys=tmp_path, proc=tmp_path, gpus=False)
    assert report.gpus_unknown == "not asked for"
    assert (report.numa_nodes, report.numa_count, report.rdma) == ((), 0, ())
    assert report.ptrace_scope == ""


def test_this_machine_can_be_surveyed() -> None:
    report = surveying.survey(ME, LinkSettings())
    assert report.host
    assert report.numa_count == 0 or report.numa_nodes
