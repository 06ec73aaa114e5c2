"""Values of expressions at one point: as SymPy's, with a bound; what has none; and that a wrong
answer, and one that is the gold in another spelling, need no worker.
"""

import random
import time

import pytest

from sage_unsloth.grading import algebra, values
from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.grading.expressions import canonical
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.values import surely_differ, surely_equal


def made_up(count):
    """Expressions of all that is read, and of much that is not."""
    rng = random.Random(11)

    def atom(depth):
        simple = rng.choice(["2", "12", "x", "y", "a_1", r"\pi", "e", "i", "0.5", r"2\sqrt{3}"])
        if depth == 0:
            return simple
        inner = [expression(depth - 1) for _ in range(2)]
        forms = [
            simple,
            rf"\frac{{{inner[0]}}}{{{inner[1]}}}",
            rf"\sqrt{{{inner[0]}}}",
            f"({inner[0]})",
        ]
        forms += [f"{rng.choice(['2', 'x', 'e'])}^{{{rng.choice(['2', '-1', 'x', '1/2'])}}}"]
        forms += [rf"\{rng.choice(['sin', 'cos', 'ln', 'tan', 'exp'])}({inner[0]})"]
        forms += [f"3{rng.choice(['/', '*', ''])}x", "1/2x", r"\sin 2x", r"\sqrt[3]{x}"]
        return rng.choice(forms)

    def expression(depth):
        terms = [atom(depth) for _ in range(rng.choice([1, 2, 2, 3]))]
        return rng.choice(["", "-"]) + rng.choice(["+", "-"]).join(terms)

    return [expression(2) for _ in range(count)]


def test_values_are_those_of_sympy():
    """Of what math-verify parses, at the same numbers for the symbols; `i` is a symbol there."""
    read = 0
    for text in made_up(150):
        found = values._value_of(text)
        if found is None:
            continue
        parsed = algebra._parse(canonical(text))
        symbols = parsed.free_symbols
        numbers = {s: 1j if s.name == "i" else values._symbol(s.name)[0] for s in symbols}
        expected = complex(parsed.doit().evalf(30, subs=numbers))
        assert abs(found[0] - expected) <= found[1] + 1e-13 * abs(expected), text
        read += 1
    assert read > 40


@pytest.mark.parametrize(
    ("first", "second", "differ"),
    [
        (r"3\sqrt{13}", r"\sqrt{117}", False),
        (r"3\sqrt{13}", r"\sqrt{118}", True),
        ("(x-1)(x-2)^2", "x^3-5x^2+8x-4", False),
        ("(x-1)(x-2)^2", "x^3-5x^2+8x-5", True),
        (r"\frac{1}{2}x", "x/2", False),
        ("x", "X", True),
        ("x_1", "x_2", True),
        ("2+3i", "2-3i", True),
        (r"\ln(x^2)", r"2\ln(x)", False),
        # Nobody can tell:
        ("1/2x", "x", False),  # two meanings
        (r"\sqrt[3]{-8}", "3", False),  # the real root or the principal one
        (r"\sqrt{10^{20}+1}-10^{10}", "0", False),  # nothing but rounding
        ("10^{200}", "10^{201}", False),  # out of range
        (r"\log 100", "3", False),  # of which base
        ("1/(x-x)", "3", False),
        ("words", "3", False),
    ],
)
def test_by_hand(first, second, differ):
    assert surely_differ(first, second) is differ
    assert surely_differ(second, first) is differ


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("6r^2-4r-24", "(6r^{2} - 4r - 24)", True),
        ("((x+1))", "x+1", True),
        ("0.5x", r"\frac12x", True),
        ("(x+1)(x-1)", "x+1)(x-1", False),  # brackets of two
        ("(x+1)(x-1)", "(x+1)", False),
        ("x+1", "1+x", False),  # which takes algebra
        ("x", "X", False),
        # Nobody can tell whether math-verify reads them:
        ("1/(x-x)", "1/(x-x)", False),
        (r"\log 100", r"\log 100", False),
        ("words", "words", False),
    ],
)
def test_what_is_written_alike(first, second, equal):
    assert surely_equal(first, second) is equal
    assert surely_equal(second, first) is equal


def test_what_is_written_alike_is_right_by_algebra_too():
    told = 0
    for text in made_up(150):
        if surely_equal(text, f"({text})"):
            assert algebra.readable(text), "else it is compared as text"
            assert algebra.same(text, f"({text})") is True, text
            told += 1
    assert told > 40


def test_what_hangs_sympy_has_no_value():
    started = time.process_time()
    for text in (
        "9^{9^{9^{9}}}",
        "e^{e^{e^{e^{e}}}}",
        r"\cos(10^{90}x)" * 30,
        "(" * 500,
        "2^" * 99,
    ):
        assert not surely_differ(text, "3")
    assert time.process_time() - started < 0.5


def test_a_wrong_answer_and_one_that_is_the_gold_need_no_worker():
    with Grader(boxed=True) as grader:
        pairs = [
            (r"2\sqrt{3}", r"3\sqrt{2}", Kind.MATHEMATICS),
            (r"(3, \frac{\pi}{3})", r"(3, \frac{\pi}{2})", Kind.TUPLE),
            ("2x+1", "2x+2", Kind.MATHEMATICS),
            (r"\sqrt{2}", "3", Kind.MATHEMATICS),
        ]
        for answer, gold, kind in pairs:
            assert grader.judge_answers([answer], [gold]) == [(Grade.WRONG, kind)]
        pairs = [
            (r"\left(6r^2-4r-24\right)", "6r^2-4r-24", Kind.MATHEMATICS),
            (r"( 3, \pi/2 )", r"(3, \pi/2)", Kind.TUPLE),
            ("2x+3", "y = 2x + 3", Kind.EQUATION),
        ]
        for answer, gold, kind in pairs:
            assert grader.judge_answers([answer], [gold]) == [(Grade.CORRECT, kind)]
        assert grader._workers.all[0].process is None
        assert grader.grade_answers([r"\sqrt{12}"], [r"2\sqrt{3}"]) == [Grade.CORRECT]
        assert grader._workers.all[0].process is not None, "another right one is proved by algebra"
