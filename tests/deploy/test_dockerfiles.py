"""Dockerfiles, as hadolint sees them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.deploy
TOP = Path(__file__).parents[2]
IMAGES = [*sorted((TOP / "infra").glob("*/*.Dockerfile")), TOP / "infra/ci/base/Dockerfile"]
LEFT = {
    "DL3006": "a base that infra/ci/base-image.sh makes, or an argument with its version",
    "DL3008": "Debian keeps only the newest version of a package: a pin would break the build",
    "DL3025": "exec in a shell: the name of the service is the image's own variable",
    "DL3059": "a layer each, for the cache",
    "DL3066": "useradd gives the user 10001 in the same file",
    "DL4006": "what it pipes is a constant, in a command substitution",
}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: f"{image.parent.name}/{image.name}")
def test_hadolint_finds_no_fault(image: Path) -> None:
    beside = Path(sys.executable).parent / "hadolint"
    hadolint = str(beside) if beside.exists() else shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not here: make deploy installs it")
    done = subprocess.run(
        [hadolint, "--format", "json", "--no-fail", str(image)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = [(f["code"], f["line"], f["message"]) for f in json.loads(done.stdout)]
    assert [fault for fault in found if fault[0] not in LEFT] == []
