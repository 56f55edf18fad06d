"""Each parameter against its definition, worked out anew: a swapped or misplaced one would fail."""

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from diptych_contracts.sampling import Sampling
from diptych_engine.sampling import chances, sample, uniform

VOCAB = 40


def logits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=3, size=VOCAB).astype(np.float32)


def expected_scores(
    logits: np.ndarray, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]
) -> list[float]:
    """Bias, repetition (prompt and answer), frequency and presence (answer), token by token."""
    bias = dict(sampling.logit_bias)
    scores = []
    for token, logit in enumerate(logits.tolist()):
        score = logit + bias.get(token, 0.0)
        if token in prompt or token in answer:
            factor = sampling.repetition_penalty
            score = score / factor if score > 0 else score * factor
        times = list(answer).count(token)
        score -= sampling.frequency_penalty * times
        score -= sampling.presence_penalty if times else 0.0
        scores.append(score)
    return scores


def expected_distribution(scores: list[float], sampling: Sampling) -> dict[int, float]:
    """Temperature, then `min_p`, `top_k`, `top_p`, each of what the one before left."""
    masses = np.exp((np.array(scores) - max(scores)) / sampling.temperature)
    kept = [t for t in range(len(scores)) if masses[t] >= sampling.min_p * masses.max()]
    kept.sort(key=lambda t: (-masses[t], t))
    kept = kept[: sampling.top_k] if sampling.top_k else kept
    total, reached, nucleus = sum(masses[t] for t in kept), 0.0, []
    for token in kept:
        if sampling.top_p < 1 and reached >= sampling.top_p * total:
            break
        nucleus.append(token)
        reached += masses[token]
    total = sum(masses[t] for t in nucleus)
    return {t: float(masses[t] / total) for t in nucleus}


@pytest.mark.parametrize(
    "given",
    [
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"repetition_penalty": 1.6},
        {"repetition_penalty": 0.6},
        {"logit_bias": ((3, 6.0), (5, -6.0))},
        {
            "presence_penalty": 0.9,
            "frequency_penalty": -0.4,
            "repetition_penalty": 1.3,
            "logit_bias": ((1, 2.5), (2, -2.5)),
        },
    ],
)
def test_scores_are_penalized_as_defined(given: dict[str, Any]) -> None:
    """Greedy takes the best score, wherever it lies: fifty distributions tell them apart."""
    sampling, changed = Sampling(temperature=0, **given), 0
    for seed in range(50):
        logits, rng = logits_of(seed), Random(seed)
        likely = np.argsort(-logits)[:6].tolist()
        prompt, answer = rng.choices(likely, k=2), rng.choices(likely, k=5)
        best = int(np.argmax(expected_scores(logits, sampling, prompt, answer)))
        assert sample(logits, sampling, prompt_ids=prompt, answer_ids=answer) == best
        changed += best != int(logits.argmax())
    assert changed > 5


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"min_p": 0.2},
        {"min_p": 0.2, "temperature": 1.8},
        {"top_k": 4},
        {"top_p": 0.8},
        {"top_p": 0.8, "temperature": 1.8},
        {"min_p": 0.02, "top_k": 5, "top_p": 0.9, "temperature": 1.3},
        {"logit_bias": ((0, 3.0),), "frequency_penalty": 0.5, "top_k": 6, "top_p": 0.95},
    ],
)
def test_tokens_come_as_often_as_the_definition_says(given: dict[str, Any]) -> None:
    sampling, logits = Sampling(seed=11, **given), logits_of(99)
    answer = [int(logits.argmax())]
    scores = expected_scores(logits, sampling, (), answer)
    expected, draws = expected_distribution(scores, sampling), 4000
    counts = dict.fromkeys(expected, 0)
    for n in range(draws):
        drawn = Sampling(**{**given, "seed": n})
        counts[sample(logits, drawn, prompt_ids=(), answer_ids=answer)] += 1
    for token, share in expected.items():
        assert counts[token] / draws == pytest.approx(share, abs=0.035)


def test_a_draw_is_the_inverse_of_the_distribution_at_the_seeds_number() -> None:
    """So the same seed takes the same token whatever else is computed beside it."""
    logits = logits_of(5)
    masses = np.exp(logits.astype(np.float64) - logits.max())
    for seed in range(100):
        point = uniform(seed, 2) * masses.sum()
        expected = int(np.searchsorted(masses.cumsum(), point, side="right"))
        assert sample(logits, Sampling(seed=seed), prompt_ids=(), answer_ids=(1, 2)) == expected


def test_a_bias_of_100_forces_and_one_of_minus_100_forbids() -> None:
    logits = logits_of(1)
    best = int(logits.argmax())
    for temperature in (0.0, 1.0, 2.0):
        forced = Sampling(temperature=temperature, logit_bias=((7, 100.0),))
        banned = Sampling(temperature=temperature, logit_bias=((best, -100.0),))
        assert sample(logits, forced, prompt_ids=(), answer_ids=()) == 7
        assert sample(logits, banned, prompt_ids=(), answer_ids=()) != best


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())


@pytest.mark.parametrize("top", [0, 1, 5, 20, 100])
def test_logprobs_are_the_log_softmax_of_the_logits(top: int) -> None:
    logits = logits_of(3)
    expected = log_softmax(logits)
    (chosen, *ranked) = chances(logits, 17, top=top)
    assert chosen == (17, pytest.approx(expected[17], abs=2e-6))
    order = np.argsort(-expected, kind="stable")[:top].tolist()
    assert [token for token, _ in ranked] == order
    assert [value for _, value in ranked] == pytest.approx(expected[order].tolist(), abs=2e-6)


def test_logprobs_are_finite_and_equals_rank_by_id() -> None:
    logits = np.array([-np.inf, 1.0, 1.0, 1.0], np.float32)
    third = pytest.approx(-np.log(3), abs=1e-6)
    assert chances(logits, 0, top=4) == (
        (0, -9999.0),
        (1, third),
        (2, third),
        (3, third),
        (0, -9999.0),
    )


def test_logprobs_sum_to_one() -> None:
    _, *told = chances(logits_of(8), 0, top=VOCAB)
    assert sum(np.exp(value) for _, value in told) == pytest.approx(1, abs=1e-4)
