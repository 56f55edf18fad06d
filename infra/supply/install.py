"""Install extras of Diptych from artifacts whose SHA-256 stands in hashes.txt, and nothing else.

    python infra/supply/install.py [--into PYTHON] [--part PART] [--no-deps] [--keep NAMES]
        [--editable] EXTRA …

Run from the top of the repository, by any Python >= 3.11 with pip; `--into` names another
environment's Python (which needs no pip). First pip says what it would take (versions of
constraints.txt, wheels only: nothing is run to find out); a wheel that is not in hashes.txt ends
the whole with a line that names it. Then pip installs those pins in its hash-checking mode, so what
arrives is compared as well. At last the project itself is built by a build backend that was checked
the same way and stays out of the environment.

`--no-deps` takes what the extras name and nothing that it asks for: nixl asks for torch, which it
imports for GPU expert kernels only.

`--keep numpy,tokenizers` is for a maker's image (TensorRT-LLM's wants numpy < 2): what of these is
installed keeps its version, whatever constraints.txt says.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CONSTRAINTS = Path("constraints.txt")
HASHES = Path("infra/supply/hashes.txt")
PATIENT = ("--retries", "10", "--timeout", "60")
"""An index that does not answer for a moment costs no run (pip gives up after 5 and 15 s)."""
_ITSELF = re.compile(r"diptych\[([^]]+)\]")


class Refused(Exception):
    """A package would be installed that hashes.txt does not know; says which."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install what the arguments say; 1 and a line on stderr when something is not as pinned."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA")
    parser.add_argument("--into", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--part", choices=["all", "dependencies", "project"], default="all")
    parser.add_argument("--editable", action="store_true")
    parser.add_argument("--no-deps", action="store_true", help="nothing but what the extras name")
    parser.add_argument("--keep", default="", metavar="NAMES", help="change none of these")
    told = parser.parse_args(arguments)
    try:
        with open("pyproject.toml", "rb") as file:
            declared = tomllib.load(file)
        hashes = hash_lines(HASHES.read_text())
        if told.part != "project":
            alone = ["--no-deps"] if told.no_deps else []
            kept = installed(told.into, told.keep.split(",")) if told.keep else {}
            wanted = list(requirements(declared["project"], told.extras))
            install(wanted, hashes, told.into, *alone, kept=kept)
        if told.part != "dependencies":
            build(declared["build-system"]["requires"], hashes, told.into, editable=told.editable)
    except Refused as err:
        sys.stderr.write(f"refused: {err}\n")
        return 1
    except subprocess.CalledProcessError as err:
        return err.returncode or 1
    return 0


def requirements(project: dict, extras: Sequence[str]) -> Iterator[str]:
    """What `project` requires with `extras`, extras of its own replaced by what they stand for."""
    yield from project["dependencies"]
    waiting, seen = list(extras), set()
    while waiting:
        extra = waiting.pop().strip()
        if extra in seen:
            continue
        seen.add(extra)
        if extra not in project["optional-dependencies"]:
            raise Refused(f"there is no extra {extra!r} in pyproject.toml")
        for requirement in project["optional-dependencies"][extra]:
            own = _ITSELF.fullmatch(requirement)
            if own:
                waiting.extend(own[1].split(","))
            else:
                yield requirement


def hash_lines(text: str) -> dict[str, str]:
    """The line of each pin (name==version, normalized) in the text of hashes.txt."""
    lines = re.sub(r"#.*|\\\n *", "", text).splitlines()
    return {line.split(" ")[0]: line for line in lines if line.strip()}


def install(
    wanted: Sequence[str],
    hashes: dict[str, str],
    into: str,
    *options: str,
    kept: Mapping[str, str] | None = None,
) -> None:
    """Install `wanted` and what it needs. Raises Refused for what `hashes` does not have."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "constraints.txt")
        pins.write_text(constraints(CONSTRAINTS.read_text(), kept or {}))
        items = resolved(wanted, into, "--constraint", str(pins), *options)
    chosen = [pinned(item, hashes) for item in items]
    if not chosen:
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "requirements.txt")
        file.write_text("\n".join(chosen) + "\n")
        pip(into, "install", *options, "--no-deps", "--require-hashes", "--requirement", str(file))


def installed(into: str, names: Sequence[str]) -> dict[str, str]:
    """Versions of what the environment of the Python `into` has of `names`."""
    run = [sys.executable, "-m", "pip", "--python", into, "--disable-pip-version-check"]
    told = subprocess.run([*run, "list", "--format", "json"], check=True, capture_output=True)
    found = {normalized(item["name"]): item["version"] for item in json.loads(told.stdout)}
    return {name: found[name] for name in map(normalized, names) if name in found}


def constraints(pins: str, kept: Mapping[str, str]) -> str:
    """The text of constraints.txt, where `kept` packages have the versions that they have."""
    others = [pin for pin in pins.splitlines() if normalized(pin.split("==")[0]) not in kept]
    return "\n".join([*others, *(f"{name}=={version}" for name, version in kept.items())]) + "\n"


def normalized(name: str) -> str:
    """A package's name as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved(wanted: Sequence[str], into: str, *options: str) -> list[dict]:
    """What pip would install, as its installation report says (its key `install`)."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        pip(into, "install", *options, "--dry-run", "--report", str(report), *wanted)
        return list(json.loads(report.read_text())["install"])


def pinned(item: dict, hashes: dict[str, str]) -> str:
    """The line of `hashes` for an item of pip's report. Raises Refused."""
    name = normalized(item["metadata"]["name"])
    pin = f"{name}=={item['metadata']['version']}"
    file = item["download_info"]["url"].rsplit("/", 1)[1]
    if pin not in hashes:
        raise Refused(f"{pin} is not in {HASHES}; after adding it to {CONSTRAINTS}: make hashes")
    digest = item["download_info"]["archive_info"].get("hashes", {}).get("sha256", "none told")
    if f"--hash=sha256:{digest}" not in hashes[pin].split(" "):
        raise Refused(f"{pin}: {file} has sha256 {digest}, which is not in {HASHES}")
    return hashes[pin]


def build(requires: Sequence[str], hashes: dict[str, str], into: str, *, editable: bool) -> None:
    """Install the project itself, by a build backend that leaves nothing behind."""
    with tempfile.TemporaryDirectory() as tools:
        install(requires, hashes, into, "--ignore-installed", "--target", tools)
        how = ["--editable", "."] if editable else ["--force-reinstall", "."]
        options = ["--no-deps", "--no-build-isolation", "--no-index"]
        pip(into, "install", *options, *how, environment={**os.environ, "PYTHONPATH": tools})


def pip(into: str, command: str, *arguments: str, environment: dict | None = None) -> None:
    """Run pip's `command` for the environment of the Python `into`."""
    run = [sys.executable, "-m", "pip", "--python", into, "--disable-pip-version-check", "-qq"]
    checked = ["--only-binary", ":all:", *PATIENT] if "--no-index" not in arguments else []
    subprocess.run([*run, command, *checked, *arguments], check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main())
