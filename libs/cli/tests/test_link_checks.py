from pathlib import Path

import msgspec
import pytest

from diptych_cli import link_checks, link_doctor
from diptych_cli.checks import Grade
from diptych_cli.failing import CliError
from diptych_contracts.fleet import Role, WorkerRegistration
from diptych_contracts.transfers import LinkEndpoint
from diptych_kvlink import nixl_library
from diptych_testkit.builders import a_worker


def worker(name: str, role: Role, *kinds: str, host: str = "host-1") -> WorkerRegistration:
    endpoints = tuple(
        LinkEndpoint(
            kind=kind, host="" if kind == "tcp" else host, address="x", slots=1, slot_bytes=1
        )
        for kind in kinds
    )
    made = a_worker(name, role)
    return msgspec.structs.replace(made, endpoints=endpoints, host=host)


def test_a_pair_is_told_its_links_and_what_keeps_it_from_others() -> None:
    prefill = worker("prefill-worker-1", Role.PREFILL, "shm", "nixl", "tcp")
    near = worker("decode-worker-1", Role.DECODE, "shm", "tcp")
    far = worker("decode-worker-2", Role.DECODE, "shm", "nixl", "tcp", host="host-2")

    beside, afar = link_checks.pairs([prefill, near, far])

    assert (beside.grade, beside.found) == (
        Grade.FINE,
        "shm then tcp (nixl: not offered by decode-worker-1)",
    )
    assert (afar.grade, afar.found) == (Grade.NOTE, "tcp")
    assert afar.advice.startswith("shm: reaches one host only, they are on two; nixl: reaches")


def test_rdma_devices_are_those_with_an_active_port(tmp_path: Path) -> None:
    for name, state, node in (("mlx5_0", "4: ACTIVE", "1"), ("mlx5_1", "1: DOWN", "0")):
        device = tmp_path / "class/infiniband" / name
        (device / "ports/1").mkdir(parents=True)
        (device / "ports/1/state").write_text(f"{state}\n")
        (device / "device").mkdir()
        (device / "device/numa_node").write_text(f"{node}\n")

    assert link_checks.rdma_devices(tmp_path) == {"mlx5_0": 1}
    assert link_checks.rdma_found({"mlx5_0": 1}).found == "mlx5_0 (NUMA 1)"


def test_a_device_on_another_node_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_checks, "_own_cpus", lambda: {0, 1})
    for node, cpus in ((0, "0-3"), (1, "4-7,9")):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")

    assert link_checks.numa(tmp_path, {"mlx5_0": 0}).grade is Grade.FINE
    away = link_checks.numa(tmp_path, {"mlx5_0": 1})
    assert (away.grade, away.advice[:23]) == (Grade.NOTE, "mlx5_0 on another node:")


@pytest.mark.parametrize(
    ("tls", "devices", "rdma", "said"),
    [
        ("", "", {}, "KV_NIXL=isolated needs both"),
        ("tcp", "eth0", {}, "names no RDMA transport: KV goes by TCP"),
        ("rc,tcp", "mlx5_0:1", {}, "no RDMA device here: UCX falls back to TCP without a word"),
        ("rc,tcp", "mlx5_0:1", {"mlx5_0": 0}, ""),
    ],
)
def test_a_silent_fallback_to_tcp_is_told(
    monkeypatch: pytest.MonkeyPatch, tls: str, devices: str, rdma: dict[str, int], said: str
) -> None:
    monkeypatch.setenv("UCX_TLS", tls)
    monkeypatch.setenv("UCX_NET_DEVICES", devices)
    assert link_checks.transports("isolated", rdma).advice == said


def test_copies_between_processes_may_be_forbidden(tmp_path: Path) -> None:
    assert link_checks.copies_between_processes(tmp_path).grade is Grade.FINE
    (tmp_path / "sys/kernel/yama").mkdir(parents=True)
    (tmp_path / "sys/kernel/yama/ptrace_scope").write_text("1\n")
    assert "falls back to TCP" in link_checks.copies_between_processes(tmp_path).advice


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
