"""The table as people read it, in `docs/security.md`: `python -m diptych_bus.permissions.page`."""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from diptych_bus.permissions.rights import ANY, NAME, BucketUse, ObjectsUse, Rights, StreamUse
from diptych_bus.permissions.table import RIGHTS
from diptych_identity.roles import Role

BEGIN, END = "<!-- rights: begin -->", "<!-- rights: end -->"


def section(rights: Mapping[Role, Rights] = RIGHTS) -> str:
    """A paragraph for each role."""
    return "\n".join(f"#### {role.value}\n\n{_of(of)}" for role, of in rights.items())


def written(page: str) -> str:
    """`page` with the table as it is in code. Raises `ValueError` if it has no place for it."""
    head, found, rest = page.partition(BEGIN)
    _, ended, tail = rest.partition(END)
    if not found or not ended:
        raise ValueError(f"expected {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{section()}\n{END}{tail}"


def _of(rights: Rights) -> str:
    rows = [
        ("publishes", _list(rights.publishes)),
        ("hears", _list(rights.hears)),
        ("answers", _list(rights.answers)),
        ("streams", _uses(rights.streams, _stream)),
        ("buckets", _uses(rights.buckets, _bucket)),
        ("objects", _uses(rights.objects, _objects)),
    ]
    if rights.creates:
        rows.append(("creates", "every stream and bucket that is missing"))
    lines = [f"| {what} | {told} |" for what, told in rows if told]
    return "\n".join(["| may | what |", "|---|---|", *lines, ""])


def _list(subjects: tuple[str, ...]) -> str:
    return ", ".join(f"`{_readable(subject)}`" for subject in subjects)


def _readable(subject: str) -> str:
    return subject.replace(NAME, "<itself>")


def _uses(of: Mapping[str, object], told: object) -> str:
    assert callable(told)
    return "; ".join(f"`{name}`: {words}" for name, use in of.items() if (words := told(use)))


def _stream(use: StreamUse) -> str:
    parts = ["reads"] * use.reads + ["erases messages"] * use.erases
    if use.pulls:
        parts.append(f"takes from consumer `{use.pulls}`")
    return ", ".join(parts) or "notices its loss"


def _bucket(use: BucketUse) -> str:
    return ", ".join(_bucket_parts(use))


def _bucket_parts(use: BucketUse) -> Iterator[str]:
    if use.watches:
        yield "watches"
    elif use.reads:
        yield f"reads {_keys(use.reads)}"
    if use.lists:
        yield "lists"
    if use.writes:
        yield f"writes {_keys(use.writes)}"


def _keys(keys: tuple[str, ...]) -> str:
    return ", ".join("any key" if key == ANY else f"`{_readable(key)}`" for key in keys)


def _objects(use: ObjectsUse) -> str:
    return ", ".join(["reads"] * use.reads + ["writes, deletes"] * use.writes)


def main(path: Path) -> None:
    """Write the table into the page at `path`."""
    path.write_text(written(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/security.md"))
