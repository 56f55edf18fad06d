"""The Kubernetes examples and docs/network.md say the ports that the code has."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from diptych_chassis.settings import ServiceSettings
from diptych_gateway.settings import GatewaySettings
from diptych_worker.settings import WorkerSettings

TOP = Path(__file__).parents[2]
FOLDER = TOP / "infra/kubernetes/network"
GATEWAY, HEALTH, NATS, ROUTES, KV, OTLP, DNS = 8080, 8081, 4222, 6222, 7070, 4318, 53
OPAQUE = {NATS, ROUTES, KV}


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.fixture(scope="module")
def policies() -> dict[str, Any]:
    return {policy["metadata"]["name"]: policy["spec"] for policy in documents("policies.yaml")}


def ports(rules: list[dict[str, Any]]) -> set[int]:
    return {port["port"] for rule in rules for port in rule["ports"]}


def test_the_ports_are_the_code_s() -> None:
    assert GatewaySettings.__dataclass_fields__["port"].default == GATEWAY
    assert ServiceSettings.__dataclass_fields__["nats_url"].default.endswith(f":{NATS}")
    assert WorkerSettings.__dataclass_fields__["kv_port"].default == 0
    dockerfile = (TOP / "infra/docker/service.Dockerfile").read_text()
    assert f"DIPTYCH_ALL__HEALTH_PORT={HEALTH}" in dockerfile
    assert f"EXPOSE {HEALTH}" in dockerfile
    server = (TOP / "infra/nats/nats-server.conf").read_text()
    assert re.search(rf"^port: {NATS}$", server, flags=re.MULTILINE)


def test_nothing_is_open_but_what_a_policy_opens(policies: dict[str, Any]) -> None:
    closed = policies["diptych-nothing-else"]
    assert closed["podSelector"] == {"matchLabels": {"app.kubernetes.io/part-of": "diptych"}}
    assert set(closed["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in closed
    assert ports(closed["egress"]) == {DNS}
    for name, policy in policies.items():
        for kind in ("ingress", "egress"):
            assert (kind in policy) == (kind.title() in policy["policyTypes"]) or policy is closed
            for rule in policy.get(kind, []):
                assert rule.get("from", rule.get("to")), f"{name} opens {kind} to everybody"
                assert rule["ports"], f"{name} opens every port"


def test_each_policy_opens_its_ports(policies: dict[str, Any]) -> None:
    opened = {
        name: (ports(policy.get("ingress", [])), ports(policy.get("egress", [])))
        for name, policy in policies.items()
    }
    assert opened == {
        "diptych-nothing-else": (set(), {DNS}),
        "diptych-gateway": ({GATEWAY}, set()),
        "diptych-metrics": ({HEALTH}, set()),
        "diptych-to-nats": (set(), {NATS, OTLP}),
        "diptych-nats": ({NATS, ROUTES}, {ROUTES}),
        "diptych-kv-in": ({KV}, set()),
        "diptych-kv-out": (set(), {KV}),
    }


def test_components_are_services_that_exist() -> None:
    known = {folder.name for folder in (TOP / "services").iterdir()} | {"nats"}
    text = "".join((FOLDER / name).read_text() for name in ("policies.yaml", "mesh.yaml"))
    assert set(re.findall(r"app\.kubernetes\.io/component: ([a-z-]+)", text)) <= known


def test_a_mesh_is_told_which_ports_are_opaque() -> None:
    for service in documents("mesh.yaml"):
        told = service["metadata"].get("annotations", {}).get("config.linkerd.io/opaque-ports", "")
        opaque = {int(port) for port in told.split(",") if port}
        for port in service["spec"]["ports"]:
            assert (port["port"] in opaque) == (port["port"] in OPAQUE)
            assert port["appProtocol"] == ("tcp" if port["port"] in OPAQUE else "http")
            assert port["name"].startswith(port["appProtocol"] + "-")


def test_the_page_has_every_port() -> None:
    page = (TOP / "docs/network.md").read_text()
    for port in (GATEWAY, HEALTH, NATS, ROUTES, KV, OTLP):
        assert re.search(rf"\| {port}[ ,|]", page), port
    opaque = {int(p) for p in re.findall(r"^\| [^|]+ \| (\d+) .*\*\*opaque\*\* \|$", page, re.M)}
    assert opaque == OPAQUE
