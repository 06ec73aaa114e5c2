"""A rehearsal through stage 2: what is stored, resumed and refused."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from sage_unsloth.methods.rehearsal import METRIC, RehearsalRule
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rehearsal import REHEARSAL, _right
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.stage import read_metrics

CONFIG = smoke_config()
WEIGHTS = "adapter_model.safetensors"
TRAIN = arithmetic.problems("train")[:24]
RLVR = replace(
    CONFIG.rlvr,
    max_steps=3,
    save_steps=2,
    learning_rate=5e-3,
    beta=0.0,
    rehearsal_coef=0.5,
    rehearsal="forward-kl,samples=4,batch=4",
)


@pytest.fixture(scope="module")
def merged(smoke_sft):
    return smoke_sft


@pytest.fixture(scope="module")
def whole_run(merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return rlvr(RLVR, merged, TRAIN, folder), folder


@pytest.mark.long
def test_every_row_is_sampled_and_the_right_completions_hold_the_policy(whole_run):
    _, folder = whole_run
    records = read_jsonl(folder / REHEARSAL)
    assert all(len(r["token_ids"]) == r["num_tokens"] for r in records)
    assert len(records) == 4 * len(TRAIN)
    assert {r["problem_id"] for r in records} == {f"prompt-{i}" for i in range(len(TRAIN))}
    divergences = [row[METRIC] for row in read_metrics(folder)]
    assert abs(divergences[0]) < 1e-9, "policy and reference are one model before the first step"
    assert all(value > 1e-6 for value in divergences[1:])


def test_what_is_stored_are_the_tokens_that_were_drawn(monkeypatch):
    """A text may have as many tokens as were drawn, and other ones."""

    class Letters:
        eos_token_id = 0

        def __call__(self, text, **_):
            return {"input_ids": [ord(letter) for letter in text]}

    monkeypatch.setattr("sage_unsloth.training.rehearsal.prompt_ids", lambda *_: [1])
    record = {
        "problem_id": "prompt-0",
        "grade": "correct",
        "finish_reason": "stop",
        "completion": "ab",
        "num_tokens": 2,
    }
    row = {"id": "prompt-0", "problem": "?", "answer": "1"}
    engine = SimpleNamespace(tokenizer=Letters())

    def stored(**columns):
        return _right([record | columns], [row], engine, RehearsalRule(samples=1))

    assert stored(token_ids=[7, 9])[0].completion_ids == [7, 9, 0]
    assert stored()[0].completion_ids == [97, 98, 0], "of a file from before they were recorded"
    assert stored(num_tokens=3) == []
    assert stored(token_ids=[7, 9], finish_reason="length") == [], "it never had an EOS"


@pytest.mark.long
def test_a_killed_run_with_dropout_goes_on_to_the_same_weights_and_draws_nothing_again(
    merged, tmp_path, monkeypatch
):
    from transformers import Trainer

    evaluate = Trainer._maybe_log_save_evaluate
    config = replace(RLVR, lora=replace(RLVR.lora, dropout=0.2), preflight_prompts=0)
    expected = load_file(rlvr(config, merged, TRAIN, tmp_path / "whole") / WEIGHTS)

    def dies(self, *args, **kwargs):
        result = evaluate(self, *args, **kwargs)
        if self.state.global_step == 2:
            raise KeyboardInterrupt
        return result

    killed, lost = tmp_path / "killed", tmp_path / "elsewhere"
    monkeypatch.setattr(Trainer, "_maybe_log_save_evaluate", dies)
    with pytest.raises(KeyboardInterrupt):
        rlvr(config, merged, TRAIN, killed)
    monkeypatch.undo()
    stored = (killed / REHEARSAL).read_bytes()
    shutil.move(killed / REHEARSAL, lost)
    with pytest.raises(ValueError, match="resumed with its rehearsal completions"):
        rlvr(config, merged, TRAIN, killed)
    shutil.move(lost, killed / REHEARSAL)
    found = load_file(rlvr(config, merged, TRAIN, killed) / WEIGHTS)
    assert (killed / REHEARSAL).read_bytes() == stored
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_a_run_without_the_setting_samples_and_logs_nothing(merged, tmp_path):
    config = replace(RLVR, rehearsal_coef=0.0, rehearsal="forward-kl", max_steps=1)
    rlvr(config, merged, TRAIN, tmp_path)
    assert not (tmp_path / REHEARSAL).exists()
    assert METRIC not in read_metrics(tmp_path)[0]


@pytest.mark.long
def test_other_settings_of_it_are_another_run(merged, whole_run):
    with pytest.raises(ValueError, match=r"rehearsal_coef was 0\.5 and is 0\.1"):
        rlvr(replace(RLVR, rehearsal_coef=0.1), merged, TRAIN, whole_run[1])
    with pytest.raises(ValueError, match=r'rehearsal was "forward-kl,.*batch=4" and is "js"'):
        rlvr(replace(RLVR, rehearsal="js"), merged, TRAIN, whole_run[1])


def test_no_more_problems_are_sampled_than_asked_for(merged, tmp_path):
    rule = "js,problems=5,samples=4,batch=2,solved=0.25"
    rlvr(replace(RLVR, rehearsal=rule, max_steps=1), merged, TRAIN, tmp_path)
    assert len(read_jsonl(tmp_path / REHEARSAL)) == 5 * 4


@pytest.mark.long
def test_where_no_completion_can_be_stored_the_remedy_is_named(merged, tmp_path):
    impossible = [row | {"answer": "-1"} for row in TRAIN[:8]]
    config = replace(RLVR, preflight_prompts=0)
    with pytest.raises(ValueError, match=r"none of 32 on 8 problems .*forward-kl,samples=8"):
        rlvr(config, merged, impossible, tmp_path)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"full_finetuning": True}, {}, "full_finetuning=True"),
        ({}, {"rewards": [lambda completions, **_: [0.0] * len(completions)]}, "without a checked"),
    ],
)
def test_what_it_does_not_go_with_is_refused(merged, tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=f"needs answers that are checked.*got .*{message}"):
        rlvr(replace(RLVR, **changes), merged, TRAIN, tmp_path, **options)
    assert not (tmp_path / "run.json").exists()


def test_a_bad_setting_is_refused_by_the_config():
    with pytest.raises(ValueError, match="rehearsal must be one of forward-kl, js"):
        replace(RLVR, rehearsal="k1")
    with pytest.raises(ValueError, match="rehearsal_coef must be >= 0, got -1"):
        replace(RLVR, rehearsal_coef=-1)
