"""The audit as it is read: every action once, with the last word on it."""

from collections.abc import Iterable

from diptych_contracts.audit import Audited, Outcome


def folded(entries: Iterable[Audited]) -> list[Audited]:
    """The actions in the order they were asked for, each as it ended; of one with an end, that."""
    found: dict[str, Audited] = {}
    for entry in entries:
        before = found.get(entry.audit_id)
        if before is None or entry.outcome is not Outcome.ASKED:
            found[entry.audit_id] = entry
    return list(found.values())


def about(
    entries: Iterable[Audited],
    *,
    actor: str = "",
    action: str = "",
    object_name: str = "",
    since_unix_ms: int = 0,
) -> list[Audited]:
    """Those that match all that is given: an actor or object in part, an action or its beginning.

    `keys` is the beginning of `keys.create` and `keys.revoke`.
    """
    return [
        entry
        for entry in entries
        if actor in entry.actor
        and (entry.action == action or entry.action.startswith(f"{action}.") or not action)
        and object_name in entry.object
        and entry.unix_ms >= since_unix_ms
    ]
