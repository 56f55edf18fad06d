"""What the package index that pip is configured with has of our pins.

It is asked by pip itself, so pip's settings (index, proxy, certificates, login) hold and no host
is named here. pip has no command that lists the files of a release, hence its inner parts: they
are the same in pip 22.3 to 26, and a test runs them on a folder that serves as an index.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion

from diptych_testkit.supply.pins import Pin, normalized

_PLATFORMS = ("linux", "manylinux", "musllinux", "macosx")


class IndexUnreachable(Exception):
    """The index did not answer."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A file of the index; `yanked` is the maintainers' reason, None if it was not withdrawn."""

    filename: str
    sha256: str
    yanked: str | None = None


def wheels_of(pins: Sequence[Pin], *options: str) -> dict[Pin, list[Wheel]]:
    """Every usable wheel of each pin, over all configured indexes; `options` as `pip download` has.

    In a process of its own, since pip sets up logging, warnings and signals for itself.

    Raises:
        IndexUnreachable: no index answered for one of them.
    """
    command = [sys.executable, "-W", "ignore", "-m", __name__]
    told = json.dumps([pins, options])
    done = subprocess.run(command, input=told, capture_output=True, text=True, check=False)
    if done.returncode:
        raise IndexUnreachable((done.stderr.strip().splitlines() or ["pip said nothing"])[-1])
    answers = json.loads(done.stdout)
    return {
        pin: [Wheel(*wheel) for wheel in found] for pin, found in zip(pins, answers, strict=True)
    }


def _main() -> None:
    pins, options = json.loads(sys.stdin.read())
    with _collector(options) as collector:
        answers = [
            [astuple(wheel) for wheel in _chosen(_links(collector, name), Pin(name, version))]
            for name, version in pins
        ]
    sys.stdout.write(json.dumps(answers))


def _chosen(links: Iterable[Any], pin: Pin) -> Iterator[Wheel]:
    for link in links:
        try:
            name, version, _, tags = parse_wheel_filename(link.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        right = (normalized(name), str(version)) == pin and any(map(usable, tags))
        if right and link.hash_name == "sha256":
            yield Wheel(link.filename, link.hash, link.yanked_reason)


def usable(tag: Tag) -> bool:
    """Whether CPython >= 3.11 on Linux or macOS can install a wheel of this tag."""
    if tag.platform != "any" and not tag.platform.startswith(_PLATFORMS):
        return False
    found = re.fullmatch(r"(py|cp)3(\d*)", tag.interpreter)
    if found is None:
        return False
    return found[1] == "py" or tag.abi == "abi3" or int(found[2] or 0) >= 11


def _links(collector: Any, name: str) -> list[Any]:
    from pip._internal.index.collector import parse_links

    pages = []
    for source in collector.collect_sources(name, candidates_from_page=lambda _: []).index_urls:
        if source is not None and source.link is not None:
            page = collector.fetch_response(source.link)
            if page is not None:
                pages.append(page)
    if not pages:
        raise IndexUnreachable(f"no package index answered for {name}")
    return [link for page in pages for link in parse_links(page)]


@contextmanager
def _collector(options: Sequence[str]) -> Iterator[Any]:
    from pip._internal.commands import create_command

    command: Any = create_command("download")
    parsed, _ = command.parse_args(["--quiet", "--quiet", "--quiet", *options])
    with command.main_context():
        session = command.get_default_session(parsed)
        yield command._build_package_finder(parsed, session)._link_collector


if __name__ == "__main__":
    _main()
