"""Cancels that no worker has heard yet.

A worker that is silent may only be frozen, with the attempts it was given still in its engine. What
it says on waking is fenced off; so that it frees its slots too, it is told to stop as soon as it
beats again.
"""

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.jobs import Cancel
from diptych_policy.fleet import Fleet

_KEPT = 4096
"""For all workers: far more than their seats. The oldest goes first; the worker's own look at the
records finds that attempt too."""


class UnheardCancels:
    """By worker and request, the newest attempt that is to stop."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Incarnation, RequestId], Cancel] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, worker: Incarnation, cancel: Cancel) -> None:
        """`worker` could not be told."""
        key = (worker, cancel.request_id)
        before = self._kept.pop(key, None)
        newer = before is None or before.attempt < cancel.attempt
        self._kept[key] = cancel if newer or before is None else before
        while len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]

    def take(self, worker: Incarnation) -> list[Cancel]:
        """What `worker` is to be told, now that it can hear."""
        keys = [key for key in self._kept if key[0] == worker]
        return [self._kept.pop(key) for key in keys]

    def keep_registered(self, fleet: Fleet) -> None:
        """Forget workers whose registration has expired: they are not coming back."""
        for key in [key for key in self._kept if not fleet.registered(key[0])]:
            del self._kept[key]
