"""What a tenant used, per day: bucket `usage`, folded from the events of requests that ended."""

from diptych_contracts.wire import Message

CURSOR = "cursor"
"""Where bucket `usage` holds how far it has come."""


class Used(Message, frozen=True, kw_only=True, tag="used.1"):
    """An amount of everything that is metered."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts', those whose KV was there already."""
    answer_tokens: int = 0
    kv_token_s: float = 0.0
    """KV held, in tokens times seconds."""
    prefill_j: float = 0.0
    decode_j: float = 0.0
    sim_j: float = 0.0
    """Of these joules, those of a simulated device: nobody has measured them."""


class UsageDay(Message, frozen=True, kw_only=True, tag="usage_day.1"):
    """A tenant's use on a day (UTC): key = `<yyyy-mm-dd>.<tenant>`."""

    tenant: str
    day: str
    used: Used
    upto_seq: int
    """Every event of this tenant and day up to this sequence of stream `EVENTS` is in it."""


class UsageCursor(Message, frozen=True, kw_only=True, tag="usage_cursor.1"):
    """Every event up to `seq` is in its day."""

    seq: int


UsageEntry = UsageDay | UsageCursor
"""Everything bucket `usage` may hold."""


def usage_key(day: str, tenant: str) -> str:
    """Where bucket `usage` holds a tenant's day."""
    return f"{day}.{tenant}"
