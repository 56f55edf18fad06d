"""How long an answer goes on that nobody reads.

Without resume intent not at all: whoever leaves has cancelled. With it a grace, in which any
gateway may take the client up again. A background answer goes on to its end. The gateway applies
this when its client leaves, the scheduler when the gateway itself is gone: a moment later, since a
gateway that is silent may only be busy, and its clients have not left.
"""

import math
from dataclasses import dataclass

from diptych_contracts.requests import Request

RESUME_GRACE_S = 30.0
SILENT_GATEWAY_S = 2.0
"""Gateways on a machine at load 40 were silent for 1.0 and 1.1 s, and had all their clients."""


def grace_s(request: Request, resume_grace_s: float = RESUME_GRACE_S) -> float:
    """How long `request` goes on unread; `math.inf` for a background one."""
    if request.background:
        return math.inf
    return resume_grace_s if request.resume else 0.0


def orphan_grace_s(request: Request, resume_grace_s: float = RESUME_GRACE_S) -> float:
    """How long `request` goes on after its gateway fell silent."""
    return max(SILENT_GATEWAY_S, grace_s(request, resume_grace_s))


@dataclass(slots=True)
class Attendance:
    """Whether an answer is read, and for how long it has not been."""

    grace_s: float
    unread_since_s: float | None = None
    """None while it is read."""

    def read(self) -> None:
        """Somebody reads it."""
        self.unread_since_s = None

    def unread(self, *, now_s: float) -> None:
        """Nobody reads it; said again it changes nothing."""
        if self.unread_since_s is None:
            self.unread_since_s = now_s

    def read_elsewhere(self, *, now_s: float) -> None:
        """Another gateway said so: the grace begins anew, since that word is not the last."""
        if self.unread_since_s is not None:
            self.unread_since_s = now_s

    def given_up(self, *, now_s: float) -> bool:
        """Whether nobody is expected to read it any more."""
        since_s = self.unread_since_s
        return since_s is not None and now_s - since_s >= self.grace_s
