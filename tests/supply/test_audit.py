"""Licences, vulnerabilities and bills of materials of what is installed."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from diptych_testkit.supply import __main__ as command
from diptych_testkit.supply import auditing, sbom, vulnerabilities
from diptych_testkit.supply.auditing import Findings
from diptych_testkit.supply.closure import closure_of
from diptych_testkit.supply.licences import fits, misfits
from diptych_testkit.supply.pins import Pin

TOP = Path(__file__).parents[2]
ALLOWED = ("MIT", "Apache-2.0", "BSD-3-Clause")


def test_every_installed_licence_fits_or_is_excepted_with_a_reason() -> None:
    findings = Findings()
    auditing._look_at_licences(TOP, findings)
    assert findings.faults == []
    assert findings.notes


@pytest.mark.parametrize(
    ("licence", "fit"),
    [
        ("MIT", True),
        ("MIT OR GPL-3.0-only", True),
        ("MIT AND Apache-2.0", True),
        ("MIT AND GPL-3.0-only", False),
        ("GPL-3.0-only OR AGPL-3.0-only", False),
        ("NOASSERTION", False),
    ],
)
def test_one_may_choose_but_not_leave_out(licence: str, fit: bool) -> None:
    assert fits(licence, ALLOWED) == fit


def test_exceptions_are_for_one_licence_and_go_when_they_are_not_needed() -> None:
    excepted = {name: {"licence": "MPL-2.0", "reason": "unmodified"} for name in "abc"}
    told = {"a": "MPL-2.0", "b": "MIT", "c": "GPL-3.0-only", "d": "GPL-3.0-only"}
    assert [line.split()[0] for line in misfits(told, ALLOWED, excepted)] == ["b", "c", "d"]


@contextmanager
def database(answer: bytes, status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    heard: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", heard
        finally:
            server.shutdown()
            thread.join()


def test_known_vulnerabilities_are_named_by_package() -> None:
    answer = json.dumps({"results": [{}, {"vulns": [{"id": "GHSA-2"}, {"id": "GHSA-1"}]}]})
    with database(answer.encode()) as (url, heard):
        found = vulnerabilities.known(["pkg:pypi/a@1", "pkg:pypi/b@2"], url)
    assert found == {"pkg:pypi/b@2": ["GHSA-1", "GHSA-2"]}
    asked = [query["package"]["purl"] for query in heard[0]["queries"]]
    assert asked == ["pkg:pypi/a@1", "pkg:pypi/b@2"]


@pytest.mark.parametrize(
    ("answer", "status"),
    [(b'{"results": []}', 200), (b"<html>", 200), (b"{}", 200), (b"no", 404), (b"no", 503)],
)
def test_what_does_not_answer_is_not_taken_for_a_clean_bill(answer: bytes, status: int) -> None:
    with database(answer, status) as (url, _), pytest.raises(vulnerabilities.DatabaseUnreachable):
        vulnerabilities.known(["pkg:pypi/a@1"], url)


def test_a_vulnerability_is_accepted_with_a_reason_until_a_day() -> None:
    found = {"pkg:pypi/a@1": ["OLD", "NOW", "MUTE", "NEW"]}
    accepted = [
        {"id": "OLD", "reason": "x", "until": date(2026, 1, 1)},
        {"id": "NOW", "reason": "x", "until": date(2027, 1, 1)},
        {"id": "MUTE", "reason": " ", "until": date(2027, 1, 1)},
    ]
    told = list(vulnerabilities.unaccepted(found, accepted, date(2026, 6, 1)))
    assert [line.split()[2].rstrip(",") for line in told] == ["OLD", "MUTE", "NEW"]


def test_npm_packages_are_asked_about_too() -> None:
    asked = vulnerabilities.purls([Pin("h11", "1")], TOP / auditing.NPM_LOCK)
    assert asked[0] == "pkg:pypi/h11@1"
    assert any(purl.startswith("pkg:npm/%40ai-sdk/openai-compatible@") for purl in asked)


@pytest.mark.parametrize(
    ("findings", "options", "code"),
    [
        (Findings(), [], 0),
        (Findings(unasked=["x"]), [], 0),
        (Findings(unasked=["x"]), ["--strict"], command.UNASKED),
        (Findings(faults=["y"], unasked=["x"]), [], command.FAULTS),
    ],
)
def test_the_exit_code_says_whether_all_was_asked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    findings: Findings,
    options: list[str],
    code: int,
) -> None:
    monkeypatch.setattr(auditing, "audit", lambda _: findings)
    assert command.main(["audit", *options]) == code
    assert ("NOT AUDITED: x" in capsys.readouterr().out) == bool(findings.unasked)


@pytest.mark.parametrize("service", sbom.SERVICES)
def test_a_bill_of_materials_is_valid_complete_and_the_same_each_time(service: str) -> None:
    closure = closure_of(TOP, service)
    bill = sbom.bill_of(service, closure)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bill)) is None
    assert bill == sbom.bill_of(service, closure_of(TOP, service))
    names = {component["name"].lower() for component in bill["components"]}
    assert {"msgspec", "nats-py", "cryptography"} <= names
    assert ("xllamacpp" in names) == service.endswith("-worker")
    assert ("starlette" in names) == (service == "gateway")
    assert not {"pytest", "ruff", "hatchling", "pip"} & names
    assert all("licenses" in component for component in bill["components"])


def test_each_service_has_one() -> None:
    assert {folder.name for folder in (TOP / "services").iterdir()} == set(sbom.SERVICES)
