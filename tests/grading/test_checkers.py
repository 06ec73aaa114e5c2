"""Roles in any order and nothing less than all of them; reasoning-gym at its full score only."""

import pytest

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.checkers import REASONING_GYM, ROLES, roles
from sage_unsloth.grading.grader import Grader
from sage_unsloth.problems.benchmarks import load_benchmark

GOLD = "Zoey is a knave, Oliver is a knight, Ann Lee is a knight"


def graded(answer, gold=GOLD, checker=ROLES):
    with Grader(checker=checker) as grader:
        return grader.grade_many([f"<SOLUTION>{answer}</SOLUTION>"], [gold])[0]


@pytest.mark.parametrize(
    "answer",
    [
        GOLD,
        "Ann Lee is a knight, Zoey is a knave, and Oliver is a knight.",
        "(1) Zoey is a knave\n(2) Oliver is a knight\n(3) Ann Lee is a knight",
        "1. Zoey: knave; 2. Oliver: Knight; 3. Ann Lee: KNIGHT",
        "zoey = knave, oliver = knight, ann lee = knight",
        r"**Zoey** is a knave, **Oliver** is a knight and $\text{Ann Lee}$ is a knight",
        "Zoey is a knave, Zoey is a knave, Oliver is a knight, Ann Lee is a knight",
    ],
)
def test_every_role_in_any_order(answer):
    assert graded(answer) is Grade.CORRECT


@pytest.mark.parametrize(
    "answer",
    [
        "Zoey is a knave, Oliver is a knight",  # one is missing
        "Zoey is a knave, Oliver is a knight, Ann Lee is a knave",
        "Zoey is a knave, Oliver is a knight, Ann is a knight",
        GOLD + ", Bob is a knave",
    ],
)
def test_wrong_roles(answer):
    assert graded(answer) is Grade.WRONG


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "knight",
        "Zoey is not a knave, Oliver is a knight, Ann Lee is a knight",
        "Zoey is a knight, Zoey is a knave, Oliver is a knight, Ann Lee is a knight",
        "Zoey is a knight or a knave, Oliver is a knight, Ann Lee is a knight",
        "Zoey, Oliver and Ann Lee are knights",
        GOLD + ", I think",
        "Zoey is a knave, " * 500,
        "(" * 1500,
        " " * 1500 + "x",
        "a" * 1500 + " is",
    ],
)
def test_what_states_no_roles(answer):
    assert graded(answer) is Grade.UNPARSABLE


@pytest.mark.smoke
def test_roles_by_hand():
    assert roles("A is a knight and B is a knave") == {"a": "knight", "b": "knave"}
    assert roles("A is a knight, A is a knave") is None
    assert roles("") is None


@pytest.mark.parametrize("gold", [None, "", "42"])
def test_a_gold_without_roles_is_an_error(gold):
    with pytest.raises(ValueError, match="gold answer must state roles"):
        graded(GOLD, gold)


@pytest.mark.long
def test_reasoning_gym_at_its_full_score_only():
    pytest.importorskip("reasoning_gym")
    chain = load_benchmark("reasoning-gym:chain_sum")
    assert len(chain.rows) == 100 and len({row["problem"] for row in chain.rows}) > 90
    assert chain.rows == load_benchmark("reasoning-gym:chain_sum").rows
    row = chain.rows[0]
    answers = [
        row["answer"],
        f"${row['answer']}$",
        f"**{row['answer']}**",
        row["answer"] + "1",
        "junk",
        "",
        "9" * 3000,
    ]
    with Grader(checker=REASONING_GYM) as grader:
        grades = grader.grade_many(
            [f"<SOLUTION>{a}</SOLUTION>" for a in answers], [row["gold"]] * 7
        )
        other = chain.rows[1]["gold"].replace(chain.rows[1]["answer"], "0")
        with pytest.raises(ValueError, match="gold answer must parse"):
            grader.grade_many(["<SOLUTION>0</SOLUTION>"], [other])  # no such item
    assert grades == ["correct"] * 3 + ["wrong"] * 2 + ["unparsable"] * 2
    half = load_benchmark("reasoning-gym:knights_knaves").rows[0]
    first = half["answer"].split(",")[0]
    assert graded(first, half["gold"], REASONING_GYM) is Grade.WRONG, "half-right scores .65 there"
    factors = load_benchmark("reasoning-gym:prime_factorization").rows[0]
    assert graded("junk", factors["gold"], REASONING_GYM) is Grade.UNPARSABLE, "its scorer raises"


def test_reasoning_gym_names_that_are_none():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="'nope' must be a generator of reasoning-gym"):
        load_benchmark("reasoning-gym:nope")
