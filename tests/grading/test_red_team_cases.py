"""Answers that a red team wrote against the grader, by class; labels by people who had not read it.

Wrong answers in ways that a policy under reward could find, and right ones in unusual but ordinary
writing. The rates are bounds; what is beyond them is printed by class.
"""

from collections import Counter
from pathlib import Path

import pytest

from sage_unsloth.grading.checker import Verdict
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import compare_math, grade_plainly
from sage_unsloth.runs.files import read_jsonl

CASES = read_jsonl(Path(__file__).with_name("red_team.jsonl"))
CRITICAL = [  # raised, hung, or were right for nearly every equation
    "1e5000", "1e-5000", "2.5e5000 x", "x=1e5000", r"\deriv{0}", r"\deriv8", r"\deriv{x}",
    "x_\udfff", "1e10000000", r"x=\infty", r"1=\infty", r"0=\ln 0", r"y=\frac{1}{0}", r"0 = \cot 0",
]  # fmt: skip


def grade(answer, gold):
    verdict = grade_plainly(answer, gold)
    return verdict if isinstance(verdict, Verdict) else compare_math(*verdict)


def test_wrong_answers_are_refused_and_right_ones_accepted():
    failures, total = Counter(), Counter()
    for case in CASES:
        right = grade(case["answer"], case["gold"]).grade == "correct"
        total[case["expected"]] += 1
        if right != (case["expected"] == "right"):
            failures[case["expected"], case["class"]] += 1
    accepted = sum(n for (expected, _), n in failures.items() if expected == "wrong")
    refused = sum(n for (expected, _), n in failures.items() if expected == "right")
    assert total["wrong"] > 1_000 and total["right"] > 600
    assert accepted <= 0.01 * total["wrong"], failures
    assert refused <= 0.10 * total["right"], failures


@pytest.mark.smoke
@pytest.mark.parametrize("answer", CRITICAL)
def test_no_answer_ends_a_run_or_opens_every_equation(answer):
    golds = ["42", "x=5", "y = 2x + 3", "x^2 + y^2 = 25", "MR=SRMC", "x+1", "(1,2)", "90^\\circ"]
    with Grader() as grader:
        assert "correct" not in grader.grade_answers([answer] * len(golds), golds)


REAL = [  # right answers as models write them, of real problems, that were refused
    (r"120^\circ", "120"),
    ("(3,2), (1,1)", "(1,1),(3,2)"),
    ("9", "9 (apples)"),
    ("9 apples", "9 (apples)"),
    ("2:00 pm", "2"),
    ("€77", "77"),
    ("$2 per hour", "2"),
    ("1,024", "2^{10}"),
    (r"1,000\sqrt2", r"1000\sqrt{2}"),
    ("The final answer is $42$. I hope it is correct.", "42"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("answer", "gold"), REAL)
def test_what_real_completions_hold_is_right(answer, gold):
    assert grade(answer, gold).grade == "correct"


def test_what_the_problem_counts_is_a_unit():
    with Grader() as grader:
        problem = "How many dozens of eggs does she sell, and how many pairs are left out?"
        ask = [
            ("7 dozens", "7"),
            ("7 pairs", "7"),
            ("7 gross", "7"),
            ("7 not", "7"),
            ("8 pairs", "7"),
        ]
        answers, golds = zip(*ask, strict=True)
        counted = grader.counted_nouns(answers, golds, [problem] * len(ask))
    assert counted == ["dozens", "pairs", "", "", "pairs"]
