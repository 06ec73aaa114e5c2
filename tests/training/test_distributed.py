"""Two processes, started by the real torchrun, take the step that one process takes on the same
global batch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_worker import CASES, STAGE, run
from oracle import WHOLE_BATCH_LOSSES
from safetensors.torch import load_file, save_file

from sage_unsloth.methods.composed import with_methods
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.runs.checkpoints import last_checkpoint
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rlvr_checks import check_processes
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.stage import read_metrics, run_settings

WORKER = Path(__file__).parents[1] / "distributed_worker.py"
OF_THE_CLOCK = {"step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second"}
SAME = [
    name
    for name, (settings, _) in CASES.items()
    if name != "random" and (settings.get("loss_type") != "bnpo" or "bnpo" in WHOLE_BATCH_LOSSES)
]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """(what each of the two processes keeps, their folder)."""
    folder = tmp_path_factory.mktemp("two")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--local-addr",
        "127.0.0.1",
        str(WORKER),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "output").write_text(done.stdout)
    return [torch.load(folder / f"rank{i}.pt") for i in range(2)], folder


@pytest.mark.long
@pytest.mark.parametrize("name", SAME)
def test_two_processes_take_the_step_of_one(both, unsloth_module, tmp_path, name):
    first, second = (results[name] for results in both[0])
    alone = run(name, tmp_path)
    assert len(alone["gradients"]) == 2
    for ours, other, expected in zip(
        first["gradients"], second["gradients"], alone["gradients"], strict=True
    ):
        largest = max(g.abs().max().item() for g in expected.values())
        assert largest > 1e-3
        for key, gradient in expected.items():
            torch.testing.assert_close(ours[key], gradient, rtol=1e-4, atol=1e-5 * largest)
            assert torch.equal(ours[key], other[key])
    for key, weight in alone["weights"].items():
        # A step of AdamW is of the size of the learning rate, 5e-3, even where the gradient is
        # nearly 0.
        torch.testing.assert_close(first["weights"][key], weight, rtol=0, atol=2e-4)
        assert torch.equal(first["weights"][key], second["weights"][key])
    for ours, expected in zip(first["logs"], alone["logs"], strict=True):
        assert ours.keys() == expected.keys()
        for metric in ours.keys() - OF_THE_CLOCK:
            assert float(ours[metric]) == pytest.approx(
                float(expected[metric]), rel=1e-3, abs=1e-5
            ), metric


@pytest.mark.long
def test_noise_is_of_each_process_and_metrics_are_of_both(both):
    first, second = (results["random"] for results in both[0])
    values = []
    for step, (one, other) in enumerate(zip(first["guide"], second["guide"], strict=True)):
        q = [log_guide[mask].exp() for log_guide, mask in (one, other)]
        length = min(map(len, q))
        values.append(q[0][:length])
        assert not torch.allclose(q[0][:length], q[1][:length])
        pooled = torch.cat(q)
        for logs in (first["logs"][step], second["logs"][step]):
            assert float(logs["sage/guide_mean"]) == pytest.approx(pooled.mean().item(), rel=1e-4)
            assert float(logs["sage/guide_min"]) == pytest.approx(pooled.min().item(), rel=1e-4)
            assert float(logs["sage/guide_max"]) == pytest.approx(pooled.max().item(), rel=1e-4)
    assert len(values) == 2


@pytest.mark.long
def test_the_command_under_torchrun(both):
    """The first process writes, all completions count; SIGTERM for one ends both, and the run goes
    on to the same weights.
    """
    results, folder = both
    assert [result["stage"] for result in results] == [[0, 143, 0, 0]] * 2
    whole, resumed = folder / "whole", folder / "resumed"
    assert json.loads((whole / "run.json").read_text())["settings"]["processes"] == 2
    before, *rows = read_jsonl(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    settings = dict(text.split("=") for text in STAGE)
    completions = int(settings["prompts_per_step"]) * int(settings["num_generations"])
    kept = read_jsonl(whole / "completions.jsonl")
    assert len(kept) == 4 * completions
    for row in rows:
        graded = {k: v for k, v in row.items() if k.startswith("reward/") and "digits" not in k}
        assert sum(graded.values()) == completions
        sampled = [one for one in kept if one["step"] == row["step"]]
        own = [sum(c.isdigit() for c in one["completion"]) / 10 for one in sampled]
        assert [one["rewards"]["digits"] for one in sampled] == own
        assert row["reward/digits"] == pytest.approx(sum(own) / completions), "of both processes"
        assert {one["grader"].split()[0] for one in sampled} == {"my_own_code:same_text"}
        right = sum(one["grade"] == "correct" for one in sampled)
        assert row["reward"] == pytest.approx((right + 0.1 * sum(own)) / completions, abs=1e-5)
    assert len({row["prompt"] for row in kept if row["step"] == 1}) == 2
    weights, again = (
        load_file(f / "adapter" / "adapter_model.safetensors") for f in (whole, resumed)
    )
    assert any(weight.abs().max() > 0 for key, weight in weights.items() if "lora_B" in key)
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    assert not (whole / "checkpoints").exists()
    curve = [row["eval/pass@1"] for row in (before, *rows) if "eval/pass@1" in row]
    assert before["step"] == 0 and len(curve) == 3, "before, after step 2, after step 4"
    again = [row["eval/pass@1"] for row in read_metrics(resumed, first=0) if "eval/pass@1" in row]
    assert again == curve
    assert len(read_jsonl(whole / "held-out" / "step-000004.jsonl")) == 4 * 2
    assert (whole / "best" / "adapter_model.safetensors").is_file()
    assert (folder / "output").read_text().count("Written to") == 3


def test_what_several_processes_cannot_do_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_processes(RlvrConfig(prompts_per_step=2))
    for settings, message in (
        (dict(num_generations=3), "divisible by the number of processes"),
        (dict(prompts_per_step=2, micro_batch_size=16), "share of each by micro_batch_size"),
        (
            dict(prompts_per_step=3, credit="sequence", kl_estimator="k3-is"),
            "needs whole prompts",
        ),
        (dict(max_resamples=1), "need max_resamples=0"),
        (dict(rollouts="vllm"), "rollouts by transformers, got"),
    ):
        with pytest.raises(ValueError, match=message):
            check_processes(RlvrConfig(**settings))
    with pytest.raises(ValueError, match="SFT runs in one process, got WORLD_SIZE=2"):
        run_settings("sft", RlvrConfig(), "data/arithmetic-base", [])
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_processes(RlvrConfig(max_resamples=1, num_generations=3))


@pytest.mark.long
def test_gradients_of_their_own_are_refused(both):
    """Without Unsloth's averaging each process would train a model of its own."""
    for results in both[0]:
        assert "averaged over the processes before each optimizer step" in results["unaveraged"]


@pytest.mark.long
def test_processes_that_nothing_joins_are_refused(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ValueError, match="NO with 1 of WORLD_SIZE=2 processes"),
        guided_kl(trainer),
    ):
        pass


@pytest.mark.long
def test_sequence_credit_needs_whole_groups_in_a_process(make_trainer):
    trainer = make_trainer(
        per_device_train_batch_size=4, gradient_accumulation_steps=1, use_bias_correction_kl=True
    )
    trainer.args.per_device_train_batch_size = 2
    with pytest.raises(ValueError, match="in one process: per_device_train_batch_size"):
        with_methods(trainer, kl_estimator="k3-is", credit="sequence").__enter__()
    trainer.args.per_device_train_batch_size = 4
    with with_methods(trainer, kl_estimator="k3-is", credit="sequence"):
        pass


def test_a_checkpoint_of_several_processes_needs_each_random_state(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    checkpoint = tmp_path / "checkpoint-3"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, checkpoint / "adapter_model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        torch.save({}, checkpoint / name)
    assert last_checkpoint(tmp_path) is None
    torch.save({}, checkpoint / "rng_state_1.pth")
    assert last_checkpoint(tmp_path) == checkpoint
    os.unlink(checkpoint / "rng_state_0.pth")
    assert last_checkpoint(tmp_path) is None
