"""Whose records this scheduler takes over: those of a dead owner, one by one, by swap."""

import msgspec

from diptych_contracts.ids import Incarnation, RequestId
from diptych_contracts.requests import RecordState, RequestRecord
from diptych_policy.lifecycle import AdoptRecord, Effect


class ForeignRecords:
    """Live records of other schedulers, as the watch on the bucket shows them."""

    def __init__(self, me: Incarnation) -> None:
        self._me = me
        self._records: dict[RequestId, tuple[RequestRecord, int]] = {}
        self._adopting: set[RequestId] = set()

    def note(self, record: RequestRecord, revision: int) -> None:
        """The bucket holds `record` at `revision`."""
        unowned = record.request_seq == 0  # a gateway cancelled what it never got accepted
        if record.state is RecordState.CLOSED or unowned or record.owner == self._me:
            self._records.pop(record.request_id, None)
        elif record.request_id not in self._adopting:
            self._records[record.request_id] = (record, revision)

    def forget(self, request_id: RequestId) -> None:
        """The record is gone, this scheduler's, or was not to be had."""
        self._records.pop(request_id, None)
        self._adopting.discard(request_id)

    def adopting(self, request_id: RequestId) -> bool:
        """Whether its swap is under way."""
        return request_id in self._adopting

    def owners(self) -> set[Incarnation]:
        """Who owns them."""
        return {record.owner for record, _ in self._records.values()}

    def take_from(self, owner: Incarnation) -> list[Effect]:
        """The records of a dead owner, rewritten to this one: each is to be swapped in.

        Each swap names the revision its record was seen at: one that has moved on since, written by
        an owner that was only frozen or by another adopter, is not overwritten.
        """
        theirs = [kept for kept in self._records.values() if kept[0].owner == owner]
        for record, _ in theirs:
            del self._records[record.request_id]
            self._adopting.add(record.request_id)
        return [
            AdoptRecord(
                msgspec.structs.replace(record, owner=self._me, adoptions=record.adoptions + 1),
                revision,
            )
            for record, revision in theirs
        ]
