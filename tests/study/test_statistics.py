"""The statistics of a study's report, each by hand or by enumeration."""

import itertools
import math

import numpy as np
import pytest

from sage_unsloth.evaluation.metrics import guess_bound
from sage_unsloth.study.chord import (
    Place,
    distance_to_chord,
    mixture_pass_at_k,
)
from sage_unsloth.study.crossed import crossed_interval
from sage_unsloth.study.dose import is_negligible, measure_dose, possible_change
from sage_unsloth.study.free_lines import LineNode, distance_to_line
from sage_unsloth.study.records import by_unit, family_curves, family_parts, family_weights
from sage_unsloth.study.tasks import guess_product
from sage_unsloth.study.verdicts import holm, is_informative, main_k, p_value, verdict

# --- guessing -------------------------------------------------------------------------------------


def test_blind_attempts_at_arithmetic_by_hand():
    products = [n * f for n in range(11, 100) if n % 10 for f in (3, 4, 5, 6, 7, 8, 9, 11, 12)]
    assert guess_product({"answer": "102"}) == products.count(102) / len(products)


def test_the_bound_of_guessing_is_that_of_enumeration():
    """Twelve workings, one right: all sequences of k blind draws."""
    for k in (1, 2, 3):
        draws = list(itertools.product(range(12), repeat=k))
        share = sum(0 in draw for draw in draws) / len(draws)
        assert guess_bound(np.array([1 / 12]), k)[0] == pytest.approx(share)
    assert guess_bound(np.array([1 / 12]), 8)[0] == pytest.approx(0.5015, abs=1e-4)
    assert guess_bound(np.array([1 / 12]), 32)[0] == pytest.approx(0.9382, abs=1e-4)


def test_no_verdict_where_guessing_has_most_of_it():
    assert is_informative(0.50, 0.75) and not is_informative(0.61, 0.75)
    rows = {"4": {"usable": True}, "8": {"usable": True}, "32": {"usable": False}}
    assert main_k(rows) == 8
    assert main_k({"4": {"usable": False}, "8": {"usable": False}}) == 4


# --- mixtures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "m"), [(1, 0), (1, 1), (2, 1), (3, 1), (3, 2), (4, 2)])
def test_mixtures_by_enumeration(k, m):
    """Every choice of m of the start model's samples and of k − m of the trained model's."""
    trained, start = [1, 0, 0, 0, 1], [0, 0, 1, 0]
    chosen = [
        any(one) or any(other)
        for one in itertools.combinations(start, m)
        for other in itertools.combinations(trained, k - m)
    ]
    found = mixture_pass_at_k(5, np.array([2]), 4, np.array([1]), k, m)
    assert found[0] == pytest.approx(np.mean(chosen))


def test_a_mixture_needs_0_to_k_attempts_of_the_start_model():
    with pytest.raises(ValueError, match="must be 0 to k = 2, got 3"):
        mixture_pass_at_k(4, np.array([1]), 4, np.array([1]), 2, 3)


# --- the line -------------------------------------------------------------------------------------


def place(first, many):
    return Place(np.array(first, float), np.array(many, float))


def test_a_line_is_interpolated_between_near_neighbours_alone():
    levels, many, betas = [0.5, 0.45, 0.4, 0.2], [0.1, 0.2, 0.3, 0.4], [0.05, 0.2, 0.4, math.inf]
    nodes = [
        LineNode("", beta, place([[x, x]], [[y, y]]))
        for x, y, beta in zip(levels, many, betas, strict=True)
    ]

    def distance(level, line=nodes):
        result = distance_to_line(place([[level, level]], [[0.5, 0.5]]), line, steps=True)
        return None if result is None else result.mean

    # two fifths of the way from β .4 to .2: pass@k .26
    assert distance(0.42) == pytest.approx(0.24)
    assert distance(0.3) is None, "between β .4 and infinity"
    assert distance(0.47) is None, "between β .05 and .2: too far apart"
    assert distance(0.51) is None and distance(0.19) is None, "beyond the line's end"
    assert distance(0.4, nodes[:3]) == pytest.approx(0.2), "an end of the chord itself"


def test_the_distance_to_a_chord_by_hand():
    one, other = place([[0.6, 0.4]], [[0.7, 0.5]]), place([[0.3, 0.1]], [[0.8, 0.8]])
    point = place([[0.5, 0.3]], [[0.9, 0.5]])
    # pass@1 .5, .2 and .4: two thirds of the way; pass@k .6 and .8, so the chord has .6667.
    assert distance_to_chord(point, one, other).mean == pytest.approx(0.7 - (2 * 0.6 + 0.8) / 3)
    assert distance_to_chord(one, one, other).mean == pytest.approx(0)
    with pytest.raises(ValueError, match="two different values of pass@1"):
        distance_to_chord(point, one, one)


def test_the_interval_of_a_distance_is_that_of_its_expansion():
    """The table's mean must move as the distance itself does when one cell changes a little."""
    generator = np.random.default_rng(0)
    tables = [generator.random((3, 5)) * 0.1 + level for level in (0.4, 0.6, 0.5, 0.5, 0.3, 0.8)]

    def distance(first, many, first_a, many_a, first_b, many_b):
        means = [table.mean() for table in (first, many, first_a, many_a, first_b, many_b)]
        weight = (means[0] - means[4]) / (means[2] - means[4])
        return means[1] - weight * means[3] - (1 - weight) * means[5]

    def expansion(tables):
        weight = (tables[0].mean() - tables[4].mean()) / (tables[2].mean() - tables[4].mean())
        slope = (tables[3].mean() - tables[5].mean()) / (tables[2].mean() - tables[4].mean())
        across = tables[0] - weight * tables[2] - (1 - weight) * tables[4]
        return tables[1] - weight * tables[3] - (1 - weight) * tables[5] - slope * across

    table = expansion(tables)
    found = distance_to_chord(*(Place(*tables[i : i + 2]) for i in (0, 2, 4)))
    assert found.mean == pytest.approx(distance(*tables))
    assert found.error == pytest.approx(crossed_interval(table).error)
    for moved in range(6):
        step = [t.copy() for t in tables]
        step[moved][1, 2] += 1e-6
        weight = (tables[0].mean() - tables[4].mean()) / (tables[2].mean() - tables[4].mean())
        slope = (tables[3].mean() - tables[5].mean()) / (tables[2].mean() - tables[4].mean())
        by_cell = (-slope, 1, slope * weight, -weight, slope * (1 - weight), -(1 - weight))
        change = (distance(*step) - distance(*tables)) / 1e-6 * 15
        assert change == pytest.approx(by_cell[moved], abs=1e-4)


def test_intervals_of_a_distance_hold_the_truth():
    """Points of seeds, problems and cell noise around a chord, 300 designs of 5 x 60."""
    generator = np.random.default_rng(2)
    levels, truth = ((0.45, 0.75), (0.5, 0.6), (0.4, 0.8)), 0.05
    inside = 0
    for _ in range(300):
        problem = generator.normal(0, 0.3, (1, 60))
        places = []
        for first, many in levels:
            noise = [
                generator.normal(0, 0.01, (5, 1)) + generator.normal(0, 0.1, (5, 60))
                for _ in range(2)
            ]
            places.append(Place(first + problem + noise[0], many + problem + noise[1]))
        found = distance_to_chord(*places)
        inside += found.low <= truth <= found.high
    assert 0.92 <= inside / 300 <= 0.99


# --- dose -----------------------------------------------------------------------------------------


def run(**series):
    base = {"share_touched": [0.1, 0.3], "guide_mean": [1.0, 1.2], "mean_length": [10.0, 20.0]}
    return {"training": base | series}


def test_the_dose_of_a_run_by_hand():
    found = measure_dose([run(), run(share_touched=[0.0, 0.0], guide_mean=[1.0, 1.0])])
    assert found is not None
    assert found["touched"] == pytest.approx(0.1) and found["guide_mean"] == pytest.approx(1.05)
    assert found["log_guide_sum_at_most"] == pytest.approx(15 * math.log(1.05))
    exact = measure_dose([run(log_guide_mean=[0.0, 0.1])])
    assert exact is not None and exact["log_guide_sum"] == pytest.approx((0 + 0.1 * 20) / 2)
    assert measure_dose([{"training": {}}]) is None
    assert measure_dose([run(guide_mean=[None, 1.0])]) is None


def test_what_a_dose_can_change_by_hand():
    line = [0.6, 0.7, 0.9], [0.1, 0.2, 0.8]
    assert possible_change(2.0, 0, *line) == pytest.approx(0.1), "as twice the strength does"
    assert possible_change(2.0, 1, *line) == pytest.approx(0.2 / math.log(4) * math.log(2))
    assert possible_change(2.0, 2, *line) == pytest.approx(0.1), "the last: the slope before it"
    assert possible_change(1.0, 0, *line) == 0
    assert possible_change(2.0, 0, [0.6], [0.1]) is None
    assert possible_change(2.0, 1, [0.6, 0.7], [0.0, 0.1]) is None, "log 0"
    assert is_negligible(0.001, 0.02) and not is_negligible(0.003, 0.02)
    assert is_negligible(0.002, None) and not is_negligible(0.004, 0.0), "held to .03"
    assert not is_negligible(None, 0.02)


# --- families and claims --------------------------------------------------------------------------


def test_families_add_up_to_the_mean_by_hand():
    families, units = ["a", "a", "b", "b"], ["a-0", "a-1", "b-0", "b-0"]
    assert family_weights(families, units) == pytest.approx({"a": 2 / 3, "b": 1 / 3})
    start = family_curves({1: np.array([[0.2, 0.4, 0.6, 1.0]])}, families)
    trained = family_curves({1: np.array([[0.8, 1.0, 0.2, 0.2]])}, families)
    assert start["a"] == pytest.approx({"1": 0.3})
    parts = family_parts(start, trained, family_weights(families, units))
    assert parts["a"]["1"] == pytest.approx(0.4) and parts["b"]["1"] == pytest.approx(-0.2)
    assert parts["all"]["1"] == pytest.approx(0.2)


def test_families_add_up_where_units_have_different_sizes():
    units, families = ["a", "a", "a", "b", "c"], ["x", "x", "x", "x", "y"]
    start, trained = np.array([[0.2, 0.3, 0.4, 0.8, 0.5]]), np.array([[0.5, 0.6, 0.7, 0.2, 0.6]])
    of_unit = ["x", "x", "y"]
    curves = [family_curves({1: by_unit(values, units)}, of_unit) for values in (start, trained)]
    parts = family_parts(*curves, family_weights(families, units))
    change = (by_unit(trained, units) - by_unit(start, units)).mean()
    assert parts["all"]["1"] == pytest.approx(change) == pytest.approx((0.3 - 0.6 + 0.1) / 3)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_p_is_05_where_the_interval_ends_at_the_threshold():
    found = crossed_interval(np.random.default_rng(3).random((4, 30)))
    assert p_value(found, found.low) == pytest.approx(0.05)
    assert p_value(found, found.mean) == pytest.approx(1)
    constant = crossed_interval(np.full((2, 3), 0.25))
    assert (p_value(constant, 0.1), p_value(constant, 0.3)) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("kind", "low", "high", "said"),
    [
        ("gain", 0.001, 0.2, "supported"),
        ("gain", -0.2, 0.029, "not supported"),
        ("gain", -0.01, 0.031, "undecided"),
        ("gain", 0.001, 0.01, "supported"),
        ("loss", -0.2, -0.001, "supported"),
        ("loss", -0.029, 0.2, "not supported"),
        ("loss", -0.031, 0.01, "undecided"),
        ("no loss", -0.029, 0.5, "supported"),
        ("no loss", -0.5, -0.001, "not supported"),
        ("no loss", -0.031, 0.001, "undecided"),
    ],
)
def test_verdicts(kind, low, high, said):
    assert verdict(kind, low, high) == said
