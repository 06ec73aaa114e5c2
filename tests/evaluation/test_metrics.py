"""pass@k against hand values, enumeration and exact fractions."""

from fractions import Fraction
from itertools import combinations
from math import comb

import numpy as np
import pytest

from sage_unsloth.evaluation.intervals import paired_interval, score_interval
from sage_unsloth.evaluation.metrics import (
    difference_curve,
    mean_and_deviation,
    paired_difference,
    pass_at_k,
    pass_at_k_curve,
    pass_at_k_interval,
    unique_solutions,
)


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
        ((4, 1, 5), "k must be between 1 and num_samples, got num_samples=4, num_correct=1, k=5"),
        ((4, 1, 0), "k must be"),
        ((4, 1, -1), "k must be"),
        ((0, 0, 1), "k must be"),
        ((4, 5, 1), "num_correct must be between 0 and num_samples, got .*num_correct=5"),
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


def test_a_curve_is_its_points():
    counts_a, counts_b = np.random.default_rng(0).integers(0, 9, size=(2, 30))
    curve = pass_at_k_curve(8, counts_a, (1, 2, 8))
    assert list(curve) == [1, 2, 8]
    for k, estimate in curve.items():
        assert estimate == pass_at_k_interval(8, counts_a, k)
        assert estimate == score_interval(pass_at_k(8, counts_a, k)[None])
    for k, difference in difference_curve(8, counts_a, 8, counts_b, (8, 1)).items():
        assert difference == paired_difference(8, counts_a, 8, counts_b, k)
        values = [pass_at_k(8, counts, k)[None] for counts in (counts_a, counts_b)]
        assert difference == paired_interval(*values)


def test_models_may_have_other_numbers_of_samples_and_seeds():
    counts_a = np.array([[0, 3, 8], [1, 8, 8]])
    found = paired_difference(8, counts_a, 16, [4, 4, 16], 2, confidence=0.8)
    values = pass_at_k(8, counts_a, 2), pass_at_k(16, np.array([[4, 4, 16]]), 2)
    assert found == paired_interval(*values, 0.8)


def test_mean_and_deviation_by_hand():
    assert mean_and_deviation([1, 2, 4]) == pytest.approx((7 / 3, (7 / 3) ** 0.5))


def test_problems_that_only_one_model_solved():
    only = unique_solutions({"a": [1, 0, 5, 0], "b": [0, 2, 1, 0], "c": [0, 0, 0, 0]})
    assert {name: mine.tolist() for name, mine in only.items()} == {
        "a": [True, False, False, False],
        "b": [False, True, False, False],
        "c": [False] * 4,
    }


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k_interval(8, [], 1), "num_correct must be integers"),
        (lambda: pass_at_k_interval(8, np.zeros(0, dtype=int), 1), "the counts must have"),
        (lambda: pass_at_k_interval(8, 3, 1), r"counts must have .* got the shape \(\)"),
        (lambda: pass_at_k_interval(8, [[[3]]], 1), r"counts must have the shape .* \(1, 1, 1\)"),
        (lambda: pass_at_k_curve(8, [3], []), r"there must be a k, .*ks=\[\]"),
        (lambda: mean_and_deviation([0.5]), r"at least two seeds, got the shape \(1,\)"),
        (lambda: pass_at_k_interval(8, [3], 1, confidence=95), "confidence must be .* got 95"),
        (lambda: paired_difference(8, [3], 8, [3, 4], 1), "got 1 and 2 problems"),
    ],
)
def test_bad_counts_of_an_interval_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
