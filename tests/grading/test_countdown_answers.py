"""The verifier `countdown`: every right expression, and nothing else."""

import json
import random
import time
from fractions import Fraction

import pytest

from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.grading.countdown import check_countdown, read_task
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.verifiers import get_verifier

GOLD = json.dumps({"numbers": [2, 3, 5, 8], "target": 29})
RIGHT, WRONG, NONE = Grade.CORRECT, Grade.WRONG, Grade.UNPARSABLE


def grade(answer, gold=GOLD) -> Grade:
    return check_countdown(answer, gold).grade


@pytest.mark.parametrize(
    "answer",
    [
        "8*3+5",
        "5+3*8",
        " 8 * 3 + 5 ",
        "((8)*(3))+5",
        "8*3+5=29",
        "29 = 8*3+5",
        "8×3+5",
        "8·3+5",
        r"8 \times 3 + 5",
        r"$8 \cdot 3 + 5$",
        r"\boxed{8*3+5}",
        r"\left(8\cdot 3\right)+5",
        "8*3\n+5",
        "**8*3+5**",
        "The answer is 8*3+5.",
        "5+3(8)",
        "８*３+５",
        "08*3+5",
    ],
)
def test_every_way_to_write_a_right_one(answer):
    assert grade(answer) is RIGHT


@pytest.mark.parametrize("answer", [r"8 \times 3", "8×3", r"8 \times 3 = 24", r"24 = 8 \times 3"])
def test_numbers_with_times_alone_are_a_product(answer):
    """Elsewhere they are the sides of something."""
    gold = '{"numbers": [2, 3, 5, 8], "target": 24}'
    assert check_countdown(answer, gold).grade is RIGHT
    assert check_countdown(answer, gold.replace("24", "25")).grade is WRONG


@pytest.mark.parametrize(
    "answer",
    [
        "29",  # not a given number
        "8*3",
        "8*3+5=30",  # says another value than it has
        "8*3+5+0",
        "8*3+5+2-2",  # 2 twice
        "28+3/3",  # digits are not joined
        "5/(3-3)+8",
        "8/(5-3-2)",  # by zero
        "9" * 30,
    ],
)
def test_an_expression_that_breaks_a_rule_is_wrong(answer):
    assert grade(answer) is WRONG


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        " ",
        "8*3+",
        "8 3+5",
        "8*(3+5",
        "8*3)+5",
        "()",
        "8**3",
        "8//3",
        "-3+8*4",
        "8*-3",
        "8*3+5 or 2",
        "8*3+5; 2+3",
        "8*3+5, 8*3+5",
        "8*3+5=29=29",
        "a*3+5",
        "__import__('os').system('true')",
        "sum([8,8,8,5])",
        "0x1d",
        "29.0",
        "8*3+5.0",
        "1e1+19",
        "8!",
        "(" * 3_000,
        "9" * 3_000,
        "8*3+5" + " " * 3_000,
        r"\frac{8}{" * 200,
    ],
)
def test_what_is_no_expression(answer):
    assert grade(answer) is NONE


def test_fractions_are_exact():
    gold = json.dumps({"numbers": [3, 3, 8, 8], "target": 24})
    assert grade("8/(3-8/3)", gold) is RIGHT
    assert grade(r"\frac{8}{3-\frac{8}{3}}", gold) is RIGHT
    assert grade("8 ÷ (3 − 8 ÷ 3)", gold) is RIGHT
    huge = json.dumps({"numbers": [10**17, 10**17 + 1, 1], "target": 1})
    assert grade(f"{10**17 + 1}-{10**17}", huge) is RIGHT
    assert grade(f"{10**17 + 1}/{10**17}", huge) is WRONG, "not 1, though a float says so"


def test_every_number_may_be_asked_for():
    gold = json.dumps({"numbers": [2, 3, 5], "target": 6, "use_all": True})
    assert grade("2*3", gold) is WRONG
    assert grade("3+5-2", gold) is RIGHT
    assert grade("3+5-2", gold.replace("true", "false")) is RIGHT


def test_random_expressions_are_valued_as_python_values_them():
    rng = random.Random(0)
    graded = {RIGHT: 0, WRONG: 0}
    for _ in range(2_000):
        numbers = [rng.randint(1, 9) for _ in range(4)]
        text, exact = random_expression([str(n) for n in numbers], rng)
        try:
            value = eval(exact, {"Fraction": Fraction})
        except ZeroDivisionError:
            value = None
        whole = value is not None and value.denominator == 1
        target = int(value) if whole else 7
        found = grade(text, json.dumps({"numbers": numbers, "target": target}))
        assert found is (RIGHT if whole else WRONG), text
        graded[found] += 1
        if whole:
            other = json.dumps({"numbers": numbers, "target": target + 1})
            assert grade(text, other) is WRONG
    assert min(graded.values()) > 200


def random_expression(parts: list[str], rng: random.Random) -> tuple[str, str]:
    """An expression of all numbers without brackets that are not needed, and with Fractions."""
    joined = [(part, f"Fraction({part})") for part in parts]
    while len(joined) > 1:
        (left, one), (right, other) = (joined.pop(rng.randrange(len(joined))) for _ in "ab")
        sign = rng.choice("+-*/")
        text = f"{left}{sign}{right}" if rng.random() < 0.3 else f"({left}{sign}{right})"
        bare = text == f"{left}{sign}{right}"
        exact = f"{one}{sign}{other}" if bare else f"({one}{sign}{other})"
        joined.append((text, exact))
    return joined[0]


@pytest.mark.parametrize(
    "gold",
    [
        "29",
        "",
        "[2, 3]",
        '{"numbers": [2, 3]}',
        '{"numbers": [], "target": 3}',
        '{"numbers": [2.5], "target": 3}',
        '{"numbers": [true], "target": 3}',
        '{"numbers": [-2], "target": 3}',
        '{"numbers": [2], "target": "3"}',
        '{"numbers": [2], "target": 3, "use_all": 1}',
        json.dumps({"numbers": list(range(21)), "target": 3}),
        "[" * 100_000,
    ],
)
def test_a_gold_that_is_none_is_refused_with_the_form(gold):
    with pytest.raises(ValueError, match=r"a gold of countdown must be JSON text, .*got "):
        read_task(gold)


def test_it_is_graded_in_this_process_and_hostile_text_costs_little():
    with Grader(checker=get_verifier("countdown")) as grader:
        started = time.perf_counter()
        answers = [
            "8*3+5",
            *("(" * n + "8*3+5" + ")" * n for n in range(40)),
            *(r"\frac{1}{2}" * n for n in range(180)),
        ]
        found = grader.grade_answers(answers, [GOLD] * len(answers))
        assert time.perf_counter() - started < 20
    assert found[0] is RIGHT and set(found[1:41]) == {RIGHT}
    assert check_countdown("8*3+5", GOLD).kind is Kind.EXPRESSION
