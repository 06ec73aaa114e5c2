"""The arithmetic language drawn anew: nothing of its test was ever evaluated, or is trained on."""

import json
import random
import re
from collections import Counter

import pytest

from research.data import FRESH_MODEL
from research.problems import arithmetic_fresh
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.problems import arithmetic


def pairs(split: str) -> set[tuple[int, int]]:
    return set(arithmetic_fresh.allocation()[split])


def test_the_test_split_is_fresh_and_apart_from_training():
    test = pairs("test")
    assert not test & set(arithmetic.allocation()["test"])
    for split in ("sft", "train"):
        assert not test & pairs(split)
    assert not pairs("sft") & pairs("train")


@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_splits_have_the_sizes_of_the_first_drawing(split):
    found = Counter(arithmetic.family(number) for number, _ in pairs(split))
    sizes = {name: n for name, n in arithmetic.SPLITS[split].items() if n}
    assert found == (sizes if split != "test" else {"usual": 50, "rare": 105, "far": 45})
    rows = arithmetic_fresh.problems(split)
    assert {row["problem"] for row in rows} == {f"{a}*{b}=?" for a, b in pairs(split)}
    for row in rows:
        first, second = row["problem"].removesuffix("=?").split("*")
        assert int(row["answer"]) == int(first) * int(second)
        assert ("solution" in row) == (split == "sft")


def test_units_count_as_the_problems_of_the_first_drawing_do():
    rows = arithmetic_fresh.problems("test")
    sizes = Counter(row["unit"] for row in rows)
    units = {row["unit"]: row["family"] for row in rows}
    assert Counter(units.values()) == {"usual": 50, "rare": 35, "far": 15}
    assert all(sizes[unit] == (1 if units[unit] == "usual" else 3) for unit in units)
    assert all(row["unit"].startswith(row["family"]) for row in rows)


def test_an_unknown_split_is_refused():
    with pytest.raises(ValueError, match="split must be one of test, sft, train; got 'rest'"):
        arithmetic_fresh.problems("rest")


def test_no_pretraining_document_poses_a_test_problem():
    tokenizer, rng = load_tokenizer(data_folder() / FRESH_MODEL), random.Random(0)
    learnt = arithmetic_fresh.pretraining_pairs()
    assert len(learnt) == 529 and not set(learnt) & pairs("test")
    documents = [arithmetic.document(tokenizer, rng, learnt) for _ in range(3000)]
    posed = {
        tuple(map(int, found.groups()))
        for context, _ in documents
        if (found := re.search(r"(\d+)\*(\d+)=\?", context))
    }
    assert posed <= set(learnt) and len(posed) > 500
    assert posed & set(arithmetic.allocation()["test"]), "the first drawing's test is not held out"


def test_the_base_was_made_by_the_same_settings_with_another_seed():
    first, fresh = (
        json.loads((data_folder() / name / "pretrain.json").read_text())
        for name in (BASE_MODEL, FRESH_MODEL)
    )
    assert fresh["config"].pop("seed") != first["config"].pop("seed")
    assert fresh["config"].pop("problems") == "fresh"
    assert fresh["config"] == first["config"] and fresh["corpus"] == first["corpus"]
    assert fresh["test"]["pass@64"] == pytest.approx(first["test"]["pass@64"], abs=0.05)
