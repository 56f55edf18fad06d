"""KV that outlives its engine: what a block is called in a tier, and when one is worth reading.

A key names content: the tenant, the model, the layout and every token up to the block's end. So an
entry never changes, an index may be stale (a miss), and no two tenants have a key in common.

Reading a run of blocks competes with computing it again, by estimated time:

    bytes / read speed + bytes / import speed    against    tokens / prefill speed

The speeds are measured as they come. Until the engine's are, restoring is believed in; and the time
that a read may take is limited by what computing would, so a wrong belief costs that once.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from diptych_contracts.cards import Fingerprint, KvLayout
from diptych_contracts.tiers import TierKey
from diptych_contracts.wire import encode

_BLOCK_BYTES = 32
_TENANT_BYTES = 16
_NEW = 0.3
"""Share of a new measurement in the average."""
_LEAST_TOKENS = 16
"""A step that fills fewer says how long a step takes, not how fast prompts are filled."""
SLOW_PREFILL_TOKENS_S = 50.0
"""Until it is measured: slower than any prefill seen (59, SmolLM2-135M on one busy core)."""
FAST_IMPORT_BYTES_S = 3e9
"""Until it is measured: what llama.cpp takes in of blocks of 64 tokens."""


def tenant_tag(tenant: str) -> str:
    """What a tenant is called in a tier."""
    return hashlib.blake2b(tenant.encode(), digest_size=_TENANT_BYTES).hexdigest()


def tier_keys(
    tenant: str, fingerprint: Fingerprint, layout: KvLayout, token_ids: Sequence[int]
) -> tuple[TierKey, ...]:
    """The key of each full block of `token_ids`; about 3 us each for blocks of 64 tokens.

    None where an id has more than 31 bits: no model has such a token, and the engine refuses them.
    """
    try:
        tokens = memoryview(array("i", token_ids)).cast("B")
    except OverflowError:
        return ()
    parts = (tenant.encode(), encode(fingerprint), encode(layout))
    salt = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    digest = hashlib.blake2b(salt, digest_size=_BLOCK_BYTES).digest()
    tag, size = tenant_tag(tenant), layout.block_tokens
    step = array("i").itemsize * size
    keys: list[TierKey] = []
    for start in range(0, len(token_ids) // size * step, step):
        block = tokens[start : start + step]
        digest = hashlib.blake2b(digest + block, digest_size=_BLOCK_BYTES).digest()
        keys.append(TierKey(tag, digest.hex()))
    return tuple(keys)


@dataclass(slots=True)
class _Speed:
    """Units per second, as measured lately."""

    per_s: float
    measured: bool = False

    def add(self, amount: float, took_s: float) -> None:
        if amount <= 0 or took_s <= 0:
            return
        seen = amount / took_s
        self.per_s = self.per_s + _NEW * (seen - self.per_s) if self.measured else seen
        self.measured = True


@dataclass(slots=True)
class RestoreCosts:
    """What restoring and computing take on one worker.

    Args:
        block_tokens, block_bytes: Of a full block.
    """

    block_tokens: int
    block_bytes: int
    _prefill: _Speed = field(default_factory=lambda: _Speed(SLOW_PREFILL_TOKENS_S))
    _import: _Speed = field(default_factory=lambda: _Speed(FAST_IMPORT_BYTES_S))

    def prefilled(self, tokens: int, took_s: float) -> None:
        """A step filled prompts by `tokens`: all of its time counts, whoever shared it."""
        if tokens >= _LEAST_TOKENS:
            self._prefill.add(tokens, took_s)

    def imported(self, n_bytes: int, took_s: float) -> None:
        """The engine has taken KV in."""
        self._import.add(n_bytes, took_s)

    def recompute_s(self, blocks: int) -> float:
        """How long the engine computes for so many blocks."""
        return blocks * self.block_tokens / self._prefill.per_s

    def import_s(self, blocks: int) -> float:
        """How long it takes so many in."""
        return blocks * self.block_bytes / self._import.per_s

    def spare_s(self, blocks: int) -> float:
        """How long reading so many may take, so that they are not there later than computed."""
        return self.recompute_s(blocks) - self.import_s(blocks)

    def worth(self, read_s: Sequence[float]) -> int:
        """How many of the leading blocks to read: those that save most time. 0: compute all.

        Args:
            read_s: Seconds that reading each of them is believed to take.
        """
        best, most_s, reading_s = 0, 0.0, 0.0
        for blocks, one_s in enumerate(read_s, 1):
            reading_s += one_s
            saved_s = self.spare_s(blocks) - reading_s
            if saved_s > most_s:
                best, most_s = blocks, saved_s
        return best
