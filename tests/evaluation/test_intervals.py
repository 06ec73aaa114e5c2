"""Intervals by hand, against their definitions, and by how often they hold the truth."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from research.coverage import KS, SHAPES, all_cases, one_model, several_seeds, two_models
from sage_unsloth.evaluation.intervals import (
    PRIOR_DISPERSION,
    PRIOR_SIZE,
    paired_interval,
    score_interval,
    variance_of_mean,
)
from sage_unsloth.study.crossed import crossed_interval

COMMITTED = Path("data", "results", "coverage", "coverage.json")


@pytest.mark.smoke
@pytest.mark.parametrize("problems", [2, 30, 500])
def test_where_all_are_solved_or_none_the_interval_is_wilsons(problems):
    q2 = stats.t.ppf(0.975, problems - 1) ** 2
    solved = score_interval(np.ones((1, problems)))
    assert (solved.mean, solved.high) == (1, 1)
    assert solved.low == pytest.approx(problems / (problems + q2))
    none = score_interval(np.zeros((1, problems)))
    assert (none.mean, none.low) == (0, 0)
    assert none.high == pytest.approx(q2 / (problems + q2))


def test_coin_flips_get_wilsons_interval():
    values = np.repeat([0.0, 1.0], (33, 7))
    q = stats.t.ppf(0.95, 39)
    found = score_interval(values[None], confidence=0.9)
    # The roots of (m − μ)² = q² μ (1 − μ) / P.
    roots = np.roots([1 + q**2 / 40, -(2 * 7 / 40 + q**2 / 40), (7 / 40) ** 2])
    assert (found.low, found.high) == pytest.approx(sorted(roots))


def test_values_that_vary_less_than_coin_flips_get_the_smaller_room():
    values = np.array([0.2, 0.3, 0.5, 0.6, 0.4])
    found = score_interval(values[None])
    flips = 0.4 * 0.6
    dispersion = (5 * values.var(ddof=1) + PRIOR_DISPERSION) / (5 * flips + PRIOR_DISPERSION)
    q2 = stats.t.ppf(0.975, 4) ** 2
    for end in (found.low, found.high):
        assert (0.4 - end) ** 2 == pytest.approx(q2 * dispersion * end * (1 - end) / 5)
    assert found.low < 0.4 < found.high


def test_one_problem_says_nothing_of_others():
    found = score_interval(np.array([[0.5]]))
    assert found.low < 0.05 and found.high > 0.95
    assert paired_interval([[1.0]], [[0.5]]).low == -1


def test_an_interval_holds_its_mean_and_ends_within_0_and_1():
    generator = np.random.default_rng(0)
    for seeds, problems, a in product((1, 3), (1, 2, 5, 60), (0.05, 1, 20)):
        values = generator.beta(a, a, size=(seeds, problems))
        found = score_interval(values)
        assert 0 <= found.low < found.mean < found.high <= 1
        other = paired_interval(values, generator.beta(a, a, size=(2, problems)))
        assert -1 <= other.low < other.mean < other.high <= 1


def test_a_difference_by_hand():
    a, b = np.array([[0.9, 0.5, 0.5, 0.2]]), np.array([[0.4, 0.5, 0.5, 0.3]])
    found = paired_interval(a, b, confidence=0.9)
    # Differences .5, 0, 0, −.1 with the mean .1 and the median 0.
    squares = 0.4**2 + 2 * 0.1**2 + 0.2**2
    differing = 0.6**2 / 0.26
    size = (differing * 0.26 / 0.6 + PRIOR_SIZE) / (differing + PRIOR_SIZE)
    error = ((squares + size**2) / (4 * 3)) ** 0.5
    half = stats.t.ppf(0.95, 3) * error
    assert (found.mean, found.low, found.high) == pytest.approx((0.1, 0.1 - half, 0.1 + half))
    assert found.share_above_zero == pytest.approx(stats.t.cdf(0.1 / error, 3))


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_where_no_problem_differs_one_might(value):
    values = np.full((1, 30), value)
    found = paired_interval(values, values)
    half = stats.t.ppf(0.975, 29) / (30 * 29) ** 0.5
    assert (found.mean, found.share_above_zero) == (0, 0.5)
    assert (found.low, found.high) == pytest.approx((-half, half))


def test_models_exchanged_mirror_the_interval():
    a, b = np.random.default_rng(0).random((2, 1, 20))
    one, other = paired_interval(a, b), paired_interval(b, a)
    assert (one.low, one.mean) == pytest.approx((-other.high, -other.mean))
    assert one.share_above_zero == pytest.approx(1 - other.share_above_zero)


def test_what_problems_share_cancels():
    generator = np.random.default_rng(0)
    b = generator.uniform(0, 0.9, size=(1, 60))
    a = b + generator.uniform(0, 0.03, size=(1, 60))
    paired, alone = paired_interval(a, b), score_interval(a)
    assert paired.low > 0
    assert paired.high - paired.low < (alone.high - alone.low) / 10


def test_variances_are_those_of_the_two_way_layout():
    values_SP = np.random.default_rng(0).normal(size=(5, 9))
    values_SP += np.random.default_rng(1).normal(size=(5, 1))
    values_SP += np.random.default_rng(2).normal(size=9)
    of_problems, of_seeds = variance_of_mean(values_SP)
    assert of_problems == pytest.approx(values_SP.mean(axis=0).var(ddof=1) / 9)
    assert (of_problems + of_seeds) ** 0.5 == pytest.approx(crossed_interval(values_SP).error)
    assert variance_of_mean(values_SP[:1])[1] == 0


def test_seeds_that_differ_widen_both_intervals():
    generator = np.random.default_rng(0)
    problems_P = generator.beta(1, 2, size=60)
    alike_SP, apart_SP = (
        np.clip(problems_P + np.array(shifts)[:, None], 0, 1)
        for shifts in ((0, 0, 0, 0), (-0.2, -0.1, 0.1, 0.2))
    )
    for interval in (score_interval, lambda v: paired_interval(v, problems_P[None])):
        found = [interval(values) for values in (alike_SP, apart_SP)]
        widths = [one.high - one.low for one in found]
        assert widths[1] > 1.5 * widths[0]


def test_training_seeds_of_two_models_are_not_paired():
    """Each model has a good and a bad seed, the same on every problem: seed by seed they never
    differ, and yet two other seeds of each might by .2.
    """
    values_SP = np.repeat([[0.6], [0.4]], 60, axis=1)
    found = paired_interval(values_SP, values_SP)
    of_seeds = (0.1**2 + 0.1**2) / 1 / 2  # of the mean of two seeds, for each model
    of_problems = 1 / (60 * 59)
    variance = of_problems + 2 * of_seeds
    degrees = variance**2 / (of_problems**2 / 59 + 2 * of_seeds**2 / 1)
    half = stats.t.ppf(0.975, degrees) * variance**0.5
    assert 0.2 < half < 1
    assert (found.mean, found.low, found.high) == pytest.approx((0, -half, half))


@pytest.mark.parametrize("value", [-0.1, 1.1, np.nan])
def test_values_outside_0_and_1_are_refused(value):
    with pytest.raises(ValueError, match=r"needs values in \[0, 1\]"):
        score_interval(np.array([[0.5, value]]))


def chance_error(share: float, evaluations: int) -> float:
    return (share * (1 - share) / evaluations) ** 0.5


@pytest.mark.parametrize(
    ("shape", "problems", "k"),
    [
        ("every difficulty, Beta(1, 2)", 60, 1),
        ("mostly hard, Beta(.15, 1.5)", 30, 1),
        ("hard or easy, Beta(.5, .5)", 30, 256),
        ("hard or easy, Beta(.5, .5)", 60, 256),
    ],
)
def test_an_interval_holds_the_truth(shape, problems, k):
    rows = {row["k"]: row for row in one_model(SHAPES[shape], problems, 300)}
    assert rows[k]["holds"] >= 0.93 - 2 * chance_error(0.93, 300)
    if rows[k]["bootstrap_holds"] >= 0.93:
        assert rows[k]["width"] <= 1.2 * rows[k]["bootstrap_width"]


def test_an_interval_of_a_difference_and_of_seeds_holds_the_truth():
    shape = SHAPES["hard or easy, Beta(.5, .5)"]
    rows = [*two_models(shape, "a little better", 60, 300), *several_seeds(3, 60, 300)]
    for row in rows:
        assert row["holds"] >= 0.93 - 2 * chance_error(0.93, 300)


def test_what_the_committed_simulation_found():
    result = json.loads(COMMITTED.read_text())
    rows, error = result["rows"], chance_error(0.93, result["evaluations"])
    for label, _ in all_cases(2):
        found = [row["k"] for row in rows if row.items() >= label.items()]
        assert found == ([1] if "seeds" in label["of"] else list(KS)), label
    one = [row for row in rows if row["of"].startswith("one model")]
    assert [row for row in one if row["holds"] < 0.93 - 2 * error] == []
    # Where a gain on one problem in twenty was not among those asked, no interval can know of it.
    pairs = [row for row in rows if row not in one and row["of"] != "a few problems gained"]
    assert sum(row["holds"] < 0.93 - 2 * error for row in pairs) <= 1
    assert min(row["holds"] for row in pairs) > 0.9, "as the README says"
