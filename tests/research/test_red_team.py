"""The red team counts what the grader says of writings whose labels it does not know."""

import random

import pytest

from research.red_team import attack, sample_golds, totals
from research.red_team_forms import value, writings
from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.grader import Grader


def test_golds_are_sampled_by_shape():
    golds = [str(number) for number in range(50)] + [r"\text{(C)}", "1,-2"]
    chosen = sample_golds(golds * 2, 3, random.Random(0))
    assert len(chosen) == 5 and chosen[3:] == [r"\text{(C)}", "1,-2"]


@pytest.mark.smoke
def test_values_by_hand():
    texts = ("18", "1,800", "-0.5", "2e3", r"\frac34", r"-\frac{1}{2}")
    assert [value(text) for text in texts] == [18, 1800, -0.5, 2000, 0.75, -0.5]
    assert value("3x") is value("") is value("east") is None


def test_false_accepts_and_rejects_are_counted():
    golds = ["18", r"\text{(C)}"]
    labels = [w.right for gold in golds for w in _distinct(gold)]

    def always(grade):
        verdict = Verdict(grade, Kind.TEXT)
        return Checker(name="always", version=1, plainly=lambda answer, gold: verdict)

    with Grader(checker=always(Grade.CORRECT)) as grader:
        found = totals({"b": attack(golds, grader, 5, 0)})
    assert (found["right"], found["wrong"]) == (sum(labels), len(labels) - sum(labels))
    assert found["false_accepts"] == found["wrong"] and found["false_rejects"] == 0
    assert found["right_for_several"] > 30, "every key opens both"
    with Grader(checker=always(Grade.WRONG)) as grader:
        result = attack(golds, grader, 5, 0)
    assert result["golds_not_their_own"] == golds and not result["classes"]


def _distinct(gold):
    """As the red team draws them: one generator for all golds, each text once."""
    rng = _distinct.__dict__.setdefault("rng", random.Random(0))
    found = {}
    for writing in writings(gold, rng):
        found.setdefault(writing.text, writing)
    return found.values()


def test_the_grader_stands_on_a_few_golds():
    with Grader() as grader:
        found = totals({"b": attack(["1875", r"\text{east}", "(2,\\infty)"], grader, 5, 1)})
    assert found["wrong"] > 100 and found["right"] > 80
    assert found["false_accepts"] == found["false_rejects"] == found["right_for_several"] == 0
