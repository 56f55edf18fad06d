"""`/openapi.json`: valid by others' judgement, and true: `schemathesis` finds no other answer."""

import json
import os
import re
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from diptych_testkit.live_stack import MODEL, LiveStack
from diptych_testkit.outside_clients import OutsideClients

pytestmark = pytest.mark.clients

FUZZ_S = int(os.environ.get("DIPTYCH_FUZZ_S", "60"))
"""`make openapi` takes five minutes."""
SEED = 20261129
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_headers_conformance,response_schema_conformance,unsupported_method,"
    "allow_header_conformance"
)


@pytest.fixture
def document(sim: LiveStack) -> Any:
    url = sim.base_url.replace("/v1", "/openapi.json")
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def test_the_document_is_valid(outside: OutsideClients, document: Any, tmp_path: Path) -> None:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(document))
    said = outside.run([outside.command("openapi-spec-validator"), str(path)], tmp_path)
    assert said.strip().endswith("OK")
    lint = [outside.command("node"), str(outside.folder / "node_modules/@redocly/cli/bin/cli.js")]
    skipped = ["--skip-rule=operation-2xx-response"]  # of what no model does yet
    off = {"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true", "CI": "1"}
    command = [*lint, "lint", str(path), "--format=json", *skipped]
    report = json.loads(outside.run(command, tmp_path, off))
    assert report["totals"] == {"errors": 0, "warnings": 0, "ignored": 0}, report["problems"]


def test_every_status_is_in_its_own_response(document: Any) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            statuses = set(operation["responses"])
            assert {"400", "500", "503"} <= statuses, (path, method)
            assert all(re.fullmatch("[2-5][0-9][0-9]", status) for status in statuses)


@pytest.mark.timeout(FUZZ_S + 900)
def test_no_request_gets_an_answer_that_is_not_described(
    outside: OutsideClients, sim: LiveStack, document: Any, tmp_path: Path
) -> None:
    path = tmp_path / "openapi.json"
    path.write_text(json.dumps(pinned(document)))
    command = [outside.command("st"), "run", str(path), "--url", sim.base_url.removesuffix("/v1")]
    command += ["--checks", CHECKS, "--seed", str(SEED), "--max-time", str(FUZZ_S)]
    command += ["--phases", "examples,coverage,fuzzing,stateful", "--workers", "1", "--no-color"]
    command += ["--suppress-health-check", "all", "--request-timeout", "120"]
    command += ["--continue-on-failure", "--generation-database", "none"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=outside.environment(),
        capture_output=True,
        text=True,
        timeout=FUZZ_S + 600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    (tested,) = re.findall(r"Tested: (\d+)", done.stdout)
    (cases,) = re.findall(r"(\d+) generated", done.stdout)
    assert int(tested) == sum(len(methods) for methods in document["paths"].values())
    assert int(cases) >= FUZZ_S


def pinned(document: Any) -> Any:
    """`document`, but of the served model and short answers: else the most are a 404, or long."""
    for schema in document["components"]["schemas"].values():
        properties = schema.get("properties", {})
        if schema.get("additionalProperties") is False and "model" in properties:
            properties["model"] = {"enum": [MODEL]}
            for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                if name in properties:
                    properties[name] = {"type": "integer", "minimum": 1, "maximum": 8}
    return document
