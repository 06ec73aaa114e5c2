"""How large advantages are: by hand for a group of two, and that every rule has a row."""

import math

import pytest

from research.theory.advantage_sizes import root_mean_square, table
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
