"""Whether KV that was handed over was really fetched: vLLM does not say when it recomputes it.

Params that lack a field, KV whose lease is over: vLLM logs it and computes the prompt again, and
the answer is the same. So its own numbers are read, and what they do not show is counted.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger("diptych.engine")

TRANSFERS = "vllm:nixl_xfer_time_seconds_count"
FAILED = "vllm:nixl_num_failed_transfers"
EXPIRED = "vllm:nixl_num_kv_expired_reqs"
EXTERNAL_HITS = "vllm:external_prefix_cache_hits"
LOCAL_HITS = "vllm:prefix_cache_hits"


@dataclass(slots=True)
class HandOffCounts:
    """Since the start of the adapter."""

    offered: int = 0
    """Prefill: hand-offs whose KV was offered."""
    nothing_to_pull: int = 0
    """Prefill: answers without transfer params. Decode computes those prompts itself."""
    handed: int = 0
    """Decode: hand-offs whose first token has come."""
    recomputed: int = 0
    """Decode: those of them whose KV was silently computed again."""
    failed_transfers: int = 0
    """Decode: transfers that NIXL says have failed."""
    expired: int = 0
    """Prefill: hand-offs nobody fetched within the lease, as vLLM counts them."""


class HandOffAudit:
    """Compares what was handed over with what the server's metrics say.

    Where an answer says how many prompt tokens had KV *at decode*, that tells of this very answer.
    Else, and always in 0.32, where decode repeats what prefill had cached, sums are compared, one
    reading late, since metrics lag: so what other requests find in the local cache may hide a
    recomputed one, never the other way.

    Args:
        counts: What is counted.
        block_tokens: Of the server's cache; as much of a prompt's end is computed anyway.
    """

    def __init__(self, counts: HandOffCounts, block_tokens: int) -> None:
        self._counts = counts
        self._block_tokens = block_tokens
        self._unproven = 0
        self._unproven_tokens = 0
        self._judged = (0, 0)
        self._found = 0
        self._first: Mapping[str, float] | None = None
        self._last: Mapping[str, float] = {}

    def imported(self, remote_tokens: int, cached_tokens: int | None) -> None:
        """A hand-off of `remote_tokens` has led to an answer."""
        self._counts.handed += 1
        if cached_tokens is None:
            self._unproven += 1
            self._unproven_tokens += remote_tokens
        elif cached_tokens + self._block_tokens < remote_tokens or cached_tokens == 0:
            self._tell(1, f"{cached_tokens} of {remote_tokens} tokens had KV")

    def read(self, totals: Mapping[str, float]) -> None:
        """Judge by a reading of the server's metrics."""
        first = self._first
        if first is None or any(
            totals.get(name, 0.0) < self._last.get(name, 0.0) for name in totals
        ):
            self._first = first = totals  # it began anew
            self._judged, self._found = (0, 0), 0
            self._unproven = self._unproven_tokens = 0
        for name, attribute in ((FAILED, "failed_transfers"), (EXPIRED, "expired")):
            more = totals.get(name, 0.0) - self._last.get(name, totals.get(name, 0.0))
            setattr(self._counts, attribute, getattr(self._counts, attribute) + max(0, int(more)))
        missing = self._missing({name: totals[name] - first.get(name, 0.0) for name in totals})
        if missing > self._found:
            self._tell(missing - self._found, "its metrics show too few transfers")
            self._found = missing
        self._judged = (self._unproven, self._unproven_tokens)
        self._last = totals

    def _missing(self, since: Mapping[str, float]) -> int:
        handed, tokens = self._judged
        if handed == 0:
            return 0
        each = max(1.0, tokens / handed)
        local = since.get(LOCAL_HITS, 0.0)
        missing = handed - since.get(TRANSFERS, 0.0) - local // each
        if EXTERNAL_HITS in since:
            slack = handed * (self._block_tokens + 1)
            short = tokens - slack - since[EXTERNAL_HITS] - local
            missing = max(missing, short // each + (short % each > 0))
        return max(0, int(missing))

    def _tell(self, n: int, why: str) -> None:
        self._counts.recomputed += n
        log.warning("handed_over_kv_was_recomputed", extra={"hand_offs": n, "why": why})
