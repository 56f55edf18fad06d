"""Stores of KV blocks beyond a worker's own memory: what an entry is called, how a store fares."""

from dataclasses import dataclass

from diptych_contracts.wire import Message

TENANT_TAG_CHARS = 32
BLOCK_CHARS = 64


@dataclass(frozen=True, slots=True)
class TierKey:
    """The name of an entry: the KV of one full block, given all that is before it.

    It names content (tenant, weights, layout, every token up to the block's end), so an entry never
    changes, and an index that is out of date can only miss. Lower-case hexadecimal both.
    """

    tenant_tag: str
    """32 digits: blake2b-128 of the tenant. What is forgotten together."""
    block: str
    """64 digits: blake2b-256 over all that the KV depends on."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}: expected {chars} hexadecimal digits, got {value!r}"
            for name, value, chars in (
                ("tenant_tag", self.tenant_tag, TENANT_TAG_CHARS),
                ("block", self.block, BLOCK_CHARS),
            )
            if not is_hex(value, chars)
        ]
        if wrong:
            raise ValueError("; ".join(wrong))


def is_hex(text: str, chars: int) -> bool:
    """Whether `text` is that many lower-case hexadecimal digits: then it is safe as a file name."""
    return len(text) == chars and not text.strip("0123456789abcdef")


class TierUsage(Message, frozen=True, kw_only=True, tag="tier_usage.1"):
    """One tier as one worker sees it; counts are since the worker's start."""

    name: str
    """As in the setting, without secrets: `host`, `disk:/kv`, `redis://host:6379`."""
    entries: int | None = None
    """None: a store that others share and that does not say."""
    bytes: int | None = None
    budget_bytes: int | None = None
    """None: the store itself decides what gives way."""
    hits: int = 0
    misses: int = 0
    errors: int = 0
    """Calls that the store did not answer, or refused."""
    corrupt: int = 0
    """Entries that did not verify; each was dropped, and was a miss."""
    stored: int = 0
    dropped: int = 0
    """Entries not stored: no room in the line of writes, or in the store."""
    evicted: int = 0
    """Entries that gave way, as far as this worker made them."""
    away: str = ""
    """Why it is left alone at the moment; empty: it answers."""
    forgetting: int = 0
    """Tenants that are still to be forgotten there."""
    read_bytes_per_s: float = 0.0
    """Measured; before anything was read, what such a store is taken for."""
    waiting_bytes: int = 0
    """In the line of writes."""
