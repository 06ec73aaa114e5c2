"""Patterns, dynamics and case studies: expected numbers worked out by hand, detectors against a
table of sentences.
"""

import random

import numpy as np
import pytest

from sage_unsloth.analysis.patterns import (
    ARITHMETIC_PATTERNS,
    PATTERNS,
    benchmark_patterns,
    case_studies,
    compile_patterns,
    dynamics,
    pattern_differences,
    pattern_frequencies,
)
from sage_unsloth.evaluation.intervals import score_interval
from sage_unsloth.problems import arithmetic
from sage_unsloth.prompts import REASONING_START


def record(problem, sample, completion="", grade="correct", gold="1"):
    return {
        "problem_id": problem,
        "sample": sample,
        "completion": completion,
        "grade": grade,
        "gold": gold,
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Let x be the number of apples.", "constraint setup"),
        ("let $n$ be even", "constraint setup"),
        (r"Let \(a\) and b", "constraint setup"),
        (r"Let $\alpha$ be the angle", "constraint setup"),
        ("We denote x the speed", "constraint setup"),
        ("denoting by $k$ the index", "constraint setup"),
        ("Let's see.", None),
        ("Let us compute", None),
        ("Let me think", None),
        ("outlet x", None),
        ("denote the speed", None),
        ("a number of the form 4k+1", "structural reasoning"),
        ("we decompose\ninto two cases", "structural reasoning"),
        ("It decomposes into primes", "structural reasoning"),
        ("decomposition", None),
        ("off the formula", None),
        ("Assume for contradiction that", "proof by contradiction"),
        ("assume, for the sake of contradiction, that", "proof by contradiction"),
        ("which leads to a contradiction.", "proof by contradiction"),
        ("This led to a contradiction", "proof by contradiction"),
        ("a contradiction in terms", None),
        ("assume that it holds", None),
    ],
)
def test_the_papers_patterns_are_found(text, shown):
    found = [
        name
        for name, expressions in compile_patterns(PATTERNS).items()
        if any(expression.search(text) for expression in expressions)
    ]
    assert found == ([] if shown is None else [shown])


def test_ways_of_the_embedded_task_are_those_of_its_own_reader():
    names = {
        "rounding up (the rare way)": "round-up",
        "splitting at the ten": "tens",
        "another split": "other",
    }
    rng = random.Random(0)
    texts = ["", "17", "17=20+3;", "8=4+4;", "17=1+16;", "20=10+10;", "17=120-3;", "17=19-2;"]
    for _ in range(300):
        number = rng.choice([n for n in range(11, 100) if n % 10])
        way = rng.choice(list(arithmetic.ROUTES))
        texts.append(arithmetic.working(number, rng.choice(arithmetic.FACTORS), way, rng)[0])
    texts += [REASONING_START + text for text in texts]
    compiled = compile_patterns(ARITHMETIC_PATTERNS)
    seen = set()
    for text in texts:
        found = [names[name] for name, (expression,) in compiled.items() if expression.search(text)]
        way = arithmetic.route(text)
        seen.add(way)
        assert found == ([way] if way in names.values() else []), text
    assert set(names.values()) < seen
    assert benchmark_patterns("arithmetic") is ARITHMETIC_PATTERNS
    assert benchmark_patterns("aime") is PATTERNS


def samples():
    """Problem a: one of two correct solutions shows it; b: all of one; c: a wrong one shows it, and
    none is correct.
    """
    return [
        record("a", 0, "let x"),
        record("a", 1, "no"),
        record("a", 2, "let x", "wrong"),
        record("b", 0, "let x let y"),
        record("b", 1, "let x", "timed out"),
        record("b", 2, "no", "unparsable"),
        record("c", 0, "let x", "wrong"),
        record("c", 1, "no", "wrong"),
        record("c", 2, "", "wrong"),
    ]


@pytest.mark.smoke
def test_pattern_frequency_by_hand():
    (found,) = pattern_frequencies({"m": samples()}, {"setup": "let [a-z]"})
    assert (found.model, found.pattern) == ("m", "setup")
    assert found.frequency.mean == pytest.approx((1 / 2 + 1) / 2)
    assert found.frequency == score_interval(np.array([[0.5, 1.0]]))
    assert (found.shown, found.correct, found.problems_shown, found.problems) == (2, 3, 2, 2)


def test_a_model_that_solved_nothing_has_no_frequency():
    wrong = [r for r in samples() if r["problem_id"] == "c"]
    (found,) = pattern_frequencies({"m": wrong}, {"setup": ["let", "denote"]})
    assert found.frequency is None
    assert (found.shown, found.correct, found.problems_shown, found.problems) == (0, 0, 0, 0)


def test_pattern_differences_are_over_the_problems_that_both_solve():
    other = [record("a", 0, "no"), record("c", 0, "let x"), record("b", 0, "let", "wrong")]
    pairs = pattern_differences({"m": samples(), "other": other}, {"setup": "let x"}, "m")
    assert [(row["pattern"], row["pair"], row["problems"]) for row in pairs] == [
        ("setup", "other - m", 1)
    ]
    assert pairs[0]["difference"].mean == -0.5, "on problem a alone: 0 - 1/2"
    none = [record("c", 0, "let x")]
    (row,) = pattern_differences({"m": samples(), "none": none}, {"setup": "let"}, "m")
    assert row["difference"] is None and row["problems"] == 0


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({}, "at least one pattern"),
        ({"broken": "let ("}, r"'broken' has 'let \(': "),
        ({"empty": []}, "'empty' has none"),
    ],
)
def test_bad_patterns_are_named(patterns, message):
    with pytest.raises(ValueError, match=message):
        pattern_frequencies({"m": samples()}, patterns)


def test_dynamics_by_hand():
    rows = [{"step": s, "reward": s / 10, "grad_norm": 2.0, "loss": 5.0} for s in range(1, 9)]
    rows[0]["sage/entropy"] = 0.5
    table = dynamics({"GRPO": rows})
    by_key = {(row["phase"], row["metric"]): row for row in table}
    # Eight steps: 3, 3 and 2.
    assert [(row["phase"], row["steps"]) for row in table if row["metric"] == "reward"] == [
        ("early", "1-3"),
        ("middle", "4-6"),
        ("late", "7-8"),
    ]
    assert [by_key[p, "reward"]["mean"] for p in ("early", "middle", "late")] == pytest.approx(
        [0.2, 0.5, 0.75]
    )
    early = by_key["early", "reward"]
    assert 0.1 <= early["low"] < 0.2 < early["high"] <= 0.3
    for key in (("late", "reward"), ("early", "grad_norm")):  # two steps; three equal values
        assert (by_key[key]["low"], by_key[key]["high"]) == (None, None)
    assert by_key["early", "sage/entropy"]["mean"] == 0.5
    assert ("middle", "sage/entropy") not in by_key, "a metric that was not logged is left out"
    assert all(row["metric"] != "loss" for row in table)
    short = dynamics({"short": rows[:1]})
    assert [row["phase"] for row in short] == ["early"] * 3
    assert {(row["low"], row["high"]) for row in short} == {(None, None)}, "one step, no interval"
    with pytest.raises(ValueError, match="nothing has none"):
        dynamics({"GRPO": rows, "nothing": []})


def test_any_expression_of_a_pattern_shows_it():
    records = [record("a", i, text) for i, text in enumerate(("let x", "Denote y", "x = y"))]
    (found,) = pattern_frequencies({"m": records}, {"setup": ["let", "denote"]})
    assert (found.shown, found.correct) == (2, 3)


def graded(counts, n=4):
    """Problems p0, p1 and so on; of problem i the last counts[i] of n samples are correct; in
    reverse order of samples.
    """
    return [
        record(f"p{i}", s, f"p{i} {s}", "correct" if s >= n - count else "wrong", gold=str(i))
        for i, count in enumerate(counts)
        for s in reversed(range(n))
    ]


def test_cases_are_picked_by_the_rule():
    found = {"sft": graded([0, 0, 0, 4]), "a": graded([1, 4, 2, 4]), "b": graded([2, 1, 1, 1])}
    cases = case_studies(found, "a", "b", 3, {"p1": "1+1"})
    # |a - b| = 1, 3, 1, 3.
    assert [case.problem_id for case in cases] == ["p1", "p3", "p0"]
    assert [case.problem for case in cases] == ["1+1", None, None]
    assert cases[0].gold == "1" and list(cases[0].models) == ["sft", "a", "b"]
    b = cases[0].models["b"]
    assert (b["correct"], b["samples"]) == (1, 4)
    assert b["first correct"]["completion"] == "p1 3" and b["first wrong"]["completion"] == "p1 0"
    assert cases[0].models["a"]["first wrong"] is None
    assert cases[0].models["sft"]["first correct"] is None
    assert len(case_studies(found, "a", "b", 99)) == 4


def test_cases_need_equal_sets():
    with pytest.raises(ValueError, match="must be among a, got 'b'"):
        case_studies({"a": graded([1])}, "a", "b")
    with pytest.raises(ValueError, match="'p1' has 4 of a and 0 of b"):
        case_studies({"a": graded([1, 1]), "b": graded([1])}, "a", "b")
    with pytest.raises(ValueError, match="'p0' has 4 of a and 3 of b"):
        case_studies({"a": graded([1]), "b": graded([1], n=3)}, "a", "b")
