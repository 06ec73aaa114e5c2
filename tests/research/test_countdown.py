"""The countdown language: splits, families, workings and corpus, each against plain enumeration."""

import collections
import json
import random
import re

import pytest

from research.data import COUNTDOWN_MODEL
from research.pretrain import CORPORA
from research.problems import countdown
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.countdown import check_countdown
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.problems import arithmetic

EVERY = list(countdown.SPLITS)
FIRST = ["3,9,10,11->15", "3,7,8,10->17", "4,7,8,10->69"]


FORMS = {
    "sum": ["{}+{}+{}+{}", "{}+{}+{}-{}", "{}+{}-{}+{}", "{}+{}-{}-{}"],
    "product": ["{}*{}+{}+{}", "{}*{}+{}-{}", "{}*{}-{}+{}", "{}*{}-{}-{}"],
    "bracket": ["({}+{})*{}+{}", "({}+{})*{}-{}", "({}-{})*{}+{}", "({}-{})*{}-{}"],
}
USUAL = ["{}+{}+{}-{}", "{}*{}+{}-{}"]


def values(numbers, *ways: str) -> set[int]:
    """What the numbers give, by Python's own arithmetic on written expressions."""
    return {eval(form.format(*sorted(numbers)[::-1])) for way in ways for form in FORMS[way]}


@pytest.mark.parametrize("split", EVERY)
def test_splits_have_their_sizes_and_families_by_enumeration(split):
    rows = countdown.problems(split)
    each = countdown.SFT_ROWS_PER_PROBLEM if split == "sft" else 1
    found = collections.Counter(row["family"] for row in rows)
    assert found == {k: n * each for k, n in countdown.SPLITS[split].items() if n}
    for row in rows:
        gold = json.loads(row["gold"])
        plain = gold["target"] in values(gold["numbers"], "sum", "product")
        bracket = gold["target"] in values(gold["numbers"], "bracket")
        high = sorted(gold["numbers"])[::-1]
        signs = gold["target"] in (eval(form.format(*high)) for form in USUAL)
        expected = {(1, 1): "both", (0, 1): "rare", (1, 0): "usual" if signs else "other"}
        assert row["family"] == expected[plain, bracket]
        assert row["problem"] == f"{','.join(map(str, gold['numbers']))}->{gold['target']}"
        assert check_countdown(row["answer"], row["gold"]).grade is Grade.CORRECT


def test_no_two_splits_share_a_problem_in_any_order_of_its_numbers():
    asked = [(split, sorted(p[0]), p[1]) for split in EVERY for p in countdown.allocation()[split]]
    assert len(asked) == sum(sum(sizes.values()) for sizes in countdown.SPLITS.values())
    assert len({(tuple(numbers), target) for _, numbers, target in asked}) == len(asked)
    assert [row["problem"] for row in countdown.problems("test")][:3] == FIRST
    with pytest.raises(ValueError, match=r"split must be one of test, .*, got 'rest'"):
        countdown.problems("rest")


def test_sft_rows_are_right_and_keep_the_mixture_of_the_corpus():
    rows = countdown.problems("sft")
    for row in rows:
        for step in row["solution"].split(";"):
            left, right = step.split("=")
            assert eval(left) == int(right), row["solution"]
        assert row["solution"].endswith(f"={json.loads(row['gold'])['target']}")
    ways = collections.Counter(
        countdown.route(f"{row['solution']}<end_working_out>") for row in rows
    )
    assert ways["product"] > ways["sum"] > ways["bracket"] > 0 == ways["guess"]
    assert ways["bracket"] / len(rows) == pytest.approx(0.16, abs=0.04)


@pytest.mark.parametrize(
    ("signs", "expression", "way"),
    [
        ("*+-", "8*5+3-2", "product"),
        ("+*-", "(8+5)*3-2", "bracket"),
        ("-*+", "(8-5)*3+2", "bracket"),
        ("+--", "8+5-3-2", "sum"),
    ],
)
def test_an_expression_and_its_way_by_hand(signs, expression, way):
    steps = (("", 8), *zip(signs, (5, 3, 2), strict=True))
    assert countdown.expression(steps) == expression
    found = countdown.workings((2, 3, 5, 8))
    assert [name for name in found if steps in dict(found[name])] == [way]
    assert dict(found[way])[steps] == eval(expression)


def test_a_working_by_hand():
    rng = random.Random(0)
    one = ((2, 3, 5, 8), 11)
    assert countdown.reaching(one, "bracket") == [(("", 8), ("-", 5), ("*", 3), ("+", 2))]
    text, expression = countdown.working(one, "bracket", rng, careful=True)
    assert (text, expression) == ("8-5=3;3*3=9;9+2=11", "(8-5)*3+2")
    guesses = [countdown.working(one, "guess", rng) for _ in range(200)]
    assert {text for text, _ in guesses} == {""}
    assert sum(answer == "(8-5)*3+2" for _, answer in guesses) < 40, "it does not look"


@pytest.mark.parametrize(
    ("completion", "way"),
    [
        ("8+5=13;13-3=10;10+2=12<end_working_out>", "sum"),
        ("<start_working_out>8*5=40;40+3=43;43-2=41", "product"),
        ("8-5=3;3*3=9;9+2=11<end_working_out>", "bracket"),
        ("11+10=21;21*3=63;63-2=61<end_working_out>", "bracket"),
        ("<end_working_out><SOLUTION>8*3+5</SOLUTION>", "guess"),
        ("8*3=24;24*5=120;120+2=122<end_working_out>", "none"),
        ("8-5=3;3-3=0;0+2=2<end_working_out>", "none"),
        ("8*3=24;24+5=29<end_working_out>", "none"),
        ("", "none"),
    ],
)
def test_the_way_of_a_completion_by_hand(completion, way):
    assert countdown.route(completion) == way


def test_workings_are_every_one_once():
    for way, rows in countdown.workings((2, 3, 5, 8)).items():
        assert len(rows) == len(FORMS[way]) == len(set(rows))
        assert {value for _, value in rows} == values((2, 3, 5, 8), way)


@pytest.mark.parametrize(
    ("numbers", "target", "count"),
    [
        ((3, 4), 7, 1),  # 3+4
        ((3, 4), 1, 1),  # 4-3
        ((3, 4), 5, 0),
        ((2, 2), 4, 2),  # 2+2, 2*2; the two twos are alike
        ((2, 3, 6), 6, 6),  # 6, 2*3, (3-2)*6, 6/(3-2), 6/2+3, (6-3)*2
        ((3, 3, 8, 8), 24, 2),  # 3*8, 8/(3-8/3)
    ],
)
def test_solutions_by_hand(numbers, target, count):
    assert countdown.solutions(numbers, target) == count


def test_most_targets_have_several_solutions():
    counts = [countdown.solutions(*one) for one in countdown.allocation()["test"]]
    assert min(counts) >= 1
    assert sum(count > 1 for count in counts) == 95, "data/results/frontier/README.md says so"
    assert countdown.solutions((3, 5, 6, 9), 17) == 38, "as it says"


def test_no_pretraining_document_poses_a_problem_that_is_held_out():
    tokenizer, rng = arithmetic.build_tokenizer(), random.Random(0)
    documents = [countdown.document(tokenizer, rng) for _ in range(3000)]
    text = "\n".join(context + learnt for context, learnt in documents)
    held_out = {countdown.problem_text(one) for one in countdown.held_out()}
    assert len(held_out) == 300
    assert {row["problem"] for row in countdown.problems("test")} <= held_out
    posed = set(re.findall(r"\d+,\d+,\d+,\d+->\d\d", text))
    assert len(posed) > 1000 and not posed & held_out
    assert sum("->" in context for context, _ in documents) > 700


def test_what_the_corpus_writes_is_computed_right_and_seldom_reaches_the_target():
    rng = random.Random(0)
    reached = 0
    for _ in range(2000):
        one = rng.choice(countdown.pretraining_problems())
        text, expression = countdown.working(one, countdown.draw_route(rng), rng)
        for step in filter(None, text.split(";")):
            left, right = step.split("=")
            assert eval(left) == int(right)
        reached += eval(expression) == one[1]
    assert 0.1 < reached / 2000 < 0.5


def test_the_base_was_made_with_these_dials():
    made = json.loads((data_folder() / COUNTDOWN_MODEL / "pretrain.json").read_text())
    assert made["config"]["problems"] == "countdown"
    dials = {name: getattr(countdown, name) for name in CORPORA["countdown"].dials}
    assert made["corpus"] == dials
