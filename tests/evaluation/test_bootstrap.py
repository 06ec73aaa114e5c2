"""Bootstrap intervals against the enumeration of all resamples."""

import math
from itertools import product

import numpy as np
import pytest

from sage_unsloth.evaluation import bootstrap
from sage_unsloth.evaluation.bootstrap import mean_difference, mean_interval, series_interval
from sage_unsloth.evaluation.report_text import interval_text


def test_an_interval_is_a_function_of_its_seed_and_not_of_the_chunks(monkeypatch):
    values = [0, 0.4, 1, 7]
    first = mean_interval(values, seed=3)
    assert mean_interval(values, seed=3) == first
    few = [mean_interval(range(8), resamples=50, seed=seed) for seed in (3, 4)]
    assert few[0] != few[1]
    monkeypatch.setattr(bootstrap, "RESAMPLED_AT_ONCE", 9)
    assert mean_interval(values, seed=3) == first


def test_share_above_zero_by_hand():
    # Two problems, differences +1 and -1: of the four equal resamples one has a mean above zero,
    # two are ties.
    difference = mean_difference([1, 0], [0, 1], resamples=20_000)
    assert difference.share_above_zero == pytest.approx(1 / 4 + 2 / 8, abs=0.01)
    assert (difference.low, difference.mean, difference.high) == (-1.0, 0.0, 1.0)


def test_a_difference_of_rounding_errors_is_a_tie():
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    shifted = (values + 0.7) - 0.7  # equal to rounding
    assert (shifted != values).any()
    assert mean_difference(values, shifted, resamples=4000).share_above_zero == 0.5


def test_resamples_are_at_least_one():
    with pytest.raises(ValueError, match="resamples must be >= 1, got 0"):
        mean_interval([1.0], resamples=0)


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
    assert whole.mean == 0.5 and np.isnan([whole.low, whole.high]).all(), "each block is all values"


def test_series_interval_takes_the_cube_root_and_cuts_to_length():
    values = np.arange(27) % 5 / 4.0
    assert series_interval(values) == series_interval(values, block=3)
    assert series_interval(values[:26]) == series_interval(values[:26], block=3)


@pytest.mark.parametrize(
    "estimate",
    [
        series_interval([0.25]),
        series_interval([0.2, 0.3]),  # one block of both
        series_interval([0.25] * 30),
        mean_interval([0.25]),
        mean_interval([0.25] * 30),
        mean_difference([0.5], [0.25]),
        mean_difference([0.75, 0.5], [0.5, 0.25]),
    ],
)
def test_there_is_no_interval_of_zero_width(estimate):
    assert estimate.mean == 0.25 and np.isnan([estimate.low, estimate.high]).all()
    assert interval_text(estimate) == "0.250"
    assert interval_text({"mean": 0.25, "low": None, "high": None}, "+") == "+0.250"


@pytest.mark.parametrize("values", [[], [[1.0]], [1.0, math.nan], [math.inf]])
@pytest.mark.parametrize("interval", [mean_interval, series_interval])
def test_values_of_an_interval_are_finite_and_in_a_row(interval, values):
    with pytest.raises(ValueError, match="a finite value for each problem or step"):
        interval(values)


@pytest.mark.parametrize("block", [0, 4])
def test_a_block_fits_into_the_series(block):
    with pytest.raises(ValueError, match=f"between 1 and the 3 values, got {block}"):
        series_interval([1, 2, 3], block=block)
