"""Training rows in other proportions, by hand."""

import math

import numpy as np
import pytest

from sage_unsloth.problems.row_weights import (
    balance_rows,
    inverse_pass_rates,
    repeat_rows,
    weighted_rows,
)


def row(name, family):
    return {"id": name, "family": family}


def test_every_family_is_shown_as_often_as_the_largest_one():
    rows = [row("a", "usual"), row("b", "rare"), row("c", "usual"), row("d", "usual")]
    balanced = balance_rows(rows, "family")
    assert [one["id"] for one in balanced] == ["a", "c", "d", "b", "b", "b"]


@pytest.mark.parametrize("p", [0.0, 0.05, 0.4, 1.0])
def test_the_weight_of_a_row_is_truncated_1_over_p_in_expectation(p):
    """Over all outcomes of n = 10 samples, G = 4; at p = 0 it is G."""
    n, group = 10, 4
    weights = inverse_pass_rates(n, range(n + 1), group)
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    exact = (1 - (1 - p) ** group) / p if p else group
    assert float(np.dot(weights, chances)) == pytest.approx(exact)
    with pytest.raises(ValueError, match="num_samples"):
        inverse_pass_rates(2, [1], 4)


def test_rows_are_repeated_by_their_weight_to_halves():
    rows = [row("a", "usual"), row("b", "rare"), row("c", "far")]
    repeated = repeat_rows(rows, np.array([1.0, 2.6, 0.1]))
    assert [one["id"] for one in repeated] == ["a"] * 2 + ["b"] * 5 + ["c"]


def test_a_column_names_what_is_balanced_and_pass_rate_what_is_inverted():
    rows = [row("a", 1), row("b", 2), row("c", 1)]
    assert weighted_rows(rows, "family", 4) == balance_rows(rows, "family")
    rated = [{"id": "solved", "pass_rate": 1}, {"id": "half", "pass_rate": 0.5}]
    rated.append({"id": "never", "pass_rate": 0.0})
    names = [item["id"] for item in weighted_rows(rated, "pass_rate", 4)]
    # 1; 1 + 1/2 + 1/4 + 1/8 = 1.875; 4: twice that often, in whole rows
    assert names == ["solved"] * 2 + ["half"] * 4 + ["never"] * 8


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        ([{"family": "a"}, {"id": 1}], "family", "row 1 has id.*--columns family=family"),
        ([{"pass_rate": 40}], "pass_rate", r"share in \[0, 1\], got 40"),
        ([{"pass_rate": "1.4"}], "pass_rate", "got '1.4'"),
    ],
)
def test_rows_that_cannot_be_weighed(rows, column, message):
    with pytest.raises(ValueError, match=message):
        weighted_rows(rows, column, 8)
