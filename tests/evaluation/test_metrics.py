"""pass@k against hand values, enumeration and exact fractions; intervals against simulation."""

import math
import time
from fractions import Fraction
from itertools import combinations, product
from math import comb

import numpy as np
import pytest

from sage_unsloth.evaluation import metrics
from sage_unsloth.evaluation.metrics import (
    Difference,
    Estimate,
    difference_curve,
    mean_and_deviation,
    mean_difference,
    mean_interval,
    paired_difference,
    pass_at_k,
    pass_at_k_curve,
    pass_at_k_interval,
    series_interval,
    solved_only_by,
)
from sage_unsloth.evaluation.report_text import interval_text


@pytest.mark.smoke
def test_values_by_hand():
    assert pass_at_k(4, 1, 2) == pytest.approx(1 / 2)
    assert pass_at_k(5, 2, 3) == pytest.approx(9 / 10)
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert isinstance(pass_at_k(4, 1, 2), float)


@pytest.mark.smoke
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
    assert metrics.resampled_means(np.ones((2, 1, 4)), 7, 0, 0).shape == (2, 7)
    monkeypatch.setattr(metrics, "RESAMPLED_AT_ONCE", 9)
    assert pass_at_k_interval(8, [0, 3, 8, 4], 2, seed=3) == first
    assert metrics.resampled_means(np.ones((2, 1, 4)), 7, 0, 0).shape == (2, 7)


def test_a_model_does_not_differ_from_itself():
    counts = np.random.default_rng(0).integers(0, 9, size=50)
    assert paired_difference(8, counts, 8, counts, 4) == Difference(0.0, 0.0, 0.0, 0.5)


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
    # Two problems, differences +1 and -1: of the four equal resamples one has a mean above zero,
    # two are ties.
    difference = paired_difference(1, [1, 0], 1, [0, 1], 1, resamples=20_000)
    assert difference.share_above_zero == pytest.approx(1 / 4 + 2 / 8, abs=0.01)
    assert (difference.low, difference.mean, difference.high) == (-1.0, 0.0, 1.0)


def test_every_k_of_a_curve_sees_the_same_resamples():
    counts_a, counts_b = np.random.default_rng(0).integers(0, 9, size=(2, 30))
    curve = pass_at_k_curve(8, counts_a, (1, 2, 8), seed=5)
    differences = difference_curve(8, counts_a, 8, counts_b, (8, 1), seed=5)
    assert list(curve) == [1, 2, 8]
    for k, estimate in curve.items():
        assert estimate == pass_at_k_interval(8, counts_a, k, seed=5)
    for k, difference in differences.items():
        assert difference == paired_difference(8, counts_a, 8, counts_b, k, seed=5)
        assert difference.mean == pytest.approx(
            np.mean(pass_at_k(8, counts_a, k) - pass_at_k(8, counts_b, k))
        )


def distribution(values):
    """How often each value occurs, rounded so that sums in another order are equal."""
    values, counts = np.unique(np.round(values, 9), return_counts=True)
    return dict(zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True))


def test_resampled_seeds_and_problems_equal_the_enumeration():
    counts_SP = np.array([[0, 3], [1, 8]])
    values_SP = counts_SP / 8
    expected = distribution(
        [
            values_SP[np.ix_(seeds, problems)].mean()
            for seeds in product(range(2), repeat=2)
            for problems in product(range(2), repeat=2)
        ]
    )
    means = metrics.resampled_means(values_SP[None], 40_000, 0, 0)[0]
    found = distribution(means)
    assert found.keys() == expected.keys()
    assert all(found[value] == pytest.approx(expected[value], abs=0.01) for value in expected)
    estimate = pass_at_k_interval(8, counts_SP, 1)
    assert estimate.mean == values_SP.mean()


def test_resampled_differences_equal_the_enumeration():
    # Model a has two seeds, model b one; the problems are the same ones in every resample.
    counts_a, counts_b = np.array([[0, 3], [1, 8]]), np.array([2, 5])
    means = [
        ((counts_a / 8)[np.ix_(seeds, problems)].mean() - (counts_b / 8)[list(problems)].mean())
        for seeds in product(range(2), repeat=2)
        for problems in product(range(2), repeat=2)
    ]
    difference = paired_difference(8, counts_a, 8, counts_b, 1, resamples=40_000)
    assert difference.mean == pytest.approx(counts_a.mean() / 8 - counts_b.mean() / 8)
    above = np.mean(np.array(means) > 1e-12) + np.mean(np.abs(means) <= 1e-12) / 2
    assert difference.share_above_zero == pytest.approx(above, abs=0.01)
    assert (difference.low, difference.high) == pytest.approx((min(means), max(means)))


def test_seeds_of_two_models_are_drawn_independently():
    # Each model has a good and a bad seed: drawn together, the difference would always be 0.
    counts = np.array([[8, 8, 8], [0, 0, 0]])
    difference = paired_difference(8, counts, 8, counts, 1, resamples=4000)
    assert difference.low == -1 and difference.high == 1


def test_a_difference_of_rounding_errors_is_a_tie():
    counts = np.array([1, 2, 3, 4, 5, 6])
    one = paired_difference(7, counts, 7, counts[::-1], 1, resamples=4000)
    other = paired_difference(7, counts[::-1], 7, counts, 1, resamples=4000)
    assert one.share_above_zero + other.share_above_zero == 1.0
    skewed = counts[
        [0, 0, 0, 0, 0, 5]
    ]  # five equal differences below 0, one above: ties are rounding errors
    found = paired_difference(7, skewed, 7, skewed[::-1], 1, resamples=4000)
    assert 0.4 < found.share_above_zero < 0.6


def test_paired_interval_covers_the_truth():
    generator = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        chances = generator.beta(
            1, 2, size=60
        )  # a problem's chance is p for b, p + p (1 - p) / 2 for a
        counts_b = generator.binomial(16, chances)
        counts_a = generator.binomial(16, chances + chances * (1 - chances) / 2)
        difference = paired_difference(16, counts_a, 16, counts_b, 1, resamples=500, seed=seed)
        covered += difference.low <= 1 / 12 <= difference.high  # E[p (1 - p)] = 1/3 - 1/6
    assert 180 <= covered <= 199


def test_interval_over_seeds_covers_the_truth():
    generator = np.random.default_rng(2)
    covered = np.zeros(2)
    for seed in range(200):
        chances = generator.beta(1, 2, size=60)
        shifts = generator.normal(
            0, 0.15, size=8
        )  # of each training seed, on the logit scale of a half
        chances_SP = np.clip(chances + shifts[:, None] * chances * (1 - chances) * 4, 0, 1)
        counts_SP = generator.binomial(16, chances_SP)
        both = pass_at_k_interval(16, counts_SP, 1, resamples=500, seed=seed)
        first = pass_at_k_interval(16, counts_SP[0], 1, resamples=500, seed=seed)
        covered += [estimate.low <= 1 / 3 <= estimate.high for estimate in (both, first)]
    assert 180 <= covered[0] <= 199
    assert covered[1] < 170, "one seed's interval does not cover other seeds"


def test_mean_and_deviation_by_hand():
    assert mean_and_deviation([1, 2, 4]) == pytest.approx((7 / 3, (7 / 3) ** 0.5))


def test_problems_that_only_one_model_solved():
    only = solved_only_by({"a": [1, 0, 5, 0], "b": [0, 2, 1, 0], "c": [0, 0, 0, 0]})
    assert {name: mine.tolist() for name, mine in only.items()} == {
        "a": [True, False, False, False],
        "b": [False, True, False, False],
        "c": [False] * 4,
    }


def test_a_whole_evaluation_is_estimated_in_seconds():
    counts = np.random.default_rng(0).binomial(256, 0.3, size=234)
    started = time.perf_counter()
    pass_at_k_curve(256, counts, [2**i for i in range(9)], resamples=10_000)
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k_interval(8, [], 1), "num_correct must be integers"),
        (lambda: pass_at_k_interval(8, np.zeros(0, dtype=int), 1), "at least one problem"),
        (lambda: pass_at_k_interval(8, 3, 1), r"one axis .* got the shape \(\)"),
        (lambda: pass_at_k_interval(8, [[[3]]], 1), r"one of seeds before it, .* \(1, 1, 1\)"),
        (lambda: pass_at_k_curve(8, [3], []), r"there must be a k; .*ks=\[\]"),
        (lambda: mean_and_deviation([0.5]), r"at least two seeds; got the shape \(1,\)"),
        (lambda: pass_at_k_interval(8, [3], 1, confidence=95), "confidence must be .* got 95"),
        (lambda: pass_at_k_interval(8, [3], 1, resamples=0), "resamples must be >= 1; got 0"),
        (lambda: paired_difference(8, [3], 8, [3, 4], 1), "got 1 and 2 problems"),
    ],
)
def test_bad_resampling_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("shape", "problems", "k", "covered"),
    [
        # What the README says of few problems and of rates near 0 and 1: less than 95 %, and by how
        # much.
        ((1, 2), 60, 1, 0.94),
        ((0.15, 1.5), 30, 1, 0.91),
        ((0.15, 1.5), 60, 1, 0.92),
        ((0.5, 0.5), 30, 256, 0.61),
        ((0.5, 0.5), 60, 256, 0.88),
    ],
)
def test_how_often_an_interval_covers_the_truth_at_benchmark_size(shape, problems, k, covered):
    """400 sets of problems whose solve rates are Beta(shape), 256 samples each; ± 3 standard errors
    of 400 draws.
    """
    generator = np.random.default_rng(0)
    truth = np.mean(1 - (1 - generator.beta(*shape, size=2_000_000)) ** k)
    counts_SP = np.stack(
        [generator.binomial(256, generator.beta(*shape, size=problems)) for _ in range(400)]
    )
    # pass@k of all sets at once, and then the interval that `pass_at_k_interval` gives each.
    values_SP = pass_at_k(256, counts_SP, k)
    hits = 0
    for seed, values_P in enumerate(values_SP):
        found = mean_interval(values_P, resamples=1000, seed=seed)
        hits += found.low <= truth <= found.high
    assert found == pass_at_k_interval(256, counts_SP[-1], k, resamples=1000, seed=399)
    error = (covered * (1 - covered) / 400) ** 0.5
    assert hits / 400 == pytest.approx(covered, abs=3 * error)


def enumerated(means, confidence):
    """The two quantiles of equally likely means, where the cumulative share passes the tails."""
    means, tail = sorted(means), (1 - confidence) / 2
    return means[math.floor(tail * len(means))], means[math.ceil((1 - tail) * len(means)) - 1]


def test_mean_interval_by_enumeration():
    values = (0.0, 0.3, 1.0)
    means = [sum(draw) / 3 for draw in product(values, repeat=3)]
    found = mean_interval(values, confidence=0.8, resamples=200_000)
    low, high = enumerated(means, 0.8)
    assert (found.mean, found.low, found.high) == pytest.approx((1.3 / 3, low, high))


def test_mean_difference_is_paired():
    found = mean_difference([0.9, 0.5], [0.4, 0.5], confidence=0.4, resamples=100_000)
    # Differences .5 and 0: means of two draws are 0, .25, .25, .5, each as likely.
    assert (found.mean, found.low, found.high) == pytest.approx((0.25, 0.25, 0.25))
    assert found.share_above_zero == pytest.approx(0.75 + 0.25 / 2, abs=0.01)
    with pytest.raises(ValueError, match="got 2 and 1 values"):
        mean_difference([1, 2], [1])


def test_series_interval_draws_blocks_of_neighbours():
    values = [0.0] * 8 + [1.0] * 8
    circle = values * 2
    blocks = [sum(circle[start : start + 8]) / 16 for start in range(16)]
    means = [a + b for a, b in product(blocks, repeat=2)]
    found = series_interval(values, block=8, confidence=0.8, resamples=100_000)
    assert (found.low, found.high) == pytest.approx(enumerated(means, 0.8))
    alone = series_interval(values, block=1, confidence=0.8, resamples=100_000)
    assert found.high - found.low > 1.3 * (alone.high - alone.low), (
        "steps that resemble each other say less"
    )
    whole = series_interval(values, block=16)
    assert (whole.mean, whole.low, whole.high) == (0.5, 0.5, 0.5)


def test_series_interval_takes_the_cube_root_and_cuts_to_length():
    values = np.arange(27) % 5 / 4.0
    assert series_interval(values) == series_interval(values, block=3)
    assert series_interval(values[:26]) == series_interval(values[:26], block=3)
    alone = series_interval([0.25])
    assert alone.mean == 0.25 and np.isnan([alone.low, alone.high]).all(), "one step, no interval"
    assert interval_text(alone) == "0.250"
    assert interval_text({"mean": 0.25, "low": None, "high": None}, "+") == "+0.250"


@pytest.mark.parametrize("values", [[], [[1.0]], [1.0, math.nan], [math.inf]])
@pytest.mark.parametrize("interval", [mean_interval, series_interval])
def test_values_of_an_interval_are_finite_and_in_a_row(interval, values):
    with pytest.raises(ValueError, match="one finite value for each problem or step"):
        interval(values)


@pytest.mark.parametrize("block", [0, 4])
def test_a_block_fits_into_the_series(block):
    with pytest.raises(ValueError, match=f"between 1 and the 3 values; got {block}"):
        series_interval([1, 2, 3], block=block)
