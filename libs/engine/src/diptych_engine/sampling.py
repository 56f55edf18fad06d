"""Chooses the next token. A pure function: the random number depends on (seed, index) only.

So an answer is the same whatever else is in the batch, and after a recovery. Filters apply in this
order: bias, penalties, grammar, temperature, `min_p`, `top_k`, `top_p`; equal logits rank by lower
token id.
Logprobs are of none of this: they are the model's own.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diptych_contracts.errors import Permanent
from diptych_contracts.journal import Chances
from diptych_contracts.sampling import Sampling
from diptych_contracts.spans import LOGIT_BIAS_SPAN, SAMPLING_SPANS

_AS_GOOD_AS_GREEDY = 1e-6
"""A temperature below which float32 would divide by nothing."""
_NEVER = -9999.0
"""The logprob of what cannot be: JSON has no infinity."""
_LIKELY_ENOUGH = 512
"""Ranking the 512 likeliest of 49,152 tokens takes a tenth of ranking all, and mostly suffices."""


def check_sampling(sampling: Sampling) -> None:
    """See that one can choose by `sampling`: not every request comes through a gateway of ours.

    Raises:
        Permanent: a number is outside its span; the message names the first.
    """
    numbers = [(name, getattr(sampling, name), span) for name, span in SAMPLING_SPANS.items()]
    numbers += [("logit_bias", bias, LOGIT_BIAS_SPAN) for _, bias in sampling.logit_bias]
    for name, value, span in numbers:
        if value not in span:
            raise Permanent(f"'{name}': expected {span}, saw {value}")
    if sampling.top_logprobs is not None and sampling.top_logprobs < 0:
        raise Permanent(f"expected no fewer than 0 top_logprobs, saw {sampling.top_logprobs}")


def sample(
    logits: NDArray[np.float32],
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token that follows `prompt_ids` + `answer_ids`, given its logits `[vocab]`.

    Args:
        logits: Of every token.
        sampling: How to choose.
        prompt_ids: The prompt.
        answer_ids: The answer so far.
        allowed: Which tokens a grammar allows `[vocab]`; None: all.

    Raises:
        Permanent: if the logits hold NaN or no finite maximum.
    """
    scores = _scored(logits, sampling, prompt_ids, answer_ids)
    if allowed is not None:
        scores = np.where(allowed, scores, np.float32(-np.inf))
    best = int(scores.argmax())
    if not np.isfinite(scores[best]):
        raise Permanent(f"logits for token {len(answer_ids)} of the answer are not finite")
    if sampling.temperature < _AS_GOOD_AS_GREEDY:
        return best
    masses = np.exp((scores - scores[best]) / np.float32(sampling.temperature))
    kept = np.flatnonzero(masses >= sampling.min_p)
    masses = masses[kept]
    if sampling.top_k > 0 or sampling.top_p < 1:
        ranked = _nucleus(masses, top_k=sampling.top_k, top_p=sampling.top_p)
        kept, masses = kept[ranked], masses[ranked]
    return int(kept[_pick(masses, uniform(sampling.seed, len(answer_ids)))])


def chances(logits: NDArray[np.float32], token: int, *, top: int) -> Chances:
    """The logprob of `token`, then those of the `top` likeliest, given the logits `[vocab]`.

    Of the distribution as the model gave it, to six decimal places; at least -9999.
    """
    highest = logits.max()
    mass = float(np.exp(logits - highest).sum(dtype=np.float64))
    base = float(highest) + math.log(mass)
    told = [token, *(_ranked(logits, min(top, logits.size)).tolist() if top else ())]
    return tuple((at, max(_NEVER, round(float(logits[at]) - base, 6))) for at in told)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), fixed by `seed` (64 bits count) and token `index`."""
    text = (seed & (2**64 - 1)).to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(text, digest_size=8, person=b"diptych").digest()
    return float(int.from_bytes(digest, "little") >> 11) / 2.0**53


def _pick(masses: NDArray[np.float32], point: float) -> int:
    sums = masses.cumsum(dtype=np.float64)
    at = int(sums.searchsorted(point * sums[-1], side="right"))
    # Rounding may carry the point to the very end, behind tokens of mass zero.
    return min(at, int(sums.searchsorted(sums[-1], side="left")))


def _nucleus(masses: NDArray[np.float32], *, top_k: int, top_p: float) -> NDArray[np.intp]:
    """Ids of the kept tokens, likeliest first."""
    size = masses.size
    wanted = min(top_k, size) if top_k > 0 else min(_LIKELY_ENOUGH, size)
    ids = _ranked(masses, wanted)
    if top_p >= 1:
        return ids
    total = float((masses[ids] if top_k > 0 else masses).sum(dtype=np.float64))
    sums = masses[ids].cumsum(dtype=np.float64)
    if sums[-1] < top_p * total and wanted < size and top_k <= 0:
        ids = _ranked(masses, size)
        sums = masses[ids].cumsum(dtype=np.float64)
    kept = int(sums.searchsorted(top_p * total, side="left")) + 1
    return ids[:kept]


def _ranked(masses: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """The `count` likeliest ids, likeliest first; equals by lower id."""
    if count < masses.size:
        limit = np.partition(masses, masses.size - count)[masses.size - count]
        candidates = np.flatnonzero(masses >= limit)
    else:
        candidates = np.arange(masses.size)
    order = np.argsort(-masses[candidates], kind="stable")
    ranked: NDArray[np.intp] = candidates[order[:count]]
    return ranked


def _scored(
    logits: NDArray[np.float32],
    sampling: Sampling,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
) -> NDArray[np.float32]:
    repeats = sampling.repetition_penalty != 1
    counts = bool(answer_ids) and (
        sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    )
    if not repeats and not counts and not sampling.logit_bias:
        return logits
    scores = logits.copy()
    for token, bias in sampling.logit_bias:
        scores[token] += np.float32(bias)
    if repeats:
        seen = _distinct((*prompt_ids, *answer_ids))
        values = scores[seen]
        factor = np.float32(sampling.repetition_penalty)
        scores[seen] = np.where(values > 0, values / factor, values * factor)
    if counts:
        ids, times = np.unique(np.asarray(answer_ids, np.int64), return_counts=True)
        scores[ids] -= (sampling.presence_penalty + sampling.frequency_penalty * times).astype(
            np.float32
        )
    return scores


def _distinct(ids: Sequence[int]) -> NDArray[Any]:
    return np.fromiter(set(ids), np.int64)
