"""Whether a writer's KV is of the kind a reader can use."""

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.errors import Incompatible


def check_layout(ours: KvLayout, theirs: KvLayout) -> None:
    """Raise `Incompatible`, naming every field that differs."""
    _check("KV layout", ours, theirs)


def check_fingerprint(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Raise `Incompatible`, naming every field that differs."""
    _check("model fingerprint", ours, theirs)


def _check(what: str, ours: KvLayout | Fingerprint, theirs: KvLayout | Fingerprint) -> None:
    differing = [
        f"{name} (expected {getattr(ours, name)!r}, got {getattr(theirs, name)!r})"
        for name in ours.__struct_fields__
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if differing:
        raise Incompatible(f"{what} differs in {', '.join(differing)}")
