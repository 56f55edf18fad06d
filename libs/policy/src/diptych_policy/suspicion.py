"""Which request is suspected of killing its workers, and when it is given up.

A worker that dies takes all it held down with it: the request that killed it, if one did, and its
neighbours. Nobody can tell them apart at first, so all of them have lost an attempt. Rules:

1. A lost attempt is a strike. Strikes count in a row: an attempt that brought a few tokens before
   it was lost began anew (what kills is the same again at the same place), until so many attempts
   are lost that the request has no more credit.
2. Three strikes make a suspect. It runs apart: on idle workers or, if none falls idle within
   seconds, beside such only as have brought a few tokens where they are; and nobody is put beside
   it until it has brought a few tokens itself. Then it is one of many again.
3. Only what was lost apart makes more than three strikes. Five end the request.
4. Ten lost attempts end it in any case: where it could never be put apart, say.

So a request that kills whatever runs it takes five workers down, the last two apart; its neighbours
lose three attempts, five at the very most, and are not blamed. docs/decisions/0004 has the reasons.
"""

import msgspec

from diptych_contracts.requests import RequestRecord, Setback
from diptych_policy.limits import Limits
from diptych_policy.routing import Company

MAX_SETBACKS = 10
"""How many of a request's setbacks are remembered."""


def suspected(record: RequestRecord, limits: Limits) -> bool:
    """Whether it must run apart."""
    return record.strikes >= limits.suspect_strikes


def company_of(record: RequestRecord, limits: Limits, *, waited_s: float) -> Company:
    """Beside whom its next attempt may run, `waited_s` after it began to wait for workers."""
    if not suspected(record, limits) or waited_s >= limits.apart_wait_s:
        return Company.ANY
    return Company.NONE if waited_s < limits.idle_wait_s else Company.PROVEN


def given_up(record: RequestRecord, limits: Limits) -> bool:
    """Whether it has lost too many attempts to be tried again."""
    return (
        record.strikes >= limits.max_lost_attempts or record.lost_attempts >= limits.max_lost_in_all
    )


def cleared(record: RequestRecord, limits: Limits, *, added_tokens: int) -> bool:
    """Whether a suspect has got past what it was suspected for."""
    return suspected(record, limits) and _proven(record, limits, added_tokens)


def struck(
    record: RequestRecord, limits: Limits, *, added_tokens: int, apart: bool
) -> RequestRecord:
    """`record` after one more attempt was lost.

    Args:
        record: As it stood.
        limits: The numbers of the rules.
        added_tokens: How many tokens the lost attempt had brought.
        apart: Whether nothing else ran where it ran that could be the reason.
    """
    lost_attempts = record.lost_attempts + 1
    strikes = 1 if _proven(record, limits, added_tokens) else record.strikes + 1
    if not apart:
        strikes = min(strikes, max(record.strikes, limits.suspect_strikes))
    if lost_attempts >= limits.max_lost_with_credit:
        strikes = max(strikes, limits.suspect_strikes)
    return msgspec.structs.replace(record, lost_attempts=lost_attempts, strikes=strikes)


def with_setback(record: RequestRecord, setback: Setback) -> RequestRecord:
    """`record`, remembering why an attempt did not finish."""
    setbacks = (*record.setbacks, setback)[-MAX_SETBACKS:]
    return msgspec.structs.replace(record, setbacks=setbacks)


def _proven(record: RequestRecord, limits: Limits, added_tokens: int) -> bool:
    credit = record.lost_attempts < limits.max_lost_with_credit
    return credit and added_tokens >= limits.proof_tokens
