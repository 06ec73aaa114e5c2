"""The rules leave the grades of the embedded arithmetic task as they were.

`embedded_grades.json` holds [answer, gold, grade]: each problem's own answer and the number after
it, and what the base model answered, 12 samples of each problem at temperature 1 and 4 at 1.6,
graded by `math 2` before there were rules.
"""

import json
from pathlib import Path

from sage_unsloth.grading.checker import Kind
from sage_unsloth.grading.grader import Grader
from sage_unsloth.problems import arithmetic

ROWS = json.loads(Path(__file__).with_name("embedded_grades.json").read_text(encoding="utf-8"))


def test_grades_of_the_embedded_task_are_what_they_were():
    answers, golds, before = zip(*ROWS, strict=True)
    with Grader() as grader:
        verdicts = grader.judge_answers(answers, golds)
    after = [verdict.grade for verdict in verdicts]
    rewarded = [grade == "correct" for grade in before]
    assert [grade == "correct" for grade in after] == rewarded, "no reward changes"
    integers = [answer.isascii() and answer.isdigit() for answer in answers]
    kept = [a == b for a, b, integer in zip(after, before, integers, strict=True) if integer]
    assert all(kept) and len(kept) > 2500
    kinds = {v.kind for v, integer in zip(verdicts, integers, strict=True) if integer}
    assert kinds == {Kind.NUMBER}
    changed = {(b, a) for a, b in zip(after, before, strict=True) if a != b}
    assert changed <= {("wrong", "unparsable")}, "of words in an answer, which are no number"


def test_every_problem_is_among_them():
    golds = {gold for _, gold, _ in ROWS}
    for split in arithmetic.SPLITS:
        assert {row["answer"] for row in arithmetic.problems(split)} <= golds
