"""What can be said of the compose file without an engine; by the real compose binary."""

import re
from typing import Any, cast

import pytest

from diptych_bus.access import Access
from diptych_bus.server import Guard, config_text
from diptych_chassis.settings import ServiceSettings, parse_settings
from diptych_decode_worker.settings import DecodeWorkerSettings
from diptych_gateway.settings import GatewaySettings
from diptych_power_governor.settings import GovernorSettings
from diptych_prefill_worker.settings import PrefillWorkerSettings
from diptych_scheduler.settings import SchedulerSettings
from diptych_testkit.compose_stack import TOP, ComposeStack

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "prefill-worker": PrefillWorkerSettings,
    "decode-worker": DecodeWorkerSettings,
    "power-governor": GovernorSettings,
}
WORKERS = ("prefill-worker", "decode-worker")
SHIPPED = "docker-compose.yml"
CI = f"{SHIPPED}:infra/ci/compose.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(ComposeStack().told(COMPOSE_FILE=SHIPPED).config()["services"])


@pytest.mark.compose
@pytest.mark.parametrize("files", [SHIPPED, CI])
@pytest.mark.parametrize("profile", [(), ("--profile", "gpu")])
def test_compose_finds_no_fault(files: str, profile: tuple[str, ...]) -> None:
    assert ComposeStack().told(COMPOSE_FILE=files).run(*profile, "config", "--quiet") == ""


@pytest.mark.compose
def test_every_service_is_there_and_its_settings_are_ones_it_knows(
    services: dict[str, Any],
) -> None:
    assert {folder.name for folder in (TOP / "services").iterdir()} == set(SETTINGS)
    for service, kind in SETTINGS.items():
        told = parse_settings(kind, service, services[service]["environment"])
        assert told.nats_url == "tls://nats:4222"
        assert services[service]["build"]["args"] == {"SERVICE": service}


@pytest.mark.compose
def test_a_service_is_stopped_only_after_it_could_drain(services: dict[str, Any]) -> None:
    for service, kind in SETTINGS.items():
        drain_s = parse_settings(kind, service, services[service]["environment"]).drain_s
        assert float(services[service]["stop_grace_period"].rstrip("s")) > drain_s + 5


@pytest.mark.compose
def test_only_the_gateway_is_reached_from_outside_and_only_from_this_machine(
    services: dict[str, Any],
) -> None:
    published = {name: service["ports"] for name, service in services.items() if "ports" in service}
    assert [port["host_ip"] for port in published.pop("gateway")] == ["127.0.0.1"]
    assert published == {}


@pytest.mark.compose
def test_nothing_is_root_or_may_become_it(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name != "trtllm-worker":
            assert service["cap_drop"] == ["ALL"], name
            assert service["security_opt"] == ["no-new-privileges:true"], name
            assert service["read_only"], name


@pytest.mark.compose
def test_workers_can_be_many_and_see_the_same_memory(services: dict[str, Any]) -> None:
    for name in WORKERS:
        worker = services[name]
        assert not {"container_name", "hostname", "ports"} & set(worker)
        mounts = {volume["target"]: volume["source"] for volume in worker["volumes"]}
        assert mounts["/dev/shm"] == "kv"


@pytest.mark.compose
def test_each_service_sees_the_key_of_its_own_role_only(services: dict[str, Any]) -> None:
    for name in (*SETTINGS, "nats", "supervisor", "operator"):
        mounted = [v["source"] for v in services[name]["volumes"] if v["target"] == "/run/keys"]
        assert mounted == [f"keys-{name}"]
        assert not [v for v in services[name]["volumes"] if v["source"] == "keys"]
    for name in (*SETTINGS, "supervisor"):
        assert services[name]["entrypoint"][:4] == [
            *("python", "-m", "diptych_chassis.containers.enter"),
            name,
        ]
        assert services[name]["cap_add"] == ["SETUID", "SETGID", "KILL"]


def test_nats_runs_as_in_diptych_up() -> None:
    shipped = _pairs((TOP / "infra/nats/nats-server.conf").read_text())
    guard = Guard(TOP, TOP, cast(Access, None))
    embedded = _pairs(config_text(TOP, port=4222, guard=guard))
    where = {"host", "http", "store_dir", "ports_file_dir", "cert_file", "key_file"}
    assert {k: v for k, v in shipped.items() if k not in where} == {
        k: v for k, v in embedded.items() if k not in where
    }
    assert shipped["max_payload"] == "4194304"


def _pairs(config: str) -> dict[str, str]:
    return dict(re.findall(r"^ *(\w+): (\S+)$", config, flags=re.MULTILINE))
