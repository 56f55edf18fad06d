"""What can be said of the compose file without an engine; by the real compose binary."""

import re
import tomllib
from typing import Any, cast

import pytest
import yaml

from diptych_bus.access import Access
from diptych_bus.server import Guard, config_text
from diptych_chassis.settings import ServiceSettings, parse_settings
from diptych_contracts.fleet import Role
from diptych_decode_worker.settings import DecodeWorkerSettings
from diptych_engine.adapters import ADAPTERS
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
ENGINES = ("triton", "vllm", "sglang", "tensorrt-llm")
SHIPPED = "docker-compose.yml"
CI = f"{SHIPPED}:infra/ci/compose.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(ComposeStack().told(COMPOSE_FILE=SHIPPED).config()["services"])


@pytest.mark.compose
@pytest.mark.parametrize("files", [SHIPPED, CI])
@pytest.mark.parametrize("profile", ["", "tools", *ENGINES])
def test_compose_finds_no_fault(files: str, profile: str) -> None:
    chosen = ("--profile", profile) if profile else ()
    assert ComposeStack().told(COMPOSE_FILE=files).run(*chosen, "config", "--quiet") == ""


@pytest.mark.compose
def test_triton_takes_gpus_by_a_file_of_their_own(services: dict[str, Any]) -> None:
    assert "deploy" not in services["triton"]
    with_gpus = ComposeStack().told(COMPOSE_FILE=f"{SHIPPED}:infra/compose/triton-gpu.yml")
    told = with_gpus.config()["services"]["triton"]
    assert _gpus(told) == [{"driver": "nvidia", "count": -1, "capabilities": ["gpu"]}]


@pytest.mark.compose
@pytest.mark.parametrize("engine", ENGINES)
def test_a_profile_adds_a_pair_of_workers_in_front_of_its_engine(
    services: dict[str, Any], engine: str
) -> None:
    mine = {name for name, told in services.items() if told.get("profiles") == [engine]}
    assert {f"{engine}-prefill-worker", f"{engine}-decode-worker"} <= mine
    assert all("profiles" not in services[name] for name in (*SETTINGS, "nats", "supervisor"))
    for role in Role:
        service = f"{role.value}-worker"
        told = services[f"{engine}-{service}"]
        environment = dict(told["environment"])
        start = f"DIPTYCH_{role.value.upper()}_WORKER__"
        chosen = environment.pop(f"{start}ENGINE").replace("_", "-")
        assert chosen == engine
        settings = parse_settings(SETTINGS[service], service, environment)
        assert settings.nats_url == "tls://nats:4222"
        assert told["build"]["args"]["SERVICE"] == service
        assert told["entrypoint"][-2:] == [service, "serve"]
        assert told["cap_add"] == ["SETUID", "SETGID", "KILL"]
        keys = [v["source"] for v in told["volumes"] if v["target"] == "/run/keys"]
        assert keys == [f"keys-{service}"]
        assert set(told["networks"]) == {"default", "engines"}
        assert float(told["stop_grace_period"].rstrip("s")) > settings.drain_s + 5


@pytest.mark.compose
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_reaches_nobody_but_its_like_and_its_workers(
    services: dict[str, Any], engine: str
) -> None:
    """It asks nobody who he is."""
    servers = [
        told
        for name, told in services.items()
        if told.get("profiles") == [engine] and not name.endswith("-worker")
    ]
    assert len(servers) == {"triton": 1, "tensorrt-llm": 0}.get(engine, 2)
    for told in servers:
        assert set(told["networks"]) == {"engines"}
        assert "ports" not in told
        assert not [v for v in told["volumes"] if "keys" in v["source"]]
        assert ":" in told["image"]
        assert not told["image"].endswith(":latest")
        assert told["healthcheck"]["test"][1] == "python3"


@pytest.mark.compose
def test_each_phase_has_a_gpu_of_its_own(services: dict[str, Any]) -> None:
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        suffix = "-worker" if engine == "tensorrt-llm" else ""
        for role, gpu in (("prefill", "0"), ("decode", "1")):
            (device,) = _gpus(services[f"{engine}-{role}{suffix}"])
            assert device == {"driver": "nvidia", "device_ids": [gpu], "capabilities": ["gpu"]}


def _gpus(service: dict[str, Any]) -> list[dict[str, Any]]:
    return list(service["deploy"]["resources"]["reservations"]["devices"])


@pytest.mark.compose
def test_engines_listen_where_docs_network_says(services: dict[str, Any]) -> None:
    page = (TOP / "docs/network.md").read_text()
    listed = set(re.findall(r"^\| engine: [^|]+\| (\d+) ", page, re.MULTILINE))
    used = set()
    for engine in ENGINES:
        for told in services.values():
            if told.get("profiles") == [engine]:
                words = " ".join((told.get("entrypoint") or []) + (told.get("command") or []))
                used |= set(re.findall(r"port=(\d+)|tcp://\*:(\d+)", words))
                environment = told.get("environment") or {}
                urls = [v for k, v in environment.items() if k.endswith("__ENGINE_URL")]
                used |= {(url.rsplit(":", 1)[1], "") for url in urls}
    assert {number for pair in used for number in pair if number} <= listed


def test_adapters_have_names_that_the_profiles_use() -> None:
    forms = {"trtllm_serve"}  # the second form of TensorRT-LLM
    assert {name.replace("_", "-") for name in set(ADAPTERS) - forms} <= set(ENGINES)


def test_what_adapters_are_told_in_files_can_be_read() -> None:
    for role in ("prefill", "decode"):
        told = tomllib.loads((TOP / f"infra/compose/vllm-{role}.toml").read_text())
        assert told == {
            "kv_events": f"tcp://vllm-{role}:5557",
            "kv_replay": f"tcp://vllm-{role}:5558",
        }
    told = tomllib.loads((TOP / "infra/compose/sglang-decode.toml").read_text())
    assert told == {"prefill_url": "http://sglang-prefill:8200"}


def test_compose_and_helm_name_the_same_engines() -> None:
    compose = (TOP / "docker-compose.yml").read_text()
    charts = (TOP / "infra/helm/diptych").glob("values-*.yaml")
    values = [yaml.safe_load(chart.read_text())["pools"] for chart in charts]
    pools = {name: pool for pools in values for name, pool in pools.items() if pool}
    assert set(pools) == set(ENGINES)
    for pool in pools.values():
        if "server" in pool:
            assert f":-{pool['server']['image']}}}" in compose


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
    engines = ("triton", "vllm-prefill", "vllm-decode", "sglang-prefill", "sglang-decode")
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service.get("read_only", False) == (name not in engines), name


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
