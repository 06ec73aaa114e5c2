"""Countdown drawn anew: nothing of its test was ever evaluated, or is trained on."""

import json
import random
import re
from collections import Counter

import pytest

from research.data import COUNTDOWN_MODEL, FRESH_COUNTDOWN_MODEL
from research.problems import countdown, countdown_fresh
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.countdown import check_countdown
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.models.tokenizers import load_tokenizer


def posed(split: str) -> set[countdown.Problem]:
    return set(countdown_fresh.allocation()[split])


def test_the_test_split_is_fresh_and_apart_from_training():
    assert not posed("test") & set(countdown.held_out())
    for split in ("sft", "train"):
        assert not posed("test") & posed(split)
    assert not posed("sft") & posed("train")


@pytest.mark.parametrize("split", countdown.SPLITS)
def test_splits_have_the_sizes_of_the_first_drawing(split):
    found = Counter(countdown.family(one) for one in posed(split))
    sizes = {name: n for name, n in countdown.SPLITS[split].items() if n}
    assert found == (sizes if split != "test" else {"usual": 55, "other": 60, "rare": 75})
    rows = countdown_fresh.problems(split)
    assert {row["problem"] for row in rows} == {countdown.problem_text(one) for one in posed(split)}
    for row in rows:
        assert check_countdown(row["answer"], row["gold"]).grade == Grade.CORRECT
        assert ("solution" in row) == (split == "sft")


def test_units_count_as_the_problems_of_the_first_drawing_do():
    rows = countdown_fresh.problems("test")
    sizes = Counter(row["unit"] for row in rows)
    units = {row["unit"]: row["family"] for row in rows}
    first = {name: n for name, n in countdown.SPLITS["test"].items() if n}
    assert Counter(units.values()) == first
    assert all(sizes[unit] == (1 if units[unit] == "usual" else 3) for unit in units)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of test, sft, train; got 'rest'"):
        countdown_fresh.problems("rest")


def test_no_pretraining_document_poses_a_test_problem():
    tokenizer, rng = load_tokenizer(data_folder() / FRESH_COUNTDOWN_MODEL), random.Random(0)
    learnt = countdown_fresh.pretraining_problems()
    documents = [countdown.document(tokenizer, rng, learnt) for _ in range(3000)]
    text = "\n".join(context + learnt for context, learnt in documents)
    found = set(re.findall(r"\d+,\d+,\d+,\d+->\d\d", text))
    assert len(found) > 1000
    assert not found & {countdown.problem_text(one) for one in posed("test")}
    first = {countdown.problem_text(one) for one in countdown.held_out()}
    assert found & first, "what the first drawing holds out is not held out here"


def test_the_base_was_made_by_the_same_settings_with_another_seed():
    first, fresh = (
        json.loads((data_folder() / name / "pretrain.json").read_text())
        for name in (COUNTDOWN_MODEL, FRESH_COUNTDOWN_MODEL)
    )
    assert fresh["config"].pop("seed") != first["config"].pop("seed")
    assert fresh["config"].pop("problems") == "countdown-fresh"
    assert first["config"].pop("problems") == "countdown"
    for made in (first, fresh):
        del made["config"]["num_samples"]  # of the measurement
    assert fresh["config"] == first["config"] and fresh["corpus"] == first["corpus"]
    assert fresh["test"]["pass@1"] == pytest.approx(first["test"]["pass@1"], abs=0.02)
