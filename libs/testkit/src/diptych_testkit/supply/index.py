"""What the package index that pip is configured with has of our pins.

It is asked by pip itself, so pip's settings (index, proxy, certificates, login) hold and no host
is named here. pip has no command that lists the files of a release, hence its inner parts: they
are the same in pip 22.3 to 26, and a test runs them on a folder that serves as an index.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Every usable wheel of each pin, over all configured indexes; `options` as `pip download` has them.

    Raises:
        IndexUnreachable: no index answered for one of them.
    """
    with _collector(options) as collector:
        return {pin: list(_chosen(_links(collector, pin.name), pin)) for pin in pins}


def _chosen(links: Iterable[Any], pin: Pin) -> Iterator[Wheel]:
    for link in links:
        try:
            name, version, _, tags = parse_wheel_filename(link.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if (normalized(name), str(version)) == pin and link.hash_name == "sha256":
            if any(map(usable, tags)):
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
