"""How large advantages are: by hand for a group of two, and that every rule has a row."""

import math

import pytest

from research.theory.advantage_sizes import push_on_log_rate, root_mean_square, table
from sage_unsloth.methods.advantage_rules import RULES


def test_of_two_completions_by_hand(p=0.3):
    # nsr: the share of wrong answers. grpo: ±.5/√.5 in the 2p(1−p) of groups that are mixed.
    assert root_mean_square("nsr", p, 2) == pytest.approx(math.sqrt(1 - p))
    expected = math.sqrt(2 * p * (1 - p) * 0.5)
    assert root_mean_square("grpo", p, 2) == pytest.approx(expected, rel=1e-3)


def test_the_table_has_every_rule():
    rows = {row["advantages"]: row for row in table(4)}
    assert [*rows] == [f"`{name}`" for name in RULES]
    assert (
        rows["`grpo`"]["p = 0.5"] == "1.00"
        and rows["`w-reinforce`"]["teaches nothing with c right"] == "never"
    )
    assert rows["`pass-at-k`"]["teaches nothing with c right"] == "0, 3, 4"


@pytest.mark.parametrize("p", [0.065, 0.42, 0.93])
def test_the_push_on_log_p_is_that_of_the_rules_own_objective(p):
    """maxrl is log p truncated at order G − 1, whatever G; grpo tends to 2·arcsin√p."""
    assert push_on_log_rate("maxrl", p, 8) == pytest.approx(1 - (1 - p) ** 7, rel=1e-5)
    assert push_on_log_rate("grpo", p, 400) == pytest.approx(math.sqrt(p / (1 - p)), rel=0.02)


def test_the_push_in_groups_of_two_by_hand(p=0.3):
    """In 2p(1 − p) of the groups one is right: advantages ±.5/√.5, mean score (1 + p/(1 − p))/2."""
    expected = 2 * p * (1 - p) * math.sqrt(0.5) * 0.5 / (1 - p)
    assert push_on_log_rate("grpo", p, 2) == pytest.approx(expected, rel=1e-3)
