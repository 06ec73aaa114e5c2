"""Our grader beside math-verify on real golds."""

import json

from research.data import DATA
from research.second_opinion import compare, final_answer, pairs_of
from sage_unsloth.grading.mathematics import MATH


def test_answers_of_worked_solutions():
    assert final_answer(r"so \boxed{\frac{1}{2}}, then \boxed{3}") == "3"
    assert final_answer("6 * 7 = 42\n#### 42") == "42"
    assert final_answer("no answer") is None
    assert final_answer(r"\boxed{4") is None


def test_pairs_and_their_counts():
    rows = [
        {"answer": "42", "solution": r"\boxed{42}"},
        {"answer": r"\frac{1}{2}", "solution": r"it is \boxed{0.5}"},
    ]
    pairs = pairs_of(rows)
    assert ("its solution's answer", "0.5", r"\frac{1}{2}") in pairs
    assert ("another gold", "42", r"\frac{1}{2}") in pairs
    result = compare(pairs)
    assert result["pairs"] == len(pairs) and sum(result["counts"].values()) == len(pairs)
    assert result["differ"] == []


def test_the_committed_opinions_are_of_todays_rules():
    result = json.loads((DATA / "results/grading/second_opinion.json").read_text())
    assert result["rules"] == MATH.label, "the rules are newer than the result: run it again"
    counts = [found["counts"] for found in result["benchmarks"].values()]
    own = sum(n for one in counts for what, n in one.items() if what.startswith("the gold: ours"))
    right = sum(n for one in counts for what, n in one.items() if "the gold: ours correct" in what)
    assert own == right >= 900, "every gold is right against itself"
