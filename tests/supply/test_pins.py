"""What is pinned is hashed, and what is not as pinned is named."""

import json
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.tags import parse_tag

from diptych_testkit.supply import hashes
from diptych_testkit.supply.index import Wheel, usable, wheels_of
from diptych_testkit.supply.pins import Pin, hash_file, hashes_in, pins_in

TOP = Path(__file__).parents[2]
DIGEST = "ab" * 32
WHEEL = "toy-1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def install() -> dict[str, Any]:
    return runpy.run_path(str(TOP / "infra/supply/install.py"))


def item(name: str, version: str, digest: str) -> dict[str, Any]:
    archive = {"hashes": {"sha256": digest}}
    file = f"{name}-{version}-py3-none-any.whl"
    return {
        "metadata": {"name": name, "version": version},
        "download_info": {"url": f"https://index.invalid/{file}", "archive_info": archive},
    }


def test_every_pin_has_its_hashes_and_nothing_else_has() -> None:
    assert list(hashes.unequal(TOP)) == []


def test_the_pin_file_has_names_and_versions_only() -> None:
    lines = (TOP / "constraints.txt").read_text().splitlines()
    assert len(pins_in("\n".join(lines))) == len(lines) == len(set(lines))


def test_no_hash_file_names_a_host() -> None:
    for target in [*hashes.FILES.values(), "tests/clients/npm/package-lock.json"]:
        text = (TOP / target).read_text()
        assert "registry" not in text
        assert '"resolved"' not in text
        assert "index-url" not in text


def test_each_npm_package_has_its_integrity() -> None:
    lock = json.loads((TOP / "tests/clients/npm/package-lock.json").read_text())
    packages = {path: package for path, package in lock["packages"].items() if path}
    assert packages
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    wanted = json.loads((TOP / "tests/clients/npm/package.json").read_text())["dependencies"]
    locked = {name: packages[f"node_modules/{name}"]["version"] for name in wanted}
    assert locked == wanted


def test_a_missing_pin_and_one_too_many_are_named(tmp_path: Path) -> None:
    for source, target in hashes.FILES.items():
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_text("toy==1.0\n")
        (tmp_path / target).write_text(hash_file(source, {Pin("toy", "2.0"): [DIGEST]}))
    told = list(hashes.unequal(tmp_path))
    assert "toy==1.0 of constraints.txt is not in infra/supply/hashes.txt: make hashes" in told
    assert "toy==2.0 of infra/supply/hashes.txt is not in constraints.txt: make hashes" in told


def test_a_hash_file_is_read_as_it_was_written(install: dict[str, Any]) -> None:
    written = {
        Pin("a-b", "1.0"): frozenset({DIGEST, "cd" * 32}),
        Pin("c", "2"): frozenset({DIGEST}),
    }
    text = hash_file("constraints.txt", written)
    assert hashes_in(text) == written
    assert set(install["hash_lines"](text)) == {"a-b==1.0", "c==2"}


@pytest.mark.parametrize("line", ["toy>=1", "toy", "toy @ https://x.invalid/toy.whl", "-r more"])
def test_what_is_no_pin_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="expected name==version"):
        pins_in(line)


@pytest.mark.parametrize(
    ("tags", "taken"),
    [
        ("py3-none-any", True),
        ("py2.py3-none-any", True),
        ("cp311-cp311-manylinux_2_17_x86_64", True),
        ("cp314-cp314t-musllinux_1_2_aarch64", True),
        ("cp38-abi3-macosx_11_0_arm64", True),
        ("cp310-cp310-manylinux_2_17_x86_64", False),
        ("cp312-cp312-win_amd64", False),
        ("pp311-pypy311_pp73-manylinux_2_17_x86_64", False),
    ],
)
def test_wheels_that_nobody_here_can_use_are_not_listed(tags: str, taken: bool) -> None:
    assert any(map(usable, parse_tag(tags))) == taken


def test_an_extra_is_replaced_by_what_it_stands_for(install: dict[str, Any]) -> None:
    project = {
        "dependencies": ["m>=1"],
        "optional-dependencies": {"a": ["diptych[b,c]", "x>=2"], "b": ["y"], "c": ["diptych[b]"]},
    }
    assert sorted(install["requirements"](project, ["a"])) == ["m>=1", "x>=2", "y"]
    with pytest.raises(Exception, match="no extra 'z'"):
        list(install["requirements"](project, ["z"]))


def test_a_changed_wheel_is_refused_by_name(install: dict[str, Any]) -> None:
    known = install["hash_lines"](hash_file("constraints.txt", {Pin("toy", "1.0"): [DIGEST]}))
    pinned: Callable[..., str] = install["pinned"]
    assert pinned(item("toy", "1.0", DIGEST), known).startswith("toy==1.0 --hash=sha256:")
    with pytest.raises(Exception, match=f"toy==1.0: {WHEEL} has sha256 {'0' * 64}, which is not"):
        pinned(item("toy", "1.0", "0" * 64), known)
    with pytest.raises(Exception, match=r"other==1\.0 is not in infra/supply/hashes\.txt"):
        pinned(item("other", "1.0", DIGEST), known)


def toy_index(folder: Path, content: bytes = b"", yanked: str | None = None) -> Path:
    """An index of one package, as pip reads it from a disk; its wheel is a real one."""
    import hashlib
    import zipfile

    page = folder / "toy"
    page.mkdir(parents=True)
    with zipfile.ZipFile(page / WHEEL, "w") as wheel:
        wheel.writestr("toy.py", content)
        about = "toy-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256((page / WHEEL).read_bytes()).hexdigest()
    mark = f' data-yanked="{yanked}"' if yanked is not None else ""
    html = f'<!DOCTYPE html><a href="{WHEEL}#sha256={digest}"{mark}>{WHEEL}</a>'
    (page / "index.html").write_text(html)
    return folder


def asked(index: Path) -> list[Wheel]:
    pin = Pin("toy", "1.0")
    return wheels_of([pin], "--isolated", "--index-url", index.as_uri())[pin]


def test_pip_s_inner_parts_tell_digest_and_withdrawal(tmp_path: Path) -> None:
    (kept,) = asked(toy_index(tmp_path / "kept"))
    (yanked,) = asked(toy_index(tmp_path / "yanked", yanked="leaks"))
    assert (kept.filename, kept.yanked) == (WHEEL, None)
    assert list(hashes.withdrawn({Pin("toy", "1.0"): [kept]})) == []
    told = list(hashes.withdrawn({Pin("toy", "1.0"): [yanked], Pin("no", "1"): []}))
    assert told == [
        "toy==1.0 was withdrawn by its maintainers: leaks",
        "no==1 is gone from the index",
    ]


def test_a_wheel_that_came_later_is_noted() -> None:
    pin = Pin("toy", "1.0")
    found = {pin: [Wheel(WHEEL, DIGEST), Wheel("toy-1.0-cp399-none-any.whl", "0" * 64)]}
    told = list(hashes.unpinned({pin: frozenset({DIGEST})}, found))
    assert told == [f"toy==1.0: toy-1.0-cp399-none-any.whl is not pinned (sha256 {'0' * 64})"]


def test_only_the_pinned_wheel_is_installed(tmp_path: Path) -> None:
    """The whole way, by pip: the right wheel is installed; another under its name is named."""
    right, forged = toy_index(tmp_path / "right"), toy_index(tmp_path / "forged", b"evil = 1\n")
    (pinned,) = asked(right)
    project = tmp_path / "project"
    (project / "infra/supply").mkdir(parents=True)
    (project / "constraints.txt").write_text("toy==1.0\n")
    text = hash_file("constraints.txt", {Pin("toy", "1.0"): [pinned.sha256]})
    (project / "infra/supply/hashes.txt").write_text(text)
    (project / "pyproject.toml").write_text(
        '[project]\ndependencies = ["toy"]\n[build-system]\nrequires = []\n'
    )
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv/bin/python")

    def run(index: Path) -> subprocess.CompletedProcess[str]:
        script = str(TOP / "infra/supply/install.py")
        command = [sys.executable, script, "--part", "dependencies", "--into", python]
        told = {
            "PIP_INDEX_URL": index.as_uri(),
            "PIP_ISOLATED": "0",
            "PIP_CONFIG_FILE": "/dev/null",
        }
        return subprocess.run(
            command, cwd=project, env=told, capture_output=True, text=True, timeout=120, check=False
        )

    refused = run(forged)
    assert refused.returncode == 1
    assert f"refused: toy==1.0: {WHEEL} has sha256" in refused.stderr
    there = [python, "-c", "import toy"]
    assert subprocess.run(there, stderr=subprocess.DEVNULL, check=False).returncode == 1
    assert run(right).returncode == 0, run(right).stderr
    assert subprocess.run(there, check=False).returncode == 0


def test_what_a_maker_installed_is_kept(install: dict[str, Any]) -> None:
    text = install["constraints"]("a_b==2.0\nnumpy==2.9\n", {"numpy": "1.26.4", "torch": "2.9+cu"})
    assert text == "a_b==2.0\nnumpy==1.26.4\ntorch==2.9+cu\n"
    assert install["constraints"]("numpy==2.9\n", {}) == "numpy==2.9\n"


def test_the_worker_of_an_engine_s_image_brings_no_engine(install: dict[str, Any]) -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[~=<>\[]", r)[0] for r in install["requirements"](project, ["worker-core"])}
    whole = {
        re.split(r"[~=<>\[]", r)[0] for r in install["requirements"](project, ["prefill-worker"])
    }
    assert whole - core == {"xllamacpp"}


def test_an_image_for_engines_has_the_client_of_each(install: dict[str, Any]) -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]
    whole = set(install["requirements"](project, ["engines"]))
    for extra in {"triton", "vllm", "sglang"} & set(project["optional-dependencies"]):
        assert set(install["requirements"](project, [extra])) <= whole, f"engines lacks {extra}"
