"""Stored journal entries as readers are shown them: one rule for those that nobody can read."""

import logging

from diptych_bus.port import JournalItem
from diptych_contracts.errors import Permanent
from diptych_contracts.journal import JournalEntry
from diptych_contracts.wire import decode

log = logging.getLogger("diptych.bus")


def journal_item(subject: str, seq: int, data: bytes) -> JournalItem | None:
    """The entry at `seq`; None if it is no entry, of a newer version perhaps.

    Followers and readers skip the same ones, so all have the same answer; a reader that raised
    instead ended one scheduler after another, each on adopting the same request.
    """
    try:
        entry = decode(data, JournalEntry)
    except Permanent as err:
        log.warning("journal_entry_skipped: %s %d: %s", subject, seq, err)
        return None
    return JournalItem(seq, entry)
