"""A lost compare-and-swap: does the owner write again, or does what stands there count?

A gateway marks a record `cancelling` or `ending` whenever its client leaves, which may be the very
moment at which the request ends. Its owner must not take that mark for the last word: the record
would stay open for ever, with nobody left who knows the request.
"""

import msgspec

from diptych_contracts.requests import RecordState, RequestRecord

_LAST = (RecordState.ENDING, RecordState.CLOSED)


def overrules(wanted: RequestRecord, seen: RequestRecord) -> bool:
    """Whether `wanted` is still to be written although `seen` was written meanwhile.

    Only an end of the unchanged owner is: a gateway's mark asks for nothing more than that.
    """
    return (
        wanted.state in _LAST
        and wanted.owner == seen.owner
        and seen.state is not RecordState.CLOSED
    )


def unowned(record: RequestRecord) -> bool:
    """Whether it is a gateway's mark of a request that no scheduler has taken on."""
    return record.request_seq == 0 and record.state is not RecordState.CLOSED


def taken_on(record: RequestRecord, mark: RequestRecord) -> RequestRecord:
    """What replaces `mark` when its request is taken on with `record`.

    It is owned and names its message, so that another scheduler adopts it if this one dies. What
    has ended already stays as it is.
    """
    if record.state in _LAST:
        return record
    return msgspec.structs.replace(
        record, state=RecordState.CANCELLING, cancel_reason=mark.cancel_reason or "cancelled"
    )


def surplus(seq: int, standing: RequestRecord) -> bool:
    """Whether nobody reads the message at `seq` any more: its request ended or has another one.

    The server forgets the ids of erased messages when it restarts, and may store one twice.
    """
    return standing.state is RecordState.CLOSED or standing.request_seq not in (0, seq)
