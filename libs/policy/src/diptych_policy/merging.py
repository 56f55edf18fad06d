"""A lost compare-and-swap: does the owner write again, or does what stands there count?

A gateway marks a record `cancelling` or `ending` whenever its client leaves, which may be the very
moment at which the request ends. Its owner must not take that mark for the last word: the record
would stay open for ever, with nobody left who knows the request.
"""

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
