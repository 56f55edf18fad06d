"""What a reader's port turned away, counted by reason until somebody asks."""

import threading
from collections import Counter
from enum import StrEnum


class TurnedAway(StrEnum):
    """Why a connection was ended by its reader. A ticket's faults are `TicketFault`."""

    NOT_TLS = "not_tls"
    """It does not speak TLS 1.3, on a port where nothing else is spoken."""
    NO_CERTIFICATE = "no_certificate"
    OTHER_CERTIFICATE = "other_certificate"
    """Shows a certificate nobody announced, or another writer's."""
    OTHER_PEER = "other_peer"
    """Speaks another version, means another reader, or does not know its key."""
    GARBLED = "garbled"
    SILENT = "silent"
    """Did not say in time who it is."""
    CROWDED = "crowded"
    """Too many connections."""


class Tally:
    """Counts by reason. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, reason: str) -> None:
        """One more."""
        with self._lock:
            self._counts[reason] += 1

    def take(self) -> dict[str, int]:
        """What was counted since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            return dict(counts)
