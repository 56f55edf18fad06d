"""Whether those who were declared dead were: each `member_lost` is held against what was done."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from diptych_testkit.chaos.pauses import Struck
from diptych_testkit.chaos.plan import Target

LATE_S = 2.0
"""A loss may be told this long after its member was back: silence counts from its last beat."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A scheduler declared a member dead."""

    observer: str
    member: str
    at_unix_s: float
    silent_s: float


def losses(lines: Iterable[str]) -> list[Loss]:
    """Every `member_lost` in a scheduler's log; other lines are passed over."""
    found = []
    for line in lines:
        if '"member_lost"' not in line:
            continue
        try:
            said = json.loads(line)
            at_unix_s = datetime.fromisoformat(said["ts"]).timestamp()
            loss = Loss(said["incarnation"], said["member"], at_unix_s, said["silent_ms"] / 1000)
        except (ValueError, KeyError):
            continue  # the last line of a killed process may be cut
        found.append(loss)
    return found


def returns(lines: Iterable[str]) -> int:
    """How often a member that had been declared dead beat again, by a scheduler's log."""
    return sum('"member_returned"' in line for line in lines)


def false_alarms(
    said: Sequence[Loss], struck: Sequence[Struck], *, unix_offset_s: float
) -> list[Loss]:
    """Losses of members that ran all the while.

    Args:
        said: What schedulers declared.
        struck: What was done to whom, in monotonic seconds.
        unix_offset_s: What to add to monotonic seconds to get wall time.
    """
    return [loss for loss in said if not any(_explains(s, loss, unix_offset_s) for s in struck)]


def _explains(struck: Struck, loss: Loss, unix_offset_s: float) -> bool:
    if struck.member != loss.member or struck.fault.target in (Target.NATS, Target.MACHINE):
        return False
    silent_from_s = loss.at_unix_s - loss.silent_s - unix_offset_s
    told_s = loss.at_unix_s - unix_offset_s
    return struck.began_s <= told_s and silent_from_s <= struck.ended_s + LATE_S
