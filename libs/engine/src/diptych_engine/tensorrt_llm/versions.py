"""Versions as the engine writes them: `1.2.1`, `1.3.0rc22`."""

import re
from dataclasses import dataclass
from functools import total_ordering

_FORM = re.compile(r"(\d+)(?:\.(\d+))?(?:\.(\d+))?(?:\.?(?:rc|a|b|dev)(\d+))?")
_FINAL = 1 << 30


@total_ordering
@dataclass(frozen=True, slots=True)
class Version:
    """One version; a release candidate is older than its release."""

    parts: tuple[int, int, int, int]
    text: str

    @classmethod
    def of(cls, text: str) -> "Version":
        """The version written as `text`; what follows a known form (`+cu13`) does not count.

        Raises:
            ValueError: there is no number at its beginning.
        """
        found = _FORM.match(text.strip().removeprefix("v"))
        if found is None:
            raise ValueError(f"expected a version such as 1.2.1 or 1.3.0rc22, got {text!r}")
        major, minor, patch, candidate = found.groups()
        number = _FINAL if candidate is None else int(candidate)
        return cls((int(major), int(minor or 0), int(patch or 0), number), text)

    @property
    def begun(self) -> tuple[int, int, int]:
        """The release that it is, or is a candidate of."""
        return self.parts[:3]

    def __lt__(self, other: "Version") -> bool:
        return self.parts < other.parts


def has_begun(version: Version, since: str) -> bool:
    """Whether `version` is `since` or later; candidates of `since` count, unless it is one."""
    limit = Version.of(since)
    if limit.parts[3] == _FINAL:
        return version.begun >= limit.begun
    return not version < limit


def in_range(version: Version, wanted: str) -> bool:
    """Whether `version` lies in a range such as `>=1.2,<1.4`.

    Raises:
        ValueError: the range is not of that form.
    """
    for part in wanted.split(","):
        if part.startswith(">="):
            fits = has_begun(version, part[2:])
        elif part.startswith("<"):
            fits = not has_begun(version, part[1:])
        else:
            raise ValueError(f"expected '>=' or '<', got {part!r}")
        if not fits:
            return False
    return True
