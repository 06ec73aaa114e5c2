"""Both stages on the shipped base model, through the functions that the quickstart and the notebooks call."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sage_unsloth import arithmetic
from sage_unsloth.guides import BranchGuide, TokenGuide
from sage_unsloth.models import LoraSettings, data_folder, load_policy, load_tokenizer
from sage_unsloth.quickstart import BASE_MODEL, smoke_config
from sage_unsloth.records import read_jsonl
from sage_unsloth.train import check_rows, read_metrics, rlvr, sft

BASE = data_folder() / BASE_MODEL
CONFIG = smoke_config()
RLVR = replace(CONFIG.rlvr, max_steps=4, save_steps=2, learning_rate=5e-3)
TRAIN = arithmetic.problems("train")


def adapter_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def merged(tmp_path_factory, unsloth_module):
    return sft(CONFIG.sft, BASE, arithmetic.problems("sft"), tmp_path_factory.mktemp("sft"))


@pytest.fixture(scope="module")
def whole_run(merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return rlvr(RLVR, merged, TRAIN, folder, TokenGuide()), folder


def test_sft_leaves_a_merged_model_that_differs_from_the_base(merged):
    before, _ = load_policy(BASE)
    after, tokenizer = load_policy(merged)
    changed = [
        n for n, p in after.state_dict().items() if not torch.equal(p, before.state_dict()[n])
    ]
    assert any("q_proj" in name for name in changed)
    assert not any("lora" in name for name in after.state_dict())
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert [row["step"] for row in read_metrics(merged.parent)] == [1, 2]


def test_sft_learns_the_completion_only_and_its_eos(unsloth_module, tmp_path, monkeypatch):
    from sage_unsloth import train

    seen = {}

    def stop(trainer, folder, name, **kwargs):
        seen["batch"] = trainer.data_collator([trainer.train_dataset[0]])
        raise InterruptedError

    monkeypatch.setattr(train, "_train", stop)
    rows = arithmetic.problems("sft")[:4]
    with pytest.raises(InterruptedError):
        sft(CONFIG.sft, BASE, rows, tmp_path)
    tokenizer = load_tokenizer(BASE)
    ids, labels = seen["batch"]["input_ids"][0], seen["batch"]["labels"][0]
    learned = tokenizer.decode(ids[labels != -100])
    expected = f"{rows[0]['solution']}<end_working_out><SOLUTION>{rows[0]['answer']}</SOLUTION>{tokenizer.eos_token}"
    assert learned == expected
    shown = tokenizer.decode(ids[labels == -100])
    assert shown.startswith("You are given a problem.") and shown.endswith("<start_working_out>")


def test_rlvr_trains_an_adapter_and_logs_every_step(whole_run):
    adapter, folder = whole_run
    weights = adapter_weights(adapter)
    assert max(w.abs().max().item() for n, w in weights.items() if "lora_B" in n) > 1e-4
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in (
        "reward",
        "kl",
        "kl/ref_k3",
        "kl/anchor_k3",
        "sage/guide_mean",
        "grad_norm",
        "reward/correct",
        "reward/unparsable",
    ):
        assert all(isinstance(row[key], float | int) for row in rows), key
    graded = sum(
        rows[0][f"reward/{grade}"] for grade in ("correct", "wrong", "unparsable", "timed out")
    )
    assert graded == RLVR.prompts_per_step * RLVR.num_generations
    assert abs(rows[0]["kl/ref_k3"]) < 1e-7, "the first step's KL to the reference is 0"
    assert not (folder / "checkpoints").exists()


def test_complete_stages_return_at_once(merged, whole_run, monkeypatch):
    from sage_unsloth import train

    monkeypatch.setattr(
        train, "load_policy", lambda *a, **k: pytest.fail("nothing is to be loaded")
    )
    assert sft(CONFIG.sft, BASE, arithmetic.problems("sft"), merged.parent) == merged
    assert rlvr(RLVR, merged, TRAIN, whole_run[1], TokenGuide()) == whole_run[0]


def test_a_folder_of_another_run_is_refused(merged, whole_run):
    changes = {
        "beta was 0.05 and is 0.5": (replace(RLVR, beta=0.5), TRAIN, TokenGuide()),
        "guide was": (RLVR, TRAIN, BranchGuide()),
        "rows was": (RLVR, TRAIN[1:], TokenGuide()),
    }
    for message, (config, rows, guide) in changes.items():
        with pytest.raises(ValueError, match=message):
            rlvr(config, merged, rows, whole_run[1], guide)
    with pytest.raises(ValueError, match="learning_rate was"):
        sft(replace(CONFIG.sft, learning_rate=1.0), BASE, arithmetic.problems("sft"), merged.parent)


def test_killed_after_the_last_checkpoint_trains_no_further(
    merged, whole_run, tmp_path, monkeypatch
):
    from peft import PeftModel

    save = PeftModel.save_pretrained

    def dies(self, folder, *args, **kwargs):
        if "checkpoint" not in str(folder):
            raise KeyboardInterrupt
        return save(self, folder, *args, **kwargs)

    monkeypatch.setattr(PeftModel, "save_pretrained", dies)
    with pytest.raises(KeyboardInterrupt):
        rlvr(RLVR, merged, TRAIN, tmp_path, TokenGuide())
    monkeypatch.undo()
    adapter = rlvr(RLVR, merged, TRAIN, tmp_path, TokenGuide())
    expected = adapter_weights(whole_run[0])
    found = adapter_weights(adapter)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4]


def test_long_rows_are_refused(merged, tmp_path):
    with pytest.raises(ValueError, match="max_prompt_length=5 tokens; 220 of 220 do not"):
        rlvr(replace(RLVR, max_prompt_length=5), merged, TRAIN, tmp_path / "rl")
    rows = [dict(row) for row in arithmetic.problems("sft")[:4]]
    rows[2]["solution"] *= 6
    with pytest.raises(ValueError, match=r"row 2 ends in .* raise max_length"):
        sft(CONFIG.sft, BASE, rows, tmp_path / "sft")


def test_killed_run_goes_on_to_the_same_weights(merged, whole_run, tmp_path, monkeypatch):
    """Stopped within step 3, after the checkpoint of step 2; a checkpoint cut short beside it is passed over."""
    from sage_unsloth.rewards import SolutionReward

    calls = []
    reward = SolutionReward.__call__

    def dies_at_the_third_step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return reward(self, *args, **kwargs)

    monkeypatch.setattr(SolutionReward, "__call__", dies_at_the_third_step)
    with pytest.raises(KeyboardInterrupt):
        rlvr(RLVR, merged, TRAIN, tmp_path, TokenGuide())
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "checkpoint-2").exists()
    shutil.copytree(checkpoints / "checkpoint-2", checkpoints / "checkpoint-3")
    (checkpoints / "checkpoint-3" / "optimizer.pt").unlink()
    shutil.copytree(checkpoints / "checkpoint-2", checkpoints / "checkpoint-4")
    (checkpoints / "checkpoint-4" / "trainer_state.json").write_text('{"global')

    adapter = rlvr(RLVR, merged, TRAIN, tmp_path, TokenGuide())
    expected = adapter_weights(whole_run[0])
    found = adapter_weights(adapter)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    keys = ("reward", "kl", "sage/guide_mean", "sage/guide_max", "loss")
    again, whole = read_metrics(tmp_path), read_metrics(whole_run[1])
    assert [[row[k] for k in keys] for row in again] == [[row[k] for k in keys] for row in whole]


def test_same_data_order_for_every_algorithm(merged, tmp_path, monkeypatch):
    from sage_unsloth.rewards import SolutionReward

    order = {}
    reward = SolutionReward.__call__

    def record(self, prompts, completions, answer, **kwargs):
        order.setdefault(name, []).append([prompt[-1]["content"] for prompt in prompts])
        return reward(self, prompts, completions, answer, **kwargs)

    monkeypatch.setattr(SolutionReward, "__call__", record)
    config = replace(RLVR, max_steps=2)
    for name, guide in {"none": None, "branch": BranchGuide()}.items():
        rlvr(config, merged, TRAIN, tmp_path / name, guide)
    assert order["none"] == order["branch"]
    assert (
        len({problem for step in order["none"] for problem in step}) == 2 * config.prompts_per_step
    )


def test_metrics_after_a_resume_count_once(tmp_path):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [lines[0], lines[2]]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([{"problem": "1+1"}], r"row 0 lacks 'answer' and has \['problem'\]; rename"),
        ([{"question": "1+1", "answer": "2"}], r"lacks 'problem' and has \['answer', 'question'\]"),
        (
            [{"problem": "1", "answer": "2"}, {"problem": "1", "answer": ""}],
            "'answer' must be a non-empty text; row 1 has ''",
        ),
        ([{"problem": "1", "answer": 2}], "row 0 has 2"),
        ([{"problem": None, "answer": "2"}], "row 0 has None"),
    ],
)
def test_bad_rows_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        check_rows(rows, ("problem", "answer"))


def test_a_tokenizer_without_a_pad_token_of_its_own_is_refused(tmp_path):
    tokenizer = load_tokenizer(BASE)
    for pad in (None, tokenizer.eos_token):
        tokenizer.pad_token = pad
        tokenizer.save_pretrained(tmp_path / str(pad is None))
        with pytest.raises(ValueError, match=r"pad token of its own.*set tokenizer.pad_token"):
            load_tokenizer(tmp_path / str(pad is None))


def test_bad_loading_is_refused():
    with pytest.raises(ValueError, match=r"either lora .* or adapter"):
        load_policy(BASE, lora=LoraSettings(), adapter="somewhere")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="load_in_4bit needs a GPU"):
            load_policy(BASE, load_in_4bit=True)


def test_guide_without_kl_is_refused_before_anything_is_loaded(merged, tmp_path, monkeypatch):
    from sage_unsloth import train

    monkeypatch.setattr(
        train, "load_policy", lambda *a, **k: pytest.fail("nothing is to be loaded")
    )
    with pytest.raises(ValueError, match="beta must not be 0"):
        rlvr(replace(RLVR, beta=0.0), merged, TRAIN, tmp_path, BranchGuide())
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_estimator": "k4"}, r"one of \('k3', .*got 'k4'"),
        ({"kl_estimator": "k2", "beta": 0.0}, r"beta must not be 0 .*'k2'"),
    ],
)
def test_a_penalty_that_cannot_be_is_refused_by_the_config(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RLVR, **change)


def test_settings_that_unsloth_would_change_reach_the_trainer(merged, tmp_path, monkeypatch):
    """Unsloth fills in None by loss type (DAPO: truncated completions masked, epsilon_high .28); ours are explicit."""
    from sage_unsloth import train

    seen = {}

    def stop(trainer, *args, **kwargs):
        seen["args"] = trainer.args
        raise InterruptedError

    monkeypatch.setattr(train, "_train", stop)
    config = replace(
        RLVR, loss_type="dapo", epsilon_high=0.25, top_p=0.9, min_p=0.02, temperature=0.8
    )
    with pytest.raises(InterruptedError):
        rlvr(config, merged, TRAIN, tmp_path)
    args = seen["args"]
    for name in (
        "loss_type",
        "epsilon",
        "epsilon_high",
        "top_p",
        "min_p",
        "temperature",
        "beta",
    ):
        assert getattr(args, name) == getattr(config, name), name
    assert args.use_bias_correction_kl is False
    assert args.mask_truncated_completions is False
    assert args.scale_rewards == "group"
    assert args.gradient_accumulation_steps == 1


def test_the_readme_training_example_runs(unsloth_module, tmp_path, monkeypatch):
    root = Path(__file__).parent.parent
    readme = (root / "README.md").read_text()
    code = next(
        b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "GRPOTrainer(" in b
    )
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(code.replace("data/arithmetic-base", str(BASE)), namespace)
    logged = namespace["trainer"].state.log_history
    assert [entry["step"] for entry in logged if "sage/guide_mean" in entry] == [1, 2]
