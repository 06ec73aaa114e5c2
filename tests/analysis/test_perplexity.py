"""Scores against a loop without batches or padding; perplexity by hand; the guide's traces against
its formula.
"""

import io
import json
import math

import numpy as np
import pytest
import torch
from conftest import build_tokenizer, tiny_model
from tqdm import tqdm

from sage_unsloth.analysis import perplexity as perplexity_module
from sage_unsloth.analysis.perplexity import (
    load_scorer,
    perplexities,
    perplexity,
    perplexity_table,
    score_records,
)
from sage_unsloth.analysis.traces import read_guide, trace
from sage_unsloth.models.scoring import score
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.sampling.record_sets import completion_ids, prompt_ids

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
COMPLETIONS = [[20, 21], [22, 23, 24, 25], [26]]


@pytest.fixture(scope="module")
def model(unsloth_module):
    return tiny_model(0.3).eval()


@pytest.fixture(scope="module")
def tokenizer(unsloth_module):
    return build_tokenizer()


def alone(model, prompt, completion, temperature):
    """One row, unpadded, a probability at a time in float64."""
    logps, entropies = [], []
    for place, token in enumerate(completion):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion[:place]])).logits[0, -1].double()
        weights = [math.exp(value / temperature) for value in logits.tolist()]
        probabilities = [weight / sum(weights) for weight in weights]
        logps.append(math.log(probabilities[token]))
        entropies.append(-sum(p * math.log(p) for p in probabilities))
    return logps, entropies


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_those_of_each_row_alone(model, temperature):
    logps, entropies, mask = score(model, PROMPTS, COMPLETIONS, temperature)
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected = alone(model, prompt, completion, temperature)
        size = len(completion)
        assert logps[row, :size].tolist() == pytest.approx(expected[0], abs=1e-4)
        assert entropies[row, :size].tolist() == pytest.approx(expected[1], abs=1e-4)
        assert not logps[row, size:].any() and not entropies[row, size:].any()


def test_bad_completions_are_refused(model):
    for prompts, completions in (([[1]], [[]]), ([[]], [[1]]), ([], [])):
        with pytest.raises(ValueError, match="at least one token"):
            score(model, prompts, completions)
    with pytest.raises(ValueError, match="temperature must be > 0"):
        score(model, [[1]], [[2]], 0)


def test_perplexity_by_hand():
    assert perplexity(math.log(1 / 2) + math.log(1 / 4), 2) == pytest.approx(math.sqrt(8))
    assert perplexity(0.0, 3) == 1
    with pytest.raises(ValueError, match="at least one token, got 0"):
        perplexity(0.0, 0)


PROBLEMS = {"p": "1+1=?", "q": "22+3=?"}


def record(problem, sample, text, num_tokens=None, **more):
    num_tokens = len(text) if num_tokens is None else num_tokens  # a letter is a token here
    return {
        "problem_id": problem,
        "sample": sample,
        "completion": text,
        "num_tokens": num_tokens,
    } | more


RECORDS = [
    record("p", 0, "2"),
    record("p", 1, ""),
    record("q", 0, "25"),
    record("q", 1, "a bc", 3),
    record("p", 2, "3+1"),
]


class Counting:
    """A model that counts its rows, and fails once it has scored `limit`."""

    def __init__(self, model, limit=math.inf):
        self.model, self.limit, self.rows, self.device = model, limit, 0, model.device

    def __call__(self, input_ids, **options):
        self.rows += len(input_ids)
        if self.rows > self.limit:
            raise MemoryError
        return self.model(input_ids=input_ids, **options)


def test_a_scoring_that_was_killed_goes_on(model, tokenizer, tmp_path):
    options = dict(settings={"baseline": "b"}, batch_size=2)
    whole = score_records(model, tokenizer, RECORDS, PROBLEMS, tmp_path / "whole.jsonl", **options)
    assert [row["num_tokens"] for row in whole] == [1, 0, 2, 4, 3]
    assert [row["tokens_as_drawn"] for row in whole] == [True, True, True, False, True]
    for row, done in zip(RECORDS, whole, strict=True):
        ids = completion_ids(tokenizer, row["completion"])
        expected = (
            sum(alone(model, prompt_ids(tokenizer, PROBLEMS[row["problem_id"]]), ids, 1.0)[0])
            if ids
            else 0
        )
        assert done["total_logp"] == pytest.approx(expected, abs=1e-3)

    path, killed = tmp_path / "part.jsonl", Counting(model, limit=3)
    with pytest.raises(MemoryError):
        score_records(killed, tokenizer, RECORDS, PROBLEMS, path, **options)
    assert len(read_jsonl(path)) == 4
    with path.open("a") as file:
        file.write('{"problem_id": "p", "sam')
    again = Counting(model)
    bar = tqdm(total=len(RECORDS), file=io.StringIO())
    rows = score_records(again, tokenizer, RECORDS, PROBLEMS, path, bar=bar, **options)
    assert again.rows == 1, "the last response alone"
    assert bar.n == len(RECORDS)
    assert rows == [pytest.approx(row, abs=1e-4) for row in whole]
    assert score_records(Counting(model, 0), tokenizer, RECORDS, PROBLEMS, path, **options) == rows


def test_long_responses_are_scored_in_smaller_batches(model, tokenizer, tmp_path, monkeypatch):
    # Two prompts of 5 and 6 letters (and one system prompt), at most 4 tokens: 4 + 1 + 1 places of
    # a row, each with the vocabulary.
    monkeypatch.setattr(perplexity_module, "LOGITS_AT_ONCE", 2 * 6 * len(tokenizer))
    sizes = []
    counting = Counting(model)
    rows = [record("p", s, "1+1=") for s in range(3)] + [record("q", 0, "2")]
    counting.model = lambda input_ids, **options: (
        sizes.append(len(input_ids)) or model(input_ids=input_ids, **options)
    )
    score_records(counting, tokenizer, rows, PROBLEMS, tmp_path / "s.jsonl", settings={})
    assert sizes == [2, 2]


def test_scores_of_another_baseline_are_refused(model, tokenizer, tmp_path):
    path = tmp_path / "s.jsonl"
    score_records(model, tokenizer, RECORDS[:1], PROBLEMS, path, settings={"baseline": "b"})
    with pytest.raises(ValueError, match='baseline was "b" and is "c"'):
        score_records(model, tokenizer, RECORDS[:1], PROBLEMS, path, settings={"baseline": "c"})
    with pytest.raises(ValueError, match="'q' is not among the 1 that were read"):
        score_records(model, tokenizer, RECORDS, {"p": "1"}, tmp_path / "t.jsonl", settings={})


def scored(problem, values):
    """Responses of these perplexities; 0 stands for an empty one."""
    return [
        {
            "problem_id": problem,
            "sample": s,
            "num_tokens": 2 if v else 0,
            "total_logp": -2 * math.log(v) if v else 0.0,
            "tokens_as_drawn": s > 0,
        }
        for s, v in enumerate(values)
    ]


def test_perplexity_table_by_hand():
    scores = {
        "sft": scored("p", [1, 2, 3, 4, 5]) + scored("q", [2, 2, 2, 2, 2]) + scored("r", [0]),
        "rl": scored("p", [1, 1, 5, 6]) + scored("q", [1, 3, 3, 0]) + scored("r", [9]),
    }
    assert perplexities(scores["rl"]) == {
        "p": pytest.approx([1, 1, 5, 6]),
        "q": pytest.approx([1, 3, 3]),
        "r": pytest.approx([9]),
    }
    table = perplexity_table(scores, "sft", quantiles=(0.5, 0.75))
    found = {(row["model"], row["statistic"]): row for row in table}
    assert found["sft", "50% quantile"]["mean"] == pytest.approx((3 + 2) / 2)
    assert found["rl", "50% quantile"]["mean"] == pytest.approx((3 + 3) / 2)
    assert found["rl", "50% quantile"]["difference"] == pytest.approx(0.5)
    assert "difference" not in found["sft", "50% quantile"]
    # 4 of each on p: limit 4.25, above it 2 and 0; 3 of each on q: limit 2.75, above it 2 and 0.
    tail = "share above the 75% quantile of both"
    assert found["rl", tail]["mean"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert found["rl", tail]["difference"] == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert ("sft", tail) not in found
    row = found["rl", "50% quantile"]
    assert (row["problems"], row["responses"], row["left_out"]) == (2, 8, 1)
    assert row["tokens_as_drawn"] == pytest.approx(6 / 9)
    with pytest.raises(ValueError, match="one of sft, rl, got 'x'"):
        perplexity_table(scores, "x")
    with pytest.raises(ValueError, match="these models have none"):
        perplexity_table({"a": scored("p", [1]), "b": scored("q", [1])}, "a")


def test_tails_favour_neither_side():
    """Two models that change places change the sign of their difference, and nothing else: no bias
    where they are one.
    """
    generator = np.random.default_rng(0)
    draws = {
        m: [
            row
            for p in range(9)
            for row in scored(str(p), generator.lognormal(size=12).round(1) + 1)
        ]
        for m in "ab"
    }
    tail = "share above the 95% quantile of both"
    one, other = (
        next(row for row in perplexity_table(draws, against) if row["statistic"] == tail)
        for against in "ab"
    )
    assert one["difference"] == pytest.approx(-other["difference"]) != 0


def test_a_trace_has_what_the_guide_saw(model, tokenizer):
    guide = BranchGuide(ratio=0.5, threshold=1.0, q_min=0.1, q_max=9.0)
    row = record("p", 0, "2+3", finish_reason="stop", grade="correct")
    found = trace("t", model, tokenizer, guide, "1+1=?", row, temperature=0.8)
    ids = [*completion_ids(tokenizer, "2+3"), tokenizer.eos_token_id]
    prompt = prompt_ids(tokenizer, "1+1=?")
    logps, entropies = alone(model, prompt, ids, 0.8)
    with model.disable_adapter():
        ref_logps, _ = alone(model, prompt, ids, 0.8)
    assert found.tokens == ("2", "+", "3", "<eos>")
    assert found.entropies == pytest.approx(entropies, abs=1e-4)
    assert found.policy_logps == pytest.approx(logps, abs=1e-4)
    assert found.ref_logps == pytest.approx(ref_logps, abs=1e-4)
    assert np.abs(np.subtract(logps, ref_logps)).max() > 0.01, "the adapter does something"
    expected = [math.log(1 + 0.5 * max(0.0, h - 1.0)) for h in entropies]
    assert found.log_guides == pytest.approx(expected, abs=1e-4) and max(expected) > 0.1
    cut = trace("t", model, tokenizer, guide, "1+1=?", row | {"finish_reason": "length"})
    assert cut.tokens == ("2", "+", "3")


def test_a_trace_needs_a_reference(model, tokenizer):
    row, base = record("p", 0, "2", finish_reason="length"), model.get_base_model()
    given = trace(
        "t", model, tokenizer, TokenGuide(), "1", row, reference=model, step=3, max_steps=9
    )
    assert given.ref_logps == given.policy_logps
    with pytest.raises(ValueError, match="needs its reference model"):
        trace("t", base, tokenizer, BranchGuide(), "1", row)


@pytest.mark.parametrize(
    "guide",
    [
        BranchGuide(ratio=0.1),
        TokenGuide(alpha=CosineSchedule(0.2, 0.1), norm="rank"),
        RandomGuide(),
    ],
)
def test_recorded_guides_are_read_back(guide):
    assert read_guide(repr(guide)) == guide


@pytest.mark.parametrize(
    "text",
    [
        "None",
        "Mine()",
        "BranchGuide(ratio=open('x'))",
        "__import__('os').system('x')",
        "BranchGuide(0.3)",
        "BranchGuide(**{'ratio': 0.3})",
        "BranchGuide(",
        "CosineSchedule(upper=1.0, lower=0.0)",
        "BranchGuide(threshold=-1.0)",
        "BranchGuide(size=3)",
    ],
)
def test_no_other_text_is_a_guide(text):
    with pytest.raises(ValueError, match="a recorded guide must be"):
        read_guide(text)


def test_a_scorer_is_loaded_as_the_evaluation_loads_it(unsloth_module, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from sage_unsloth.models.embedded import BASE_MODEL, data_folder

    base = data_folder() / BASE_MODEL
    adapted = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    )
    adapted.save_pretrained(tmp_path / "adapter")
    plain, tokenizer = load_scorer(base)
    loaded, _ = load_scorer(base, tmp_path / "adapter")
    assert tokenizer.pad_token_id is not None and plain.dtype == torch.float32
    ids = [prompt_ids(tokenizer, "12*6=?")]
    with_adapter, without = score(loaded, ids, [[5, 6]])[0], score(plain, ids, [[5, 6]])[0]
    assert not torch.allclose(with_adapter, without)
    with loaded.disable_adapter():
        assert torch.allclose(score(loaded, ids, [[5, 6]])[0], without)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        load_scorer(base, tmp_path / "none")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2
