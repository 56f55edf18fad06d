"""Where a reader of a journal stands, and what the next live message means to it. Pure."""

from enum import Enum


class Step(Enum):
    """What to do with a live message."""

    DELIVER = "deliver"
    SKIP = "skip"
    """Seen already."""
    GAP = "gap"
    """Something before it was missed: read the stream from the cursor."""


class Cursor:
    """The sequence up to which a journal was delivered."""

    def __init__(self, seq: int) -> None:
        self.seq = seq

    def offer(self, seq: int, previous_seq: int) -> Step:
        """Judge the message at `seq`, whose predecessor on the subject is at `previous_seq`.

        Moves the cursor if the message is to be delivered.
        """
        if seq <= self.seq:
            return Step.SKIP
        if previous_seq > self.seq:
            return Step.GAP
        self.seq = seq
        return Step.DELIVER
