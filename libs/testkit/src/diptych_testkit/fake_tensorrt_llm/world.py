"""What engines have in common: the KV that prefill pins, and who fetches it."""

import asyncio
import itertools
from dataclasses import dataclass, field


@dataclass(slots=True)
class Faults:
    """What goes wrong; all off at first."""

    step_s: float = 0.0
    """What a step takes."""
    transfer_s: float = 0.0
    """What fetching KV takes."""
    transfer_fails: bool = False
    """Decode's engine gives the request up in place of a first output."""
    dead: bool = False
    """The executor has died."""
    hangs: bool = False
    """No request gets any further."""
    refuses_to_start: str = ""
    lost_events: int = 0
    """So many KV events are dropped, and counted all the same."""
    end_token_in_outputs: bool = True
    """Whether the token that ended an answer stands in its outputs: versions differ."""
    no_hand_off: bool = False
    """Context legs end without a description of their KV."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """KV that prefill holds until it is fetched, once."""

    token_ids: tuple[int, ...]
    first_token: int
    request_id: int
    salt: str | None


@dataclass(slots=True)
class World:
    """The network between engines."""

    tickets: dict[bytes, Ticket] = field(default_factory=dict)
    """Pinned at this moment."""
    misuse: list[str] = field(default_factory=list)
    """What must never happen: tests assert that it is empty."""
    leaks: list[int] = field(default_factory=list)
    """Requests whose transfer was torn down by an abort before the first output."""
    expired: int = 0
    """Hand-offs that nobody fetched in time."""
    fetched: int = 0
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def pin(self, ticket: Ticket, *, timeout_s: float | None) -> bytes:
        """Hold KV; gives what opens it. Freed after `timeout_s`."""
        state = b"state-%d" % next(self._numbers)
        self.tickets[state] = ticket
        if timeout_s is not None:
            asyncio.get_running_loop().call_later(timeout_s, self._expire, state)
        return state

    def fetch(self, state: bytes) -> Ticket:
        """The KV, which nobody holds any more. Raises `KeyError` if it is not there."""
        try:
            ticket = self.tickets.pop(state)
        except KeyError:
            self.misuse.append(f"{state!r} was fetched twice, or too late")
            raise
        self.fetched += 1
        return ticket

    def _expire(self, state: bytes) -> None:
        if self.tickets.pop(state, None) is not None:
            self.expired += 1
