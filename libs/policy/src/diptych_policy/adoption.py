"""Whose records this scheduler takes over: those of a dead owner, one by one, by swap."""

import msgspec

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord


class ForeignRecords:
    """Live records of other schedulers, as the watch on the bucket shows them."""

    def __init__(self, me: Incarnation) -> None:
        self._me = me
        self._records: dict[RequestId, RequestRecord] = {}
        self._adopting: set[RequestId] = set()

    def note(self, record: RequestRecord) -> None:
        """The bucket holds `record`."""
        unowned = record.request_seq == 0  # a gateway cancelled what it never got accepted
        if record.state is RecordState.CLOSED or unowned or record.owner == self._me:
            self._records.pop(record.request_id, None)
        elif record.request_id not in self._adopting:
            self._records[record.request_id] = record

    def forget(self, request_id: RequestId) -> None:
        """The record is gone, or this scheduler's."""
        self._records.pop(request_id, None)
        self._adopting.discard(request_id)

    def owners(self) -> set[Incarnation]:
        """Who owns them."""
        return {record.owner for record in self._records.values()}

    def take_from(self, owner: Incarnation) -> list[RequestRecord]:
        """The records of a dead owner, rewritten to this one: each is to be swapped in."""
        mine = [record for record in self._records.values() if record.owner == owner]
        for record in mine:
            del self._records[record.request_id]
            self._adopting.add(record.request_id)
        return [
            msgspec.structs.replace(record, owner=self._me, adoptions=record.adoptions + 1)
            for record in mine
        ]
