"""Which long prompts nobody needs any more: a crash left them between two steps.

A prompt is stored before its request and deleted just before its record is closed:

    object stored ─▶ request stored ─▶ record created ─▶ request erased ─▶ object deleted ─▶ closed
                 a gateway dies here                 a scheduler dies here

- Its record is closed: nobody needs it, unless the request failed. Then it stays as long as the
  record, so that whoever looks into that can try the request again.
- It has no record: either its request was never stored, or no scheduler has taken it yet. So it is
  watched: by the next look every try to store its request is over (`LOOK_S` is longer than any),
  and once the schedulers have come as far as the stream was then, and there still is no record,
  there was no request.

No clock but the looks counts. What is missed goes with the bucket's age.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from diptych_contracts.journal import End, EndReason
from diptych_contracts.requests import RecordState, Request, RequestRecord

LOOK_S = 60.0
"""Between two looks; storing a prompt and its request takes a few seconds at most."""


def unneeded_prompt(request: Request, end: End) -> str:
    """The object to delete when `request` has ended so; empty: there is none, or it stays."""
    failed = end.reason is EndReason.FAILED
    return "" if request.prompt is None or failed else request.prompt.name


@dataclass(frozen=True, slots=True)
class Found:
    """A stored prompt, and its request's record; None: there is none."""

    name: str
    record: RequestRecord | None

    @property
    def unneeded(self) -> bool:
        """Whether its request has ended, and not by a failure."""
        record = self.record
        if record is None or record.state is not RecordState.CLOSED:
            return False
        return record.end is None or record.end.reason is not EndReason.FAILED


class OrphanedPrompts:
    """What earlier looks have shown."""

    def __init__(self) -> None:
        self._watched: dict[str, int | None] = {}
        """Prompts without a record; where the stream stood when their time was over."""

    def look(self, found: Iterable[Found], *, newest_seq: int, done_seq: int) -> list[str]:
        """The prompts to delete.

        Args:
            found: Every stored prompt.
            newest_seq: The newest request in the stream, before the records were read.
            done_seq: The schedulers have a record of every request up to this one.
        """
        watched, self._watched = self._watched, {}
        orphans: list[str] = []
        for prompt in found:
            name = prompt.name
            if prompt.unneeded:
                orphans.append(name)
            elif prompt.record is None:
                until_seq = watched.get(name)
                if until_seq is not None and done_seq >= until_seq:
                    orphans.append(name)
                elif until_seq is not None:
                    self._watched[name] = until_seq
                else:
                    self._watched[name] = newest_seq if name in watched else None
        return orphans
