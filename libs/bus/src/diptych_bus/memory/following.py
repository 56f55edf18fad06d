"""A follower of one journal: each entry once and in order, whatever was late or missed."""

from collections.abc import Callable

from diptych_bus.cursor import Cursor, Step
from diptych_bus.memory.stream import MemoryStream, StoredMessage


class Following:
    """Where one reader stands.

    Args:
        stream: What it reads.
        subject: Of it.
        after_seq: It wants what comes after this.
        show: Hears each message.
    """

    def __init__(
        self,
        stream: MemoryStream,
        subject: str,
        after_seq: int,
        *,
        show: Callable[[StoredMessage], None],
    ) -> None:
        self._stream = stream
        self._subject = subject
        self._cursor = Cursor(after_seq)
        self._show = show
        self._open = True

    def take(self, message: StoredMessage) -> None:
        """A message has come live."""
        match self._cursor.offer(message.seq, message.previous_seq):
            case Step.DELIVER if self._open:
                self._show(message)
            case Step.GAP:
                self.catch_up()

    def catch_up(self) -> None:
        """Read what was missed."""
        for message in self._stream.on(self._subject, after_seq=self._cursor.seq):
            if self._open and self._cursor.offer(message.seq, 0) is Step.DELIVER:
                self._show(message)

    def close(self) -> None:
        """Show nothing more."""
        self._open = False
