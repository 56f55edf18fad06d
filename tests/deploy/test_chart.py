"""The Helm chart, rendered by Helm's own code (its SDK) and held against Kubernetes's schemas.

It was never installed in a cluster: what only a cluster can tell is not told here.
"""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych_chassis.settings import ServiceSettings, parse_settings
from diptych_decode_worker.settings import DecodeWorkerSettings
from diptych_engine.adapters import ADAPTERS
from diptych_gateway.settings import GatewaySettings
from diptych_identity.roles import Role
from diptych_power_governor.settings import GovernorSettings
from diptych_prefill_worker.settings import PrefillWorkerSettings
from diptych_scheduler.settings import SchedulerSettings

helm = pytest.importorskip("helm_python", reason="make deploy installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make deploy installs it")
pytestmark = pytest.mark.deploy

TOP = Path(__file__).parents[2]
CHART = TOP / "infra/helm/diptych"
ENGINES = sorted(p.stem.removeprefix("values-") for p in CHART.glob("values-*.yaml"))
KUBERNETES = ("1.29", "1.37")
SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "prefill-worker": PrefillWorkerSettings,
    "decode-worker": DecodeWorkerSettings,
    "power-governor": GovernorSettings,
    "supervisor": ServiceSettings,
}
Manifest = dict[str, Any]


def values_of(*engines: str) -> dict[str, Any]:
    """The values of several files, later ones over earlier ones, as `helm --values` merges."""
    told: dict[str, Any] = {}
    for engine in engines:
        if engine:
            _over(told, yaml.safe_load((CHART / f"values-{engine}.yaml").read_text()))
    return told


def _over(values: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _over(values[key], value)
        else:
            values[key] = value


def rendered(values: dict[str, Any]) -> list[Manifest]:
    with helm.Chart.load(CHART) as chart:
        texts = chart.render(values, name="house", namespace="here")
    files = {name: text for name, text in texts.items() if name.endswith(".yaml")}
    return [doc for text in files.values() for doc in yaml.safe_load_all(text) if doc]


@cache
def chart(engine: str = "") -> tuple[Manifest, ...]:
    return tuple(rendered(values_of(engine)))


def named(found: tuple[Manifest, ...], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in found if m["kind"] == kind}


def containers(found: tuple[Manifest, ...]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each container, with its pod and the component it belongs to."""
    for manifest in found:
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            pod = manifest["spec"]["template"]["spec"]
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            for container in (*pod.get("initContainers", ()), *pod["containers"]):
                yield labels["app.kubernetes.io/component"], container, pod


@pytest.mark.parametrize("engine", ["", *ENGINES])
def test_helm_finds_no_fault(engine: str) -> None:
    report = helm.lint(CHART, values_of(engine), strict=True)
    assert [m for m in report["messages"] if m["severity"] > 1] == []
    assert report["errors"] == []


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("engine", ["", *ENGINES])
def test_kubernetes_knows_every_field(engine: str, version: str) -> None:
    assert len(chart(engine)) > 20
    for manifest in chart(engine):
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("engine", ["", *ENGINES])
def test_no_two_things_have_one_name(engine: str) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in chart(engine)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("engine", ["", *ENGINES])
def test_every_service_is_there_and_its_settings_are_ones_it_knows(engine: str) -> None:
    seen = set()
    for component, container, pod in containers(chart(engine)):
        if component not in SETTINGS or container["name"] in ("engine", "models"):
            continue
        seen.add(component)
        environment = {e["name"]: e["value"] for e in container["env"] if "value" in e}
        told = parse_settings(SETTINGS[component], component, _known(environment))
        assert told.nats_url == "tls://house-nats:4222"
        assert pod["terminationGracePeriodSeconds"] >= told.drain_s + 15
        assert container["command"][-2:] == ["diptych_chassis.containers.enter", component]
        assert container["image"].startswith("diptych-")
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] == "health"
        assert container["readinessProbe"]["httpGet"]["path"] == "/health/ready"
        assert container["livenessProbe"]["httpGet"]["path"] == "/health/live"
    assert seen == set(SETTINGS)


def _known(environment: dict[str, str]) -> dict[str, str]:
    """Without an engine whose adapter this tree does not have."""
    known = ("llamacpp", "sim", *ADAPTERS)
    return {k: v for k, v in environment.items() if not k.endswith("__ENGINE") or v in known}


@pytest.mark.parametrize("engine", ["", *ENGINES])
def test_each_pod_sees_the_key_of_its_own_role_only(engine: str) -> None:
    roles = {role.value for role in Role}
    for component, container, pod in containers(chart(engine)):
        secrets = [v["secret"] for v in pod["volumes"] if "secret" in v]
        mounted = [m for m in container.get("volumeMounts", ()) if m["mountPath"] == "/run/keys"]
        if container["name"] in ("engine", "models"):
            assert mounted == [], "whoever is no service of ours gets no key"
            continue
        assert [s["secretName"] for s in secrets] == [f"diptych-keys-{component}"]
        assert mounted[0]["readOnly"]
        if component != "nats":
            assert component in roles
            modes = {item["path"]: item["mode"] for item in secrets[0]["items"]}
            assert modes == {"role.key": 0o400, "trust.pem": 0o444}


@pytest.mark.parametrize("engine", ["", *ENGINES])
def test_nothing_keeps_what_it_does_not_need_of_root(engine: str) -> None:
    for component, container, pod in containers(chart(engine)):
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"]["drop"] == ["ALL"]
        assert pod["automountServiceAccountToken"] is False
        if component in SETTINGS and container["name"] == component:
            assert security["capabilities"]["add"] == ["SETUID", "SETGID", "KILL"]
        if container["name"] != "engine":
            assert security["readOnlyRootFilesystem"]


def test_roles_scale_apart_and_a_scaler_may_own_the_number() -> None:
    found = named(chart(), "Deployment")
    assert found["house-smollm2-prefill"]["spec"]["replicas"] == 1
    assert found["house-smollm2-decode"]["spec"]["replicas"] == 1
    values = {"pools": {"smollm2": {"decode": {"replicas": None}, "prefill": {"replicas": 5}}}}
    scaled = named(tuple(rendered(values)), "Deployment")
    assert scaled["house-smollm2-prefill"]["spec"]["replicas"] == 5
    assert "replicas" not in scaled["house-smollm2-decode"]["spec"]
    budgets = named(chart(), "PodDisruptionBudget")
    for name in ("gateway", "scheduler", "smollm2-prefill", "smollm2-decode"):
        selector = budgets[f"house-{name}"]["spec"]["selector"]
        assert selector == found[f"house-{name}"]["spec"]["selector"]


def test_engines_of_different_kinds_stand_behind_one_gateway() -> None:
    mixed = values_of("vllm", "sglang")
    del mixed["pools"]["smollm2"]
    found = tuple(rendered(mixed))
    workers = {n for n in named(found, "Deployment") if n.endswith(("-prefill", "-decode"))}
    pools = {name.removeprefix("house-").rsplit("-", 1)[0] for name in workers}
    assert pools == {"smollm2", "vllm", "sglang"}
    assert len([n for n in named(found, "Deployment") if "gateway" in n]) == 1


def test_nats_is_configured_as_elsewhere() -> None:
    shipped = (TOP / "infra/nats/nats-server.conf").read_text()
    assert (CHART / "files/nats-server.conf").read_text() == shipped
    told = named(chart(), "ConfigMap")["house-nats"]["data"]["diptych.conf"]
    assert told.rstrip() == shipped.rstrip()
    compose = yaml.safe_load((TOP / "docker-compose.yml").read_text())["services"]["nats"]
    ours = named(chart(), "StatefulSet")["house-nats"]["spec"]["template"]["spec"]["containers"][0]
    assert ours["image"] == compose["image"]
    assert ours["command"] == compose["command"]


def test_a_server_elsewhere_takes_the_place_of_our_own() -> None:
    values = {"nats": {"embedded": False, "url": "tls://nats.example:4222"}}
    found = tuple(rendered(values))
    assert named(found, "StatefulSet") == {}
    environment = [e for _, c, _ in containers(found) for e in c.get("env", ())]
    told = {e["value"] for e in environment if "NATS" in e["name"]}
    assert told == {"tls://nats.example:4222"}
    with pytest.raises(helm.HelmError, match=r"nats\.url must name the server"):
        rendered({"nats": {"embedded": False}})


def test_the_policies_are_those_of_the_plain_files() -> None:
    plain = yaml.safe_load_all((TOP / "infra/kubernetes/network/policies.yaml").read_text())
    wanted = {p["metadata"]["name"].removeprefix("diptych-"): p["spec"] for p in plain}
    found = named(chart(), "NetworkPolicy")
    ours = {name.removeprefix("house-"): _plain(p["spec"]) for name, p in found.items()}
    assert ours.pop("smollm2-hub")["egress"][0]["ports"] == [{"protocol": "TCP", "port": 443}]
    # One server, so no routes between servers.
    wanted["nats"]["ingress"] = wanted["nats"]["ingress"][:1]
    wanted["nats"]["egress"] = []
    assert ours == wanted


def _plain(spec: Any) -> Any:
    """Without the label that tells releases apart; engines of a pool's own are like NATS."""
    if isinstance(spec, list):
        return [_plain(item) for item in spec if item != "engine"]
    if isinstance(spec, dict):
        kept = {k: v for k, v in spec.items() if k != "app.kubernetes.io/instance"}
        return {key: _plain(value) for key, value in kept.items()}
    return spec


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
def test_transceivers_reach_each_other_and_nobody_else(engine: str) -> None:
    found = named(chart(engine), "NetworkPolicy")
    for here, there in (("prefill", "decode"), ("decode", "prefill")):
        spec = found[f"house-{engine}-{here}-transceiver"]["spec"]
        assert spec["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == f"{here}-worker"
        for rule in (*[r["from"] for r in spec["ingress"]], *[r["to"] for r in spec["egress"]]):
            (peer,) = rule
            labels = peer["podSelector"]["matchLabels"]
            assert labels["app.kubernetes.io/component"] == f"{there}-worker"
            assert labels["diptych/pool"] == engine


def test_engines_listen_where_docs_network_says() -> None:
    page = (TOP / "docs/network.md").read_text()
    listed = {int(port) for port in re.findall(r"^\| engine: [^|]+\| (\d+) ", page, re.M)}
    used = set()
    for engine in ENGINES:
        for _, container, _ in containers(chart(engine)):
            if container["name"] == "engine":
                used |= {port["containerPort"] for port in container["ports"]}
                used |= {int(p) for p in re.findall(r"tcp://[^:]+:(\d+)", str(container["args"]))}
    assert used <= listed
