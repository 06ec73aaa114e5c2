"""The arithmetic language: rows, workings, corpus, tokenizer and the base model that is shipped."""

import collections
import functools
import json
import random
import re
from pathlib import Path

import pytest

from sage_unsloth import prompts
from sage_unsloth.problems import arithmetic

BASE = Path(__file__).parents[2] / "data" / "arithmetic-base"
STEP = re.compile(r"(\d+)([*+-])(\d+)=(\d+)")
PYTHON = {"*": int.__mul__, "+": int.__add__, "-": int.__sub__}


@functools.cache
def tokenizer():
    return arithmetic.build_tokenizer()


def mistakes(working: str) -> int:
    """How many steps `a*b=c`, `a+b=c`, `a-b=c` of `working` are wrong, and `n=a+b` likewise."""
    wrong = 0
    for step in working.split(";"):
        if found := STEP.fullmatch(step):
            left, sign, right, value = found.groups()
        else:
            value, left, sign, right = re.fullmatch(r"(\d+)=(\d+)([+-])(\d+)", step).groups()
        wrong += PYTHON[sign](int(left), int(right)) != int(value)
    return wrong


# --- rows -----------------------------------------------------------------------------------------


def test_counts():
    counts = {
        s: collections.Counter(r["family"] for r in arithmetic.problems(s))
        for s in arithmetic.SPLITS
    }
    assert counts == {
        "test": {"usual": 50, "rare": 35, "far": 15},
        "sft": {"both": 300},
        "train": {"usual": 139, "rare": 23, "both": 35, "far": 23},
    }


def test_rare_is_scarce_in_training():
    rows = arithmetic.problems("train")
    assert 0.08 < sum(r["family"] == "rare" for r in rows) / len(rows) < 0.13


@pytest.mark.smoke
def test_splits_are_disjoint_and_stable():
    asked = {
        split: {r["problem"] for r in arithmetic.problems(split)} for split in arithmetic.SPLITS
    }
    assert {split: len(problems) for split, problems in asked.items()} == {
        "test": 100,
        "sft": 100,
        "train": 220,
    }
    assert len(set.union(*asked.values())) == 420
    assert [r["problem"] for r in arithmetic.problems("test")][:3] == [
        "67*5=?",
        "22*11=?",
        "73*8=?",
    ]
    assert arithmetic.problems("sft") == arithmetic.problems("sft")


def test_ids_are_unique():
    ids = [row["id"] for split in arithmetic.SPLITS for row in arithmetic.problems(split)]
    assert len(ids) == len(set(ids)) == 620


@pytest.mark.parametrize("split", arithmetic.SPLITS)
def test_answers(split):
    for row in arithmetic.problems(split):
        left, right = re.fullmatch(r"(\d+)\*(\d+)=\?", row["problem"]).groups()
        assert row["answer"] == str(int(left) * int(right))


def test_unknown_split():
    with pytest.raises(ValueError, match="got 'validation'"):
        arithmetic.problems("validation")


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("number", "family"),
    [
        (12, "usual"),
        (64, "usual"),
        (15, "both"),
        (17, "rare"),
        (94, "rare"),
        (99, "rare"),
        (67, "far"),
        (73, "far"),
        (91, "far"),
    ],
)
def test_family_by_hand(number, family):
    assert arithmetic.family(number) == family


def test_sft_rows_are_right_and_keep_the_mixture_of_the_corpus():
    rows = arithmetic.problems("sft")
    assert all(
        mistakes(r["solution"]) == 0 and r["solution"].endswith("=" + r["answer"]) for r in rows
    )
    ways = collections.Counter(arithmetic.route(r["solution"]) for r in rows)
    for way, share in arithmetic.ROUTES.items():
        assert ways[way] / len(rows) == pytest.approx(share, abs=0.06), way


# --- workings -------------------------------------------------------------------------------------

BY_HAND = {
    "tens": ("17=10+7;10*6=60;7*6=42;60+42=102", "102"),
    "round-up": ("17=20-3;20*6=120;3*6=18;120-18=102", "102"),
    "guess": ("17*6=102", "102"),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_working_by_hand(way):
    assert arithmetic.working(17, 6, way, random.Random(0), careful=True) == BY_HAND[way]


@pytest.mark.parametrize("way", arithmetic.ROUTES)
def test_careful_workings_are_right_and_name_their_way(way):
    rng = random.Random(1)
    for number, factor in arithmetic.allocation()["train"]:
        text, answer = arithmetic.working(number, factor, way, rng, careful=True)
        assert mistakes(text) == 0 and int(answer) == number * factor
        assert arithmetic.route(text) == way
        assert arithmetic.route(prompts.solution_text(text, answer)) == way


def test_ways_that_lead_to_the_answer_follow_from_the_family():
    leads = {"usual": {"tens"}, "rare": {"round-up"}, "both": {"tens", "round-up"}, "far": set()}
    right = collections.defaultdict(list)
    rng = random.Random(2)
    for number, factor in arithmetic.allocation()["train"] * 20:
        for way in ("tens", "round-up"):
            _, answer = arithmetic.working(number, factor, way, rng)
            right[arithmetic.family(number), way].append(int(answer) == number * factor)
    for (family, way), hits in right.items():
        # two mistakes cancel now and then where both facts are unknown
        share = sum(hits) / len(hits)
        assert share == 1 if way in leads[family] else share < 0.05, (family, way, share)


@pytest.mark.parametrize(
    ("completion", "way"),
    [
        ("17=10+7;10*6=60", "tens"),
        ("17=20-3;20*6", "round-up"),
        ("17=12+5;12*6=72", "other"),
        ("17=7+10;7*6=42", "other"),
        ("17=10+", "none"),
        ("17=19-2;", "none"),
        ("17*6=99<end_working_out>", "guess"),
        ("", "none"),
        ("the answer is 17*6=102", "none"),
    ],
)
def test_route(completion, way):
    assert arithmetic.route(completion) == way


# --- corpus ---------------------------------------------------------------------------------------


def test_corpus_holds_out_the_test_split_and_repeats_with_its_seed():
    documents = [arithmetic.document(tokenizer(), random.Random(seed)) for seed in range(3000)]
    assert documents == [
        arithmetic.document(tokenizer(), random.Random(seed)) for seed in range(3000)
    ]
    asked = {re.search(r"\d+\*\d+=\?", context)[0] for context, _ in documents if context}
    assert len(asked) > 500
    assert not asked & {row["problem"] for row in arithmetic.problems("test")}


def test_corpus_shares():
    rng = random.Random(3)
    documents = [arithmetic.document(tokenizer(), rng) for _ in range(4000)]
    solved = [text for context, text in documents if context]
    assert len(solved) / len(documents) == pytest.approx(1 - arithmetic.DRILLS, abs=0.03)
    tagged = sum(prompts.SOLUTION_START in text for text in solved) / len(solved)
    assert tagged == pytest.approx(1 - arithmetic.UNTAGGED, abs=0.03)
    ways = collections.Counter(arithmetic.route(text) for text in solved)
    for way, share in arithmetic.ROUTES.items():
        assert ways[way] / len(solved) == pytest.approx(share, abs=0.03), way


def test_drills_are_consistent():
    rng = random.Random(4)
    for text in (arithmetic.drill(rng) for _ in range(500)):
        if "*" not in text:
            assert mistakes(text) == 0


# --- tokenizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        prompts.SYSTEM_PROMPT,
        "17=10+7;10*6=60<end_working_out><SOLUTION>102</SOLUTION>",
        "  Größe\t✓ 汉字\r\n\n x",
        "<SOLUTION <solution> </SOLUTION></SOLUTION>",
    ],
)
def test_round_trip(text):
    ids = tokenizer()(text).input_ids
    assert tokenizer().decode(ids) == text
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


def test_digits_are_single_tokens():
    assert len(tokenizer()("1234567890").input_ids) == 10
    assert len(tokenizer()("17*6=?").input_ids) == 6


def test_prompt_is_short():
    assert len(tokenizer()(prompts.SYSTEM_PROMPT).input_ids) <= 50
    assert len(tokenizer()(prompts.render_prompt(tokenizer(), "17*6=?")).input_ids) <= 60


def test_tags_are_tokens_that_survive_decoding():
    for tag in arithmetic.TEXT_TAGS:
        (token,) = tokenizer()(tag).input_ids
        assert tokenizer().decode([token], skip_special_tokens=True) == tag


def test_tokenizer_survives_the_disk(tmp_path):
    from transformers import AutoTokenizer, Qwen2Config

    Qwen2Config().save_pretrained(tmp_path)  # AutoTokenizer goes by the model type
    tokenizer().save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    rng = random.Random(5)
    for text in ("".join(arithmetic.document(tokenizer(), rng)) for _ in range(300)):
        assert loaded(text).input_ids == tokenizer()(text).input_ids
        assert loaded.decode(loaded(text).input_ids) == text


def test_eos_pad_and_side():
    assert tokenizer().eos_token_id != tokenizer().pad_token_id
    assert tokenizer().decode([tokenizer().eos_token_id], skip_special_tokens=True) == ""
    assert tokenizer().padding_side == "left"
    assert tokenizer().chat_template == prompts.CHAT_TEMPLATE
    assert 300 <= len(tokenizer()) <= 600


# --- the shipped base -----------------------------------------------------------------------------


def test_shipped_base_generates():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(BASE)
    prompt = prompts.render_prompt(shipped, "12*6=?")
    assert shipped(prompt).input_ids == tokenizer()(prompt).input_ids
    assert (shipped.padding_side, shipped.eos_token, shipped.pad_token) == (
        "left",
        arithmetic.EOS,
        arithmetic.PAD,
    )
    assert shipped.chat_template == prompts.CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(BASE)
    assert model.config.vocab_size == len(shipped)
    assert 0.5e6 < model.num_parameters() < 1.5e6
    torch.manual_seed(0)
    inputs = shipped(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(
        **inputs, do_sample=True, top_k=0, max_new_tokens=64, num_return_sequences=64
    )
    texts = shipped.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    assert sum(arithmetic.route(text) != "none" for text in texts) > 55
    assert sum(text.endswith("<SOLUTION>72</SOLUTION>") for text in texts) > 5


def test_shipped_base_is_where_the_task_wants_it():
    report = json.loads((BASE / "pretrain.json").read_text())
    assert report["corpus"]["ROUTES"] == arithmetic.ROUTES, (
        "the corpus changed: run python -m research.pretrain"
    )
    assert 0.15 <= report["test"]["pass@1"] <= 0.35
    assert 0.6 <= report["test"]["pass@64"] <= 0.9
    assert 0.6 <= report["test"]["format_share"] <= 0.8
