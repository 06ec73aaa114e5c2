"""The dose of a guide before training: on a model's completions, and in a run's preflight."""

import json
import math
from dataclasses import replace

import pytest

from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.training.guide_dose import guide_dose

ROWS = [{"id": "a", "problem": "17*6=?", "answer": "102"}]


def record(text, grade, finish="stop"):
    return {"problem_id": "a", "completion": text, "finish_reason": finish, "grade": grade}


@pytest.fixture(scope="module")
def base(unsloth_module):
    from sage_unsloth.analysis.perplexity import load_scorer

    return load_scorer(data_folder() / "arithmetic-base")


def test_sums_are_those_of_each_completion_traced_alone(base):
    """`trace` scores a completion for a page of tokens; its log q sum to the same."""
    from sage_unsloth.analysis.traces import trace

    model, tokenizer = base
    guide = BranchGuide(threshold=0.2)
    records = [record("17=10+7;10*6=60", "correct"), record("17=20-3;2", "wrong", "length")]
    dose = guide_dose(records, guide, model, tokenizer, ROWS)
    sums = [
        math.fsum(trace("", model, tokenizer, guide, "17*6=?", row, reference=model).log_guides)
        for row in records
    ]
    assert dose.touched > 0
    assert (dose.correct, dose.wrong) == pytest.approx(tuple(sums), rel=1e-5)
    assert dose.spread == pytest.approx(abs(sums[0] - sums[1]), rel=1e-4)


def test_only_the_first_tokens_of_a_long_completion_are_scored(base, monkeypatch):
    from sage_unsloth.training import guide_dose as module

    model, tokenizer = base
    guide = BranchGuide(threshold=0.0)
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 5 * len(tokenizer))
    text = "17=10+7;10*6=60;7*6=42"
    cut = tokenizer.decode(tokenizer(text)["input_ids"][:5])
    long = guide_dose([record(text, "correct")], guide, model, tokenizer, ROWS)
    short = guide_dose([record(cut, "correct", "length")], guide, model, tokenizer, ROWS)
    assert long == short


def test_a_teacher_and_empty_completions_are_refused(base):
    model, tokenizer = base
    with pytest.raises(ValueError, match="a guide without a teacher"):
        guide_dose([record("1", "wrong")], TeacherGuide(), model, tokenizer, ROWS)
    with pytest.raises(ValueError, match="not empty"):
        guide_dose([record("", "wrong", "length")], BranchGuide(), model, tokenizer, ROWS)


def test_a_run_says_it_before_its_first_step(tmp_path, unsloth_module, caplog):
    """With the same preflight, by the same seed, the first step is that of a run without it."""
    from sage_unsloth.problems import arithmetic
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.rlvr_stage import rlvr
    from sage_unsloth.training.stage import read_metrics

    config = replace(smoke_config().rlvr, max_steps=1, preflight_prompts=2, save_steps=1)
    guide, rows = BranchGuide(threshold=0.2), arithmetic.problems("train")
    with caplog.at_level("INFO", "sage_unsloth.training.guide_dose"):
        rlvr(
            config, data_folder() / "arithmetic-base", rows, tmp_path / "a", guide=guide, force=True
        )
    report = json.loads((tmp_path / "a" / "guide_dose.json").read_text())
    assert report["touched"] > 0 and report["beta"] == config.beta
    assert report["text"] in caplog.text
    config = replace(config, preflight_prompts=0)
    rlvr(config, data_folder() / "arithmetic-base", rows, tmp_path / "b", guide=guide, force=True)
    assert not (tmp_path / "b" / "guide_dose.json").exists()
    first, second = (read_metrics(tmp_path / name)[0] for name in "ab")
    for name in ("reward", "loss", "sage/entropy", "grad_norm"):
        assert first[name] == second[name], name
