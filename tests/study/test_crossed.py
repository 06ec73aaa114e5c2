"""Intervals over seeds and problems at once: against known cases, and by how often they hold in
simulation.
"""

import numpy as np
import pytest

from sage_unsloth.study.crossed import (
    Components,
    components,
    crossed_interval,
    detectable_difference,
    student_quantile,
)


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 7, 2.36462),
        (0.8, 7, 0.89603),
        (0.975, 1e4, 1.96020),
        (0.9, 2.5, 1.73025),
        (0.5, 3, 0),
    ],
)
def test_quantiles_of_student(probability, freedom, value):
    """Tables; 2.5 degrees of freedom by numerical integration of the density elsewhere."""
    if freedom == 2.5:
        t = np.linspace(0, student_quantile(probability, freedom), 200_001)
        density = (1 + t**2 / freedom) ** (-(freedom + 1) / 2)
        tail = np.linspace(0, 1, 2_000_001)[:-1]  # t = tail / (1 - tail) covers the whole half line
        whole = (1 + (tail / (1 - tail)) ** 2 / freedom) ** (-(freedom + 1) / 2) / (1 - tail) ** 2
        share = np.trapezoid(density, t) / np.trapezoid(whole, tail)
        assert share == pytest.approx(2 * probability - 1, abs=1e-4)
        return
    assert student_quantile(probability, freedom) == pytest.approx(value, abs=1e-4)


@pytest.mark.smoke
def test_one_seed_or_one_problem_is_the_ordinary_interval_of_student():
    values = np.array([0.1, 0.5, 0.2, 0.6])
    half = 3.182446 * values.std(ddof=1) / 2
    for table in (values[None], values[:, None]):
        found = crossed_interval(table)
        assert (found.mean, found.freedom) == pytest.approx((0.35, 3))
        assert (found.low, found.high) == pytest.approx((0.35 - half, 0.35 + half), abs=1e-6)


def test_seeds_that_differ_by_a_constant_leave_seeds_as_the_only_source():
    table = np.array([[0.1], [0.2], [0.6]]) + np.zeros((3, 50))
    alone = crossed_interval(table[:, :1])
    found = crossed_interval(table)
    assert (found.low, found.high, found.freedom) == pytest.approx((alone.low, alone.high, 2))


@pytest.mark.parametrize(
    "sizes", [(0.1, 0.2, 0.3), (0.0, 0.0, 0.3), (0.1, 0.0, 0.1), (0.0, 0.3, 0.1)]
)
def test_intervals_hold_as_often_as_they_say(sizes):
    """Of 1,000 tables of 8 seeds and 30 problems; a bootstrap of 8 seeds would hold in about 90
    %.
    """
    rng = np.random.default_rng(0)
    seed, problem, rest = sizes
    held = 0
    for _ in range(1000):
        table = (
            rng.normal(0, seed, (8, 1)) + rng.normal(0, problem, 30) + rng.normal(0, rest, (8, 30))
        )
        found = crossed_interval(table)
        held += found.low < 0 < found.high
    assert (
        935 <= held <= 999
    )  # the floor at either source alone may make them wider, never narrower


def test_components_are_found():
    rng = np.random.default_rng(1)
    found = [
        components(
            rng.normal(0, 0.1, (8, 1)) + rng.normal(0, 0.2, 60) + rng.normal(0, 0.3, (8, 60))
        )
        for _ in range(300)
    ]
    assert np.mean([c.seed for c in found]) == pytest.approx(0.01, rel=0.1)
    assert np.mean([c.problem for c in found]) == pytest.approx(0.04, rel=0.1)
    assert np.mean([c.rest for c in found]) == pytest.approx(0.09, rel=0.03)


def test_the_power_that_was_promised():
    """A true difference of that size is found in 80 % of 1,000 benchmarks, or a little more."""
    rng = np.random.default_rng(2)
    truth = Components(seed=2e-4, problem=4e-4, rest=0.02)
    difference = detectable_difference(truth, 8, 100)
    noises = [np.sqrt(variance) for variance in (truth.seed, truth.problem, truth.rest)]
    seen = 0
    for _ in range(1000):
        table = (
            difference
            + rng.normal(0, noises[0], (8, 1))
            + rng.normal(0, noises[1], 100)
            + rng.normal(0, noises[2], (8, 100))
        )
        seen += crossed_interval(table).low > 0
    assert 770 <= seen <= 930


@pytest.mark.parametrize("values", [[[1.0]], [1.0, 2.0], [[1.0, np.nan]]])
def test_refusals(values):
    with pytest.raises(ValueError, match="table \\(seeds, problems\\)"):
        crossed_interval(values)


def test_more_refusals():
    with pytest.raises(ValueError, match="two of each"):
        components([[1.0, 2.0]])
    with pytest.raises(ValueError, match="seeds >= 2"):
        detectable_difference(Components(0, 0, 1), 1, 10)
    with pytest.raises(ValueError, match="confidence"):
        crossed_interval([[1.0, 2.0]], confidence=1)
    with pytest.raises(ValueError, match="freedom"):
        student_quantile(0.9, 0)
