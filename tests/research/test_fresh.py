"""The languages drawn anew: nothing of their tests was ever evaluated, or is trained on."""

import json
import random
import re
from collections import Counter

import pytest

from research.data import COUNTDOWN_MODEL, FRESH_COUNTDOWN_MODEL, FRESH_MODEL
from research.problems import countdown
from research.problems.fresh import ARITHMETIC, COUNTDOWN
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.countdown import check_countdown
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.problems import arithmetic

EVALUATED = {ARITHMETIC: arithmetic.allocation()["test"], COUNTDOWN: countdown.held_out()}
TEXTS = {ARITHMETIC: lambda pair: "{}*{}=?".format(*pair), COUNTDOWN: countdown.problem_text}
NAMES = {ARITHMETIC: "arithmetic", COUNTDOWN: "countdown"}
both = pytest.mark.parametrize("fresh", NAMES, ids=NAMES.values())


@both
def test_the_test_split_is_fresh_and_apart_from_training(fresh):
    test, sft, train = (set(fresh.allocation[split]) for split in ("test", "sft", "train"))
    assert not test & set(EVALUATED[fresh])
    assert not test & sft and not test & train and not sft & train


@both
@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_splits_have_the_sizes_of_the_first_drawing(fresh, split):
    problems = fresh.allocation[split]
    families = Counter(fresh.family(problem) for problem in problems)
    sizes = {name: n for name, n in fresh.language.SPLITS[split].items() if n}
    if split == "test":
        sizes = {
            ARITHMETIC: {"usual": 50, "rare": 105, "far": 45},
            COUNTDOWN: {"usual": 55, "other": 60, "rare": 75},
        }[fresh]
    assert families == sizes
    rows = fresh.problems(split)
    assert {row["problem"] for row in rows} == set(map(TEXTS[fresh], problems))
    for row in rows:
        assert ("solution" in row) == (split == "sft")
        if fresh is COUNTDOWN:
            assert check_countdown(row["answer"], row["gold"]).grade == Grade.CORRECT
        else:
            first, second = row["problem"].removesuffix("=?").split("*")
            assert int(row["answer"]) == int(first) * int(second)


@both
def test_units_count_as_the_problems_of_the_first_drawing_do(fresh):
    rows = fresh.problems("test")
    sizes = Counter(row["unit"] for row in rows)
    units = {row["unit"]: row["family"] for row in rows}
    first = {name: n for name, n in fresh.language.SPLITS["test"].items() if n}
    assert Counter(units.values()) == first
    assert all(sizes[unit] == (1 if units[unit] == "usual" else 3) for unit in units)
    assert all(row["unit"].startswith(row["family"]) for row in rows)


@both
def test_an_unknown_split_is_refused(fresh):
    with pytest.raises(ValueError, match="split must be one of test, sft, train, got 'rest'"):
        fresh.problems("rest")


def test_no_pretraining_document_poses_a_test_problem_of_arithmetic():
    tokenizer, rng = load_tokenizer(data_folder() / FRESH_MODEL), random.Random(0)
    learnt = ARITHMETIC.pretraining_problems
    assert len(learnt) == 529 and not set(learnt) & set(ARITHMETIC.allocation["test"])
    documents = [arithmetic.document(tokenizer, rng, learnt) for _ in range(3000)]
    posed = {
        tuple(map(int, match.groups()))
        for context, _ in documents
        if (match := re.search(r"(\d+)\*(\d+)=\?", context))
    }
    assert posed <= set(learnt) and len(posed) > 500
    assert posed & set(EVALUATED[ARITHMETIC]), "the first drawing's test is not held out"


def test_no_pretraining_document_poses_a_test_problem_of_countdown():
    tokenizer, rng = load_tokenizer(data_folder() / FRESH_COUNTDOWN_MODEL), random.Random(0)
    learnt = COUNTDOWN.pretraining_problems
    documents = [countdown.document(tokenizer, rng, learnt) for _ in range(3000)]
    text = "\n".join(context + completion for context, completion in documents)
    posed = set(re.findall(r"\d+,\d+,\d+,\d+->\d\d", text))
    assert len(posed) > 1000
    assert not posed & set(map(countdown.problem_text, COUNTDOWN.allocation["test"]))
    assert posed & set(map(countdown.problem_text, countdown.held_out())), "not held out here"


@pytest.mark.parametrize(
    "first, fresh, problems, key, tolerance",
    [
        (BASE_MODEL, FRESH_MODEL, "fresh", "pass@64", 0.05),
        (COUNTDOWN_MODEL, FRESH_COUNTDOWN_MODEL, "countdown-fresh", "pass@1", 0.02),
    ],
)
def test_the_base_was_made_by_the_same_settings_with_another_seed(
    first, fresh, problems, key, tolerance
):
    old, new = (
        json.loads((data_folder() / name / "pretrain.json").read_text()) for name in (first, fresh)
    )
    assert new["config"].pop("seed") != old["config"].pop("seed")
    assert new["config"].pop("problems") == problems
    for made in (old, new):
        made["config"].pop("problems", None)
        made["config"].pop("num_samples", None)  # of the measurement
    assert new["config"] == old["config"] and new["corpus"] == old["corpus"]
    assert new["test"][key] == pytest.approx(old["test"][key], abs=tolerance)
