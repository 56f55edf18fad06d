from typing import Any

import pytest

from diptych_cli import link_checks, link_doctor
from diptych_cli.checks import Grade
from diptych_cli.failing import CliError
from diptych_contracts.control import KvSnapshot, KvTransfer
from diptych_contracts.ids import Incarnation, TransferId
from diptych_contracts.link_reports import GpuFound, GpuPair, LinksReport, RdmaDevice
from diptych_kvlink import nixl_library


def a_report(**facts: Any) -> LinksReport:
    known = {"worker": Incarnation("p-1"), "nixl_network": "loopback"}
    return LinksReport(**(known | facts))


def test_rdma_devices_are_told_with_their_memory_node() -> None:
    report = a_report(rdma=(RdmaDevice(name="mlx5_0", numa_node=1),))
    assert link_checks.rdma_found(report).found == "mlx5_0 (NUMA 1)"
    assert link_checks.rdma_found(a_report()).grade is Grade.NOTE


def test_a_device_on_another_node_is_told() -> None:
    devices = (RdmaDevice(name="mlx5_0", numa_node=0), RdmaDevice(name="mlx5_1", numa_node=1))
    here = {"numa_nodes": (0,), "numa_count": 2}
    near = a_report(rdma=devices[:1], **here)
    far = a_report(rdma=devices[1:], **here)
    named = a_report(rdma=devices, ucx_net_devices="mlx5_0:1", **here)

    assert link_checks.numa(near).grade is Grade.FINE
    assert link_checks.numa(named).grade is Grade.FINE
    away = link_checks.numa(far)
    assert (away.grade, away.advice[:23]) == (Grade.NOTE, "mlx5_1 on another node:")
    spread = link_checks.numa(a_report(numa_nodes=(0, 1), numa_count=2))
    assert spread.advice == "pin each worker to the node of its device"


@pytest.mark.parametrize(
    ("tls", "devices", "rdma", "said"),
    [
        ("", "", (), "KV_NIXL=isolated needs both"),
        ("tcp", "eth0", (), "names no RDMA transport: nixl goes by TCP"),
        ("rc,tcp", "mlx5_0:1", (), "no RDMA device here: UCX falls back to TCP without a word"),
        ("rc,tcp", "mlx5_0:1", (RdmaDevice(name="mlx5_0"),), ""),
    ],
)
def test_a_silent_fallback_to_tcp_is_told(
    tls: str, devices: str, rdma: tuple[RdmaDevice, ...], said: str
) -> None:
    report = a_report(nixl_network="isolated", ucx_tls=tls, ucx_net_devices=devices, rdma=rdma)
    finding = link_checks.transports(report)
    assert finding.advice == said
    assert (finding.grade is Grade.FINE) == (said == "")


def test_copies_between_processes_may_be_forbidden() -> None:
    assert link_checks.copies_between_processes(a_report()).grade is Grade.FINE
    forbidden = link_checks.copies_between_processes(a_report(ptrace_scope="1"))
    assert "falls back to TCP" in forbidden.advice


def test_missing_nvlink_is_told_by_pair() -> None:
    two = (GpuFound(name="A100", nvlinks=12), GpuFound(name="A100", nvlinks=12))
    joined = a_report(gpus=two, gpu_pairs=(GpuPair(first=0, second=1, nvlink=True),))
    apart = a_report(gpus=two, gpu_pairs=(GpuPair(first=0, second=1, path="host bridge"),))

    assert link_checks.nvlinks(joined).grade is Grade.FINE
    told = link_checks.nvlinks(apart)
    assert told.grade is Grade.NOTE
    assert told.advice.startswith("no NVLink between GPUs 0 and 1 (host bridge)")
    assert link_checks.nvlinks(a_report(gpus_unknown="no NVIDIA driver here")).grade is Grade.FINE
    assert link_checks.nvlinks(a_report(gpus_unknown="NVML does not start")).grade is Grade.NOTE


def test_where_no_stack_runs_the_machine_is_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nixl_library, "MODULES", ("nixl_that_is_not_here",))

    def none() -> object:
        raise CliError("no stack runs here")

    assert link_doctor.doctor_links(none) == 0  # type: ignore[arg-type]

    told = capsys.readouterr().out
    assert "! link nixl: not offered" in told
    assert "nixl_that_is_not_here is installed (make nixl; Linux only)" in told
    assert "Pairs of workers are not shown: no stack runs here" in told


def test_the_link_last_used_is_that_of_the_newest_hand_over() -> None:
    def ended(name: str, link: str, ended_ms: int, reason: str = "imported") -> KvTransfer:
        return KvTransfer(
            transfer_id=TransferId(name),
            state="released",
            writer="p-1",
            link=link,
            ended_ms=ended_ms,
            reason=reason,
        )

    snapshot = KvSnapshot(
        worker=Incarnation("d-1"),
        transfers=(
            ended("a.1", "shm", 900),
            ended("b.1", "tcp", 100),
            ended("c.1", "nixl", 5, reason="released by the writer"),
        ),
    )
    assert link_doctor.last_used([snapshot]) == {("p-1", "d-1"): "tcp"}
