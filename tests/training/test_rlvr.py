"""Stage 2 on the shipped base model, through the function that the quickstart, the command line and
the notebooks call.
"""

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import LoraSettings
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import recorded_guide
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics

BASE = data_folder() / BASE_MODEL
CONFIG = smoke_config()
RLVR = replace(CONFIG.rlvr, max_steps=4, save_steps=2, learning_rate=5e-3)
TRAIN = arithmetic.problems("train")


def by_length(completions, **_):
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


def adapter_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def merged(smoke_sft):
    return smoke_sft


@pytest.fixture(scope="module")
def whole_run(merged, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return rlvr(RLVR, merged, TRAIN, folder, TokenGuide()), folder


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
    from sage_unsloth.training import rlvr_stage as module

    monkeypatch.setattr(
        module, "load_policy", lambda *a, **k: pytest.fail("nothing is to be loaded")
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


@pytest.mark.long
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


def test_a_guide_is_written_down_alike_in_every_process():
    class Mine:
        def __init__(self, layers):
            self.layers, self.floor = layers, 0.5

    one, other = {0, 8}, {8, 0}
    assert str(one) != str(other)  # as the order of texts differs from process to process
    assert recorded_guide(Mine(one)) == recorded_guide(Mine(other))
    assert "[0, 8], 'floor': 0.5" in recorded_guide(Mine(one))


def test_long_rows_are_refused(merged, tmp_path):
    with pytest.raises(ValueError, match="max_prompt_length=5 tokens, but 220 of 220 do not"):
        rlvr(replace(RLVR, max_prompt_length=5), merged, TRAIN, tmp_path / "rl")
    rows = [dict(row) for row in arithmetic.problems("sft")[:4]]
    rows[2]["solution"] *= 6
    with pytest.raises(ValueError, match=r"row 2 ends in .* Raise max_length"):
        sft(CONFIG.sft, BASE, rows, tmp_path / "sft")


def test_killed_run_goes_on_to_the_same_weights(merged, whole_run, tmp_path, monkeypatch):
    """Stopped within step 3, after the checkpoint of step 2; a checkpoint cut short beside it is
    passed over.
    """
    from sage_unsloth.grading.reward import SolutionReward

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


@pytest.mark.long
def test_killed_in_the_second_pass_over_the_rows_goes_on_to_the_same_weights(
    merged, tmp_path, monkeypatch
):
    """Four rows are two steps; the checkpoint of step 3 is within the second pass."""
    from sage_unsloth.training import stage

    config = replace(RLVR, max_steps=5, save_steps=3, preflight_prompts=0)
    lively = {"rewards": [by_length]}  # so that every group teaches something
    expected = adapter_weights(rlvr(config, merged, TRAIN[:4], tmp_path / "whole", **lively))
    train = stage.run_trainer

    def stopped(trainer, *args, **kwargs):
        step = trainer.training_step

        def counted(*args, **kwargs):
            if trainer.state.global_step == 4:
                raise KeyboardInterrupt
            return step(*args, **kwargs)

        trainer.training_step = counted
        train(trainer, *args, **kwargs)

    monkeypatch.setattr("sage_unsloth.training.rlvr_stage.run_trainer", stopped)
    with pytest.raises(KeyboardInterrupt):
        rlvr(config, merged, TRAIN[:4], tmp_path / "killed", **lively)
    monkeypatch.undo()
    assert (tmp_path / "killed" / "checkpoints" / "checkpoint-3").exists()
    found = adapter_weights(rlvr(config, merged, TRAIN[:4], tmp_path / "killed", **lively))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_same_data_order_for_every_algorithm(merged, tmp_path, monkeypatch):
    from sage_unsloth.grading.reward import SolutionReward

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


def test_guide_without_kl_is_refused_before_anything_is_loaded(merged, tmp_path, monkeypatch):
    from sage_unsloth.training import rlvr_stage as module

    monkeypatch.setattr(
        module, "load_policy", lambda *a, **k: pytest.fail("nothing is to be loaded")
    )
    with pytest.raises(ValueError, match="beta must not be 0"):
        rlvr(replace(RLVR, beta=0.0), merged, TRAIN, tmp_path, BranchGuide())
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kl_estimator": "k4"}, r"one of k3, .*got 'k4'"),
        ({"kl_estimator": "k2", "beta": 0.0}, r"beta must not be 0 .*'k2'"),
    ],
)
def test_a_penalty_that_cannot_be_is_refused_by_the_config(change, message):
    with pytest.raises(ValueError, match=message):
        replace(RLVR, **change)


def test_settings_that_unsloth_would_change_reach_the_trainer(merged, tmp_path, monkeypatch):
    """Unsloth fills in None by loss type (DAPO: truncated completions masked, epsilon_high .28);
    ours are explicit.
    """
    from sage_unsloth.training import rlvr_stage as module

    seen = {}

    def stop(trainer, *args, **kwargs):
        seen["args"] = trainer.args
        raise InterruptedError

    monkeypatch.setattr(module, "run_trainer", stop)
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
    assert args.num_iterations == 1 and args.top_k == 0
    assert args.mask_truncated_completions is False
    assert args.scale_rewards == "group"
    assert args.gradient_accumulation_steps == 1


def test_every_other_setting_reaches_trainer_adapter_and_unsloth(merged, tmp_path, monkeypatch):
    """Values that are nobody's default, so that one that is dropped on the way is seen."""
    import os

    from sage_unsloth.training import rlvr_stage as module

    seen = {}

    def stop(trainer, *args, **kwargs):
        seen["trainer"] = trainer
        raise InterruptedError

    monkeypatch.setattr(module, "run_trainer", stop)
    lora = LoraSettings(rank=4, alpha=12, targets=("q_proj", "down_proj"))
    config = replace(
        RLVR,
        max_steps=20,
        micro_batch_size=2,
        learning_rate=3e-4,
        weight_decay=0.03,
        warmup_ratio=0.25,
        save_steps=7,
        seed=11,
        max_completion_length=33,
        recompute_logits=True,
        vllm_importance_sampling_correction=False,
        lora=lora,
        top_entropy_quantile=0.4,
    )
    with pytest.raises(InterruptedError):
        rlvr(config, merged, TRAIN, tmp_path)
    trainer, args = seen["trainer"], seen["trainer"].args
    for name in (
        "max_steps",
        "learning_rate",
        "weight_decay",
        "save_steps",
        "seed",
        "num_generations",
        "max_completion_length",
        "vllm_importance_sampling_correction",
        "top_entropy_quantile",
    ):
        assert getattr(args, name) == getattr(config, name), name
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert args.warmup_steps == 5 and args.lr_scheduler_type == "linear"
    # Unsloth's loss knows whole-completion weights too, which shrink long completions to nothing.
    assert args.vllm_importance_sampling_mode == "token_truncate"
    assert args.vllm_importance_sampling_clip_max == 2.0
    assert os.environ["UNSLOTH_GRPO_LOGPROB_RECOMPUTE"] == "1"
    adapter = trainer.model.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha, set(adapter.target_modules)) == (
        4,
        12,
        set(lora.targets),
    )
    with pytest.raises(InterruptedError):
        rlvr(replace(config, recompute_logits=False), merged, TRAIN, tmp_path / "kept")
    assert os.environ["UNSLOTH_GRPO_LOGPROB_RECOMPUTE"] == "0"


@pytest.mark.long
def test_the_reference_can_be_the_base_model(merged, tmp_path):
    """Training continues the SFT adapter; π_ref is the model below it, so the first KL is that
    of the SFT.
    """
    further = replace(CONFIG.sft, max_steps=4, warmup_steps=0, learning_rate=5e-3)
    model = sft(further, BASE, arithmetic.problems("sft"), tmp_path / "sft")
    config = replace(RLVR, max_steps=1, reference="base")
    adapter = tmp_path / "sft" / "adapter"
    rlvr(config, BASE, TRAIN, tmp_path / "base", BranchGuide(), adapter=adapter)
    rlvr(replace(config, reference="sft"), model, TRAIN, tmp_path / "rl", BranchGuide())
    against_base, against_sft = (read_metrics(tmp_path / name)[0] for name in ("base", "rl"))
    assert against_base["kl/ref_k3"] > 1e-3 and against_sft["kl/ref_k3"] < 1e-7
    assert against_base["reward"] == against_sft["reward"], "the same policy, the same completions"


def test_contradictory_references_are_refused(merged, tmp_path):
    adapter = merged.parent / "adapter"
    with pytest.raises(ValueError, match=r"got reference='base' with adapter=None"):
        rlvr(replace(RLVR, reference="base"), BASE, TRAIN, tmp_path)
    with pytest.raises(ValueError, match=r"got reference='sft' with adapter="):
        rlvr(RLVR, BASE, TRAIN, tmp_path, adapter=adapter)


def test_a_first_kl_that_is_not_zero_stops_the_run(merged, tmp_path, monkeypatch):
    """The worst case made real: a policy that is not its reference before the first step."""
    from sage_unsloth.training import rlvr_stage as module

    load = module.load_policy

    def with_noise(*args, **kwargs):
        model, tokenizer = load(*args, **kwargs)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model, tokenizer

    monkeypatch.setattr(module, "load_policy", with_noise)
    with pytest.raises(
        ValueError, match=r"policy and reference must be the same model, .* allowed 0.001"
    ):
        rlvr(RLVR, merged, TRAIN, tmp_path, BranchGuide())
    assert not (tmp_path / "adapter").exists()


def test_full_fine_tuning_trains_every_weight_against_a_copy_of_the_start(merged, tmp_path):
    from safetensors.torch import load_file

    config = replace(RLVR, max_steps=2, full_finetuning=True, learning_rate=1e-4)
    model = rlvr(config, merged, TRAIN, tmp_path, BranchGuide())
    assert model == tmp_path / "model"
    first, second = read_metrics(tmp_path)
    assert first["kl/ref_k3"] == 0 < second["kl/ref_k3"]
    before, after = (load_file(folder / "model.safetensors") for folder in (merged, model))
    assert all(not torch.equal(after[n], before[n]) for n in before if "proj.weight" in n)
    assert load_tokenizer(model).pad_token_id != load_tokenizer(model).eos_token_id


def test_smaller_micro_batches_train_the_same(merged, tmp_path):
    """For the "grpo" reduction, a mean over completions, only the order of the sums differs."""
    for name, size in (("whole", None), ("micro", 2)):
        config = replace(RLVR, max_steps=2, micro_batch_size=size)
        rlvr(config, merged, TRAIN, tmp_path / name)
    whole, micro = (adapter_weights(tmp_path / name / "adapter") for name in ("whole", "micro"))
    for name in whole:
        torch.testing.assert_close(micro[name], whole[name], rtol=0, atol=2e-5)


def test_completions_are_kept_with_their_grades(merged, tmp_path):
    config = replace(RLVR, max_steps=3, sample_steps=2)
    rlvr(config, merged, TRAIN, tmp_path)
    rows = read_jsonl(tmp_path / "completions.jsonl")
    assert [row["step"] for row in rows] == [1] * 8 + [2] * 8
    answers = {row["problem"]: row["answer"] for row in TRAIN}
    for row in rows:
        assert answers[row["prompt"]] == row["answer"]
        right = f"<SOLUTION>{row['answer']}</SOLUTION>" in row["completion"]
        assert row["grade"] == "correct" if right else row["grade"] != "correct"


@pytest.mark.long
def test_groups_without_a_signal_are_replaced_up_to_max_resamples(merged, tmp_path):
    """At every setting the trained completions are counted, kept and graded against their own
    prompts.
    """
    config = replace(RLVR, max_steps=2, prompts_per_step=4, num_generations=2, sample_steps=1)
    answers = {row["problem"]: row["answer"] for row in TRAIN}
    rows = {}
    for attempts in (0, 2):
        folder = tmp_path / str(attempts)
        rlvr(replace(config, max_resamples=attempts), merged, TRAIN, folder, BranchGuide())
        rows[attempts] = read_metrics(folder)
        kept = read_jsonl(folder / "completions.jsonl")
        assert all(answers[row["prompt"]] == row["answer"] for row in kept)
        for entry in rows[attempts]:
            of_step = [row for row in kept if row["step"] == entry["step"]]
            right = sum(row["grade"] == "correct" for row in of_step)
            assert len(of_step) == 8 and entry["reward/correct"] == right == entry["reward"] * 8
            assert (
                sum(entry[f"reward/{grade}"] for grade in ("wrong", "unparsable", "timed out"))
                == 8 - right
            )
    assert not any("sampling/resampled_groups" in entry for entry in rows[0])
    assert rows[0][0]["frac_reward_zero_std"] > 0, "a group must be dead for this to show anything"
    for entry in rows[2]:
        assert entry["sampling/dead_groups"] == entry["frac_reward_zero_std"]
        assert entry["sampling/resampled_groups"] <= 8
    assert rows[2][0]["sampling/resampled_groups"] >= 4 * rows[0][0]["frac_reward_zero_std"]


def test_the_run_says_where_it_started(merged, whole_run):
    run = json.loads((whole_run[1] / "run.json").read_text())
    assert run["model_path"] == str(merged)
    assert run["settings"]["model"].startswith("model ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_steps=0), "max_steps must be > 0, got 0"),
        (dict(num_generations=1), "num_generations must be >= 2 because"),
        (dict(beta=-0.1), "beta must be >= 0"),
        (dict(reference="model"), "reference must be one of sft, base, got 'model'"),
        (dict(prompts_per_step=2, micro_batch_size=3), r"\(2 prompts x 8 = 16\), got 3"),
        (dict(temperature=0.0), "temperature must be > 0"),
        (dict(loss_type="gpro"), "loss_type must be one of"),
        (dict(rollouts="sglang"), "rollouts must be one of"),
        (dict(top_p=1.5), r"top_p must be in \[0, 1\], got 1.5"),
        (dict(epsilon=-1.0), "epsilon must be in"),
        (dict(warmup_ratio=3.0), "warmup_ratio must be in"),
        (dict(preflight_prompts=-1), "preflight_prompts must be >= 0"),
        (dict(max_resamples=-1), "max_resamples must be >= 0, got -1"),
        (dict(top_entropy_quantile=0.0), r"top_entropy_quantile must be in \(0, 1\] .*got 0.0"),
        (dict(top_entropy_quantile=1.2), r"top_entropy_quantile must be in \(0, 1\] .*got 1.2"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RlvrConfig(**changes)


def test_a_gold_that_is_no_answer_is_refused_at_once(merged, tmp_path):
    rows = [*TRAIN[:3], {"problem": "1+1=?", "answer": "x_{1"}]
    with pytest.raises(ValueError, match=r"row 3 has 'x_\{1'"):
        rlvr(RLVR, merged, rows, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tracker_gets_our_metrics_too(merged, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "")  # so that what the run sets is undone
        monkeypatch.delenv(name)
    rlvr(replace(RLVR, max_steps=1, report_to="tensorboard"), merged, TRAIN, tmp_path / "run")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (row,) = read_metrics(tmp_path / "run")
    for name in ("reward/correct", "seconds", "kl/ref_k3", "sage/entropy"):
        (point,) = events.Scalars(f"train/{name}")
        assert (point.step, point.value) == (1, pytest.approx(row[name])), name


def test_wandb_is_offline_unless_its_mode_is_set(tmp_path, monkeypatch):
    from transformers.integrations import WandbCallback

    from sage_unsloth.training.stage import tracker_callbacks

    for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_PROJECT"):
        monkeypatch.setenv(name, "")
    for mode, expected in ((None, "offline"), ("disabled", "disabled")):
        monkeypatch.setenv("WANDB_MODE", mode or "")
        if mode is None:
            monkeypatch.delenv("WANDB_MODE")
        (callback,) = tracker_callbacks("wandb", tmp_path)
        assert isinstance(callback, WandbCallback) and os.environ["WANDB_MODE"] == expected


def test_two_processes_do_not_train_in_one_folder(merged, tmp_path):
    from sage_unsloth.runs.locks import exclusive_lock

    with exclusive_lock(tmp_path / "run"), pytest.raises(ValueError, match="one process at a time"):
        rlvr(RLVR, merged, TRAIN, tmp_path / "run")


def test_a_guide_that_prints_an_address_can_be_resumed():
    from sage_unsloth.training.rlvr_job import recorded_guide

    class Lift:
        def __init__(self, factor):
            self.factor = factor

    assert recorded_guide(Lift(2)) == recorded_guide(Lift(2)) != recorded_guide(Lift(3))
    assert recorded_guide(BranchGuide()) == repr(BranchGuide()) and recorded_guide(None) == "None"


def test_fewer_rows_than_a_step_takes_are_refused_before_anything_is_written(merged, tmp_path):
    config = replace(RLVR, prompts_per_step=4)
    message = r"prompts_per_step=4 rows, got 3. Give more rows, or prompts_per_step=3"
    with pytest.raises(ValueError, match=message):
        rlvr(config, merged, TRAIN[:3], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_result_is_left_where_the_trainer_took_no_step(merged, tmp_path, monkeypatch):
    """transformers ends such a run with a warning and no error."""
    from sage_unsloth.training import rlvr_job

    monkeypatch.setattr(rlvr_job, "check_fills_a_step", lambda *_: None)
    config = replace(RLVR, prompts_per_step=4)
    with pytest.raises(ValueError, match="but the trainer ended after 0, with 3 rows"):
        rlvr(config, merged, TRAIN[:3], tmp_path / "run")
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_run_at_step_28_without_its_checkpoints_is_refused(merged, whole_run, tmp_path):
    """The quickest such run: it was killed in step 4, with a checkpoint every 2 steps."""
    folder = shutil.copytree(whole_run[1], tmp_path / "run")
    shutil.rmtree(folder / "adapter")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match="4 steps and has none complete"):
        rlvr(RLVR, merged, TRAIN, folder, TokenGuide())
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_a_result_of_no_step_is_not_called_complete(merged, whole_run, tmp_path):
    folder = shutil.copytree(whole_run[1], tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(ValueError, match="a result needs training steps"):
        rlvr(RLVR, merged, TRAIN, folder, TokenGuide())
