"""Attempts that run on although they count no more, and when a worker looks for them.

A worker hears of a fence by the cancel that follows it. That word can be lost with its sender: the
worker was frozen and its scheduler died, or a scheduler that slept sends a job long given up. So a
worker asks the schedulers for its attempts, from their first second on: what it holds in vain is
free a few seconds later, whoever died. It cannot look them up itself: the records hold the secrets
that its own voice is made of (`voices`).
"""

from collections.abc import Iterable

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord

FIRST_LOOK_S = 1.0
"""Most attempts of a healthy system are over by then, or go on for long."""
NEXT_LOOK_S = 3.0

_OVER = (RecordState.CANCELLING, RecordState.ENDING, RecordState.CLOSED)

Held = tuple[RequestId, int]
"""A request and its attempt."""


def overtaken(record: RequestRecord, attempt: int, worker: Incarnation) -> bool:
    """Whether `worker` runs `attempt` in vain."""
    if record.state in _OVER or record.attempt > attempt:
        return True
    assignment = record.assignment
    return record.attempt == attempt and assignment is not None and worker not in assignment.workers


class Rounds:
    """When each held attempt is looked up."""

    def __init__(self) -> None:
        self._due_s: dict[Held, float] = {}

    def due(self, held: Iterable[Held], *, now_s: float) -> list[Held]:
        """Those of `held` whose turn it is; each call is a turn."""
        known, self._due_s = self._due_s, {}
        due = []
        for key in held:
            due_s = known.get(key, now_s + FIRST_LOOK_S)
            if due_s <= now_s:
                due.append(key)
                due_s = now_s + NEXT_LOOK_S
            self._due_s[key] = due_s
        return due
