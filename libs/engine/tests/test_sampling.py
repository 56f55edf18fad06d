import math

import numpy as np
import pytest

from diptych_contracts.errors import Permanent
from diptych_contracts.sampling import Sampling
from diptych_engine.sampling import check_sampling, sample, uniform


def logits_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def draws(logits: np.ndarray, sampling: Sampling, count: int = 400) -> list[int]:
    return [sample(logits, sampling, prompt_ids=(), answer_ids=[0] * n) for n in range(count)]


def test_temperature_zero_takes_the_best_and_of_equals_the_lowest_id() -> None:
    greedy = Sampling(temperature=0)
    assert sample(logits_of(1, 3, 3, 2), greedy, prompt_ids=(), answer_ids=()) == 1


STRANGE = [
    Sampling(temperature=math.nan),
    Sampling(temperature=-1.0),
    Sampling(temperature=math.inf),
    Sampling(top_p=math.nan),
    Sampling(min_p=math.nan),
    Sampling(top_p=0.0),
    Sampling(top_k=-1),
    Sampling(min_p=2.0),
    Sampling(presence_penalty=math.inf),
    Sampling(frequency_penalty=math.nan),
    Sampling(repetition_penalty=0.0),
    Sampling(logit_bias=((5, 1.0), (6, math.nan))),
    Sampling(top_logprobs=-1),
]


@pytest.mark.parametrize("strange", STRANGE, ids=str)
def test_what_no_gateway_lets_pass_is_refused(strange: Sampling) -> None:
    """A `min_p` of 2 left no token to choose, and the worker's process died of that."""
    with pytest.raises(Permanent, match="expected"):
        check_sampling(strange)


@pytest.mark.parametrize("edge", [0, 1])
def test_the_edges_of_what_a_gateway_lets_pass_are_taken(edge: int) -> None:
    check_sampling(
        Sampling(
            temperature=(0, 2)[edge],
            top_p=(5e-324, 1)[edge],
            min_p=(0, 1)[edge],
            presence_penalty=(-2, 2)[edge],
            frequency_penalty=(-2, 2)[edge],
            repetition_penalty=(0.01, 2)[edge],
            logit_bias=((1, (-100, 100)[edge]),),
            top_logprobs=(0, 20)[edge],
        )
    )


def test_random_numbers_depend_on_seed_and_index_only() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert uniform(2**64 + 7, 3) == uniform(7, 3)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    numbers = [uniform(1, index) for index in range(2000)]
    assert 0 <= min(numbers) < 0.01 < 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / 2000 - 0.5) < 0.02


def test_known_random_numbers_never_change() -> None:
    """A recovery on another version of this code must go on with the same text."""
    assert [round(uniform(42, index), 6) for index in range(3)] == [0.29152, 0.541239, 0.044768]


def test_tokens_come_as_often_as_they_are_likely() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3], np.float32))
    counts = np.bincount(draws(logits, Sampling(seed=3), 3000), minlength=3) / 3000
    assert np.allclose(counts, [0.1, 0.6, 0.3], rtol=0, atol=0.03), counts


def test_low_temperature_sharpens() -> None:
    logits = np.log(np.array([0.4, 0.6], np.float32))
    assert set(draws(logits, Sampling(temperature=0.01))) == {1}
    assert set(draws(logits, Sampling(temperature=2.0))) == {0, 1}


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.5), {0}),
        (Sampling(top_p=0.51), {0, 1}),
        (Sampling(top_p=0.81), {0, 1, 2}),
        (Sampling(min_p=0.5), {0, 1}),
        (Sampling(min_p=1.0), {0}),
        (Sampling(top_k=3, top_p=0.84), {0, 1}),
        (Sampling(top_k=1, top_p=0.9, min_p=0.1), {0}),
        (Sampling(), {0, 1, 2, 3}),
    ],
)
def test_filters_keep_what_they_name(sampling: Sampling, kept: set[int]) -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))
    assert set(draws(logits, sampling)) == kept


def test_top_k_of_equals_keeps_the_lowest_ids() -> None:
    assert set(draws(np.zeros(100, np.float32), Sampling(top_k=3))) == {0, 1, 2}


def test_top_p_of_a_flat_distribution_needs_more_than_the_first_ranking() -> None:
    seen = draws(np.zeros(4000, np.float32), Sampling(top_p=0.5), 2000)
    assert max(seen) < 2000
    assert max(seen) > 1500


def test_every_filtered_draw_is_one_of_the_unfiltered_support() -> None:
    logits = np.random.default_rng(0).standard_normal(49_152).astype(np.float32) * 4
    ranked = np.argsort(-logits, kind="stable")
    assert set(draws(logits, Sampling(top_k=50), 100)) <= set(ranked[:50].tolist())


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=0), 0),
        (Sampling(temperature=0, presence_penalty=0.5), 1),
        (Sampling(temperature=0, frequency_penalty=0.2), 1),
        (Sampling(temperature=0, frequency_penalty=0.1), 0),
        (Sampling(temperature=0, repetition_penalty=1.2), 2),
    ],
)
def test_penalties_hold_back_what_was_said(sampling: Sampling, expected: int) -> None:
    logits = logits_of(3.0, 2.7, 2.6)
    answer = [0, 0]
    before = logits.copy()
    assert sample(logits, sampling, prompt_ids=[1], answer_ids=answer) == expected
    np.testing.assert_array_equal(logits, before)


def test_repetition_penalty_pushes_negative_logits_down() -> None:
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert sample(logits_of(-1.0, -1.5), greedy, prompt_ids=[0], answer_ids=()) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    with pytest.raises(Permanent, match="not finite"):
        sample(logits_of(0.0, bad), Sampling(), prompt_ids=(), answer_ids=())


def test_a_token_of_mass_zero_is_never_drawn() -> None:
    logits = logits_of(0.0, -np.inf, -np.inf)
    assert set(draws(logits, Sampling())) == {0}
