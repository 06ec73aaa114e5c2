"""pass@k against hand values, enumeration and exact fractions; intervals against simulation."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from sage_unsloth import metrics
from sage_unsloth.metrics import (
    Difference,
    Estimate,
    paired_difference,
    pass_at_k,
    pass_at_k_interval,
)


def test_values_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)
    assert pass_at_k(5, 2, 3) == pytest.approx(9 / 10)
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert isinstance(pass_at_k(4, 1, 2), float)


@pytest.mark.parametrize("n", range(1, 8))
def test_equals_the_enumeration_of_all_draws(n):
    for c in range(n + 1):
        samples = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(samples, k)]
            assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-15)


def test_equals_exact_fractions_at_4096_samples():
    n = 4096
    for c in (1, 2, 40, 1000, 4000):
        for k in (1, 2, 64, 256, 1024, 4095):
            exact = 1 - Fraction(comb(n - c, k), comb(n, k))
            assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=0)


def test_is_exact_at_both_ends():
    n = np.array([1, 7, 4096])
    np.testing.assert_array_equal(pass_at_k(n, 0, n), 0.0)
    np.testing.assert_array_equal(pass_at_k(n, n, 1), 1.0)
    np.testing.assert_array_equal(pass_at_k(4096, np.array([1, 4, 4000]), [4096, 4093, 97]), 1.0)


def test_broadcasts():
    values_PK = pass_at_k(8, np.array([[0], [3], [8]]), np.array([1, 2, 4, 8]))
    assert values_PK.shape == (3, 4)
    assert values_PK.dtype == np.float64
    assert values_PK[1, 2] == pass_at_k(8, 3, 4)
    assert pass_at_k(np.array([8, 4], dtype=np.uint8), [3, 1], 2).tolist() == [
        pass_at_k(8, 3, 2),
        pass_at_k(4, 1, 2),
    ]
    assert pass_at_k(8, np.zeros((0,), dtype=int), 1).shape == (0,)


def test_unsigned_counts_do_not_wrap_around():
    counts = np.array([[8], [7], [4]], dtype=np.uint8)
    np.testing.assert_allclose(pass_at_k(*counts), [1.0])
    counts[1] = 2
    np.testing.assert_allclose(pass_at_k(*counts), [1 - 15 / 70])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 1, 5), "k must be between 1 and num_samples; got num_samples=4, num_correct=1, k=5"),
        ((4, 1, 0), "k must be"),
        ((4, 1, -1), "k must be"),
        ((0, 0, 1), "k must be"),
        ((4, 5, 1), "num_correct must be between 0 and num_samples; got .*num_correct=5"),
        ((4, -1, 1), "num_correct must be"),
        (([4, 4], [1, 9], 1), "num_correct=9"),
        ((4.0, 1, 1), "num_samples must be integers .* got float64"),
        ((4, 0.5, 1), "num_correct must be integers"),
        ((4, 1, 1.0), "k must be integers"),
        ((4, True, 1), "num_correct must be integers .* got bool"),
    ],
)
def test_bad_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


def test_interval_against_a_plain_bootstrap():
    num_correct = np.array([0, 1, 2, 8, 8, 5, 0, 3])
    values = [1 - comb(8 - c, 2) / comb(8, 2) for c in num_correct.tolist()]
    estimate = pass_at_k_interval(8, num_correct, 2, confidence=0.9, resamples=4000, seed=1)
    generator = np.random.default_rng(99)
    means = sorted(np.mean(generator.choice(values, size=8)) for _ in range(4000))
    assert estimate.mean == pytest.approx(np.mean(values))
    assert estimate.low == pytest.approx(means[200], abs=0.02)
    assert estimate.high == pytest.approx(means[3800], abs=0.02)


def test_interval_resamples_problems_not_samples():
    half_solved = pass_at_k_interval(1000, [500] * 20, 1)
    assert half_solved == Estimate(0.5, 0.5, 0.5)
    all_or_nothing = pass_at_k_interval(1000, [0, 1000] * 10, 1)
    assert all_or_nothing.high - all_or_nothing.low == pytest.approx(4 * 0.5 / 20**0.5, abs=0.06)


def test_interval_covers_the_truth():
    generator = np.random.default_rng(0)
    covered = 0
    for seed in range(200):
        chances = generator.beta(1, 2, size=60)  # mean 1/3
        estimate = pass_at_k_interval(
            16, generator.binomial(16, chances), 1, resamples=500, seed=seed
        )
        covered += estimate.low <= 1 / 3 <= estimate.high
    assert 180 <= covered <= 199  # .95 of 200, with three standard errors to spare


def test_interval_is_a_function_of_its_seed_and_not_of_the_chunks(monkeypatch):
    first = pass_at_k_interval(8, [0, 3, 8, 4], 2, seed=3)
    assert pass_at_k_interval(8, [0, 3, 8, 4], 2, seed=3) == first
    few = [pass_at_k_interval(8, range(8), 2, resamples=50, seed=seed) for seed in (3, 4)]
    assert few[0] != few[1]
    assert len(metrics._resampled_means(np.arange(4.0), 7, 0)) == 7
    monkeypatch.setattr(metrics, "RESAMPLED_AT_ONCE", 9)
    assert pass_at_k_interval(8, [0, 3, 8, 4], 2, seed=3) == first
    assert len(metrics._resampled_means(np.arange(4.0), 7, 0)) == 7


def test_a_model_does_not_differ_from_itself():
    counts = np.random.default_rng(0).integers(0, 9, size=50)
    assert paired_difference(8, counts, 8, counts, 4) == Difference(0.0, 0.0, 0.0, 0.0)


def test_pairing_removes_what_the_problems_share():
    generator = np.random.default_rng(0)
    counts_b = generator.integers(0, 90, size=60)
    counts_a = counts_b + generator.integers(0, 3, size=60)
    paired = paired_difference(100, counts_a, 100, counts_b, 1)
    assert paired.mean == pytest.approx((counts_a - counts_b).mean() / 100)
    assert 0 < paired.low < paired.mean < paired.high
    assert paired.share_above_zero == 1.0
    alone = pass_at_k_interval(100, counts_a, 1)
    assert paired.high - paired.low < (alone.high - alone.low) / 10
    reverse = paired_difference(100, counts_b, 100, counts_a, 1)
    assert reverse.low == pytest.approx(-paired.high)
    assert reverse.share_above_zero == 0.0


def test_share_above_zero_by_hand():
    # Two problems, differences +1 and -1: of the four equal resamples one has a mean above zero.
    difference = paired_difference(1, [1, 0], 1, [0, 1], 1, resamples=20_000)
    assert difference.share_above_zero == pytest.approx(1 / 4, abs=0.01)
    assert (difference.low, difference.mean, difference.high) == (-1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k_interval(8, [], 1), "num_correct must be integers"),
        (lambda: pass_at_k_interval(8, np.zeros(0, dtype=int), 1), "at least one problem"),
        (lambda: pass_at_k_interval(8, 3, 1), r"one axis .* got the shape \(\)"),
        (lambda: pass_at_k_interval(8, [[3]], 1), "one axis"),
        (lambda: pass_at_k_interval(8, [3], 1, confidence=95), "confidence must be .* got 95"),
        (lambda: pass_at_k_interval(8, [3], 1, resamples=0), "resamples must be >= 1; got 0"),
        (lambda: paired_difference(8, [3], 8, [3, 4], 1), "got 1 and 2 problems"),
    ],
)
def test_bad_resampling_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
