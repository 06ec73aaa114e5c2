"""`rlvr` with rollouts by the real vLLM on a CPU, beside the policy, on Unsloth's own path.

The oracle scores what the engine drew in float64 with the adapter as it is (`selftest`).
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from real_engine import BASE, make_adapter

from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training import rlvr_stage
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.stage import read_metrics

pytestmark = [pytest.mark.vllm_cpu, pytest.mark.with_unsloth]

TRAIN = arithmetic.problems("train")
CONFIG = RlvrConfig(
    rollouts="vllm",
    max_steps=4,
    prompts_per_step=2,
    num_generations=4,
    max_completion_length=24,
    max_prompt_length=64,
    learning_rate=1e-2,
    warmup_ratio=0.0,
    min_p=0.0,
    beta=0.05,
    preflight_prompts=0,
    save_steps=2,
)


def by_length(completions, **_):
    """A reward that differs in each group, so that every step moves the weights."""
    return [float(len(str(completion)) % 5) for completion in completions]


def watched(monkeypatch, look):
    """Each step's batch is shown to `look(trainer, inputs)` before the loss is computed."""
    make, trainers = rlvr_stage.make_trainer, []

    def made(*args, **kwargs):
        trainer = make(*args, **kwargs)
        compute_loss = trainer.compute_loss

        def loss(model, inputs, *more, **options):
            look(trainer, inputs)
            return compute_loss(model, inputs, *more, **options)

        trainer.compute_loss = loss
        trainers.append(trainer)
        return trainer

    monkeypatch.setattr(rlvr_stage, "make_trainer", made)
    return trainers


def pad_of(trainer):
    return trainer.processing_class.pad_token_id


def test_engine_and_trainer_agree_after_each_update_and_a_run_resumes(monkeypatch, tmp_path):
    """From an adapter whose B is not 0, and whose alpha is 2 r: an engine that changed the policy
    would be seen in the second step.
    """
    from sage_unsloth.selftest.rollouts import distances

    start = make_adapter(tmp_path / "start", CONFIG.lora.rank, 1, std=0.04)
    config = replace(CONFIG, reference="base")
    steps = []
    watched(monkeypatch, lambda t, inputs: steps.append(distances(t.model, inputs, pad_of(t))))

    def run(folder):
        return rlvr_stage.rlvr(
            config, BASE, TRAIN, folder, BranchGuide(), adapter=start, rewards=[by_length]
        )

    monkeypatch.chdir(tmp_path)
    whole = run(tmp_path / "whole")
    assert len(steps) == 4
    for step in steps:
        assert step["policy"] < 1e-4 < 0.02 < step["base"]
    assert len({round(step["base"], 4) for step in steps}) == 4, "the weights moved"

    class Stop(Exception):
        pass

    def stop_at_the_fourth(trainer, inputs):
        if trainer.state.global_step == 3:
            raise Stop

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patched:
        watched(patched, stop_at_the_fourth)
        with pytest.raises(Stop):
            run(folder)
    del steps[:]
    again = run(folder)
    assert len(steps) == 2, "from the checkpoint behind the second step"
    assert all(step["policy"] < 1e-4 for step in steps)
    assert [row["step"] for row in read_metrics(folder)] == [1, 2, 3, 4]
    assert not Path("vllm_gen_lora").exists(), "nothing is left in the working directory"
    names = [file.name for file in sorted(whole.glob("adapter*"))]
    assert names == [file.name for file in sorted(again.glob("adapter*"))]


def test_importance_ratios_are_the_probability_that_min_p_kept(monkeypatch, tmp_path):
    """vLLM says the probability that a token was drawn with; the trainer's is the model's own. So
    their ratio is the share of probability that is left by min-p and by the pad token.
    """
    import torch

    from sage_unsloth.selftest.decoder import decoder_of
    from sage_unsloth.selftest.oracle import completion_rows, score_batch, to_completion_layout

    found = []

    def look(trainer, inputs):
        decoder = decoder_of(trainer.model)
        mask = inputs["completion_mask"].bool()
        with torch.no_grad():
            logps, _ = score_batch(decoder.logits, inputs)
            kept = torch.zeros_like(logps)
            for row, (prompt, completion) in enumerate(completion_rows(inputs)):
                logits = decoder.logits(torch.cat([prompt, completion]))[len(prompt) - 1 : -1]
                p = logits.softmax(-1)
                allowed = p.clone()
                allowed[:, pad_of(trainer)] = 0.0
                allowed[allowed < config.min_p * allowed.max(-1, keepdim=True).values] = 0.0
                kept[row, : len(completion)] = allowed.sum(-1)
        sampled = inputs["sampling_per_token_logps"]
        if sampled.shape != mask.shape:
            sampled = to_completion_layout(sampled, inputs)
        ratios = (logps - sampled).exp()[mask]
        assert torch.allclose(ratios, kept[mask], atol=2e-4)
        found.append((ratios.min().item(), ratios.max().item()))

    config = replace(CONFIG, min_p=0.05, max_steps=3)
    watched(monkeypatch, look)
    rlvr_stage.rlvr(config, BASE, TRAIN, tmp_path / "run", rewards=[by_length])
    assert len(found) == 3
    for smallest, largest in found:
        # What min-p leaves out is less than min_p times the likeliest, for each of 327 tokens.
        assert 0.3 < smallest < 0.999 and largest <= 1 + 2e-4


def test_settings_are_checked_on_real_parameters_and_standby_is_passed_on(monkeypatch, tmp_path):
    from vllm import SamplingParams

    from sage_unsloth.sampling.engine_choice import RolloutError

    config = replace(CONFIG, min_p=0.05, max_steps=2, engine_arguments=("max_num_seqs=4",))
    calls, told = [], []

    def look(trainer, inputs):
        assert trainer.vllm_generation.enable_sleep_mode

    start = rlvr_stage.start_engine

    def started(settings, model, *more):
        start(settings, model, *more)
        engine = model.vllm_engine
        assert engine.llm_engine.vllm_config.scheduler_config.max_num_seqs == 4
        # On a processor sleeping is only logged, and `LLM` refuses to be asked for it.
        engine.llm_engine.vllm_config.model_config.enable_sleep_mode = True
        for name in ("sleep", "wake_up", "generate"):
            kept(engine, name)

    def kept(engine, name):
        function = getattr(engine, name)

        def called(*args, **options):
            calls.append(name)
            if name == "generate":
                told.append(options.get("sampling_params", args[1] if len(args) > 1 else None))
            return function(*args, **options)

        setattr(engine, name, called)

    monkeypatch.setattr(rlvr_stage, "start_engine", started)
    trainers = watched(monkeypatch, look)
    rlvr_stage.rlvr(config, BASE, TRAIN, tmp_path / "run", rewards=[by_length])
    (trainer,) = trainers
    assert calls.count("generate") == 2
    for i, name in enumerate(calls):
        if name == "generate":
            assert "wake_up" in calls[:i] and "sleep" in calls[i + 1 :]
    assert all(isinstance(one, SamplingParams) for one in told)
    assert told[0].min_p == 0.05 and told[0].max_tokens == 24
    assert told[0].logit_bias == {pad_of(trainer): -100.0}
    wrong = told[0].clone()
    wrong.min_p = 0.0
    with pytest.raises(RolloutError, match=r"'min_p': 0.0.*, expected .*'min_p': 0.05"):
        trainer.vllm_generation.llm.generate([{"prompt_token_ids": [5]}], wrong)


def test_preflight_dynamic_sampling_a_teacher_and_a_held_out_curve(tmp_path):
    config = replace(
        CONFIG,
        max_steps=2,
        min_p=0.01,
        max_resamples=2,
        teacher=str(BASE),
        preflight_prompts=4,
        eval_steps=1,
        eval_samples=2,
        eval_rows=4,
    )
    folder = tmp_path / "run"
    rlvr_stage.rlvr(config, BASE, TRAIN, folder, TeacherGuide(), force=True)
    rows = read_metrics(folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["sampling/resampled_groups"] >= 0 for row in rows)
    assert all(abs(row["sage/guide_mean"]) < 10 for row in rows)
    assert abs(rows[0]["kl/ref_k3"]) < 1e-6
    drawn = read_jsonl(folder / "preflight.jsonl")
    assert len(drawn) == 4 * config.num_generations
    assert len(list((folder / "held-out").rglob("*.jsonl"))) >= 2


OLDER = """
import torch
torch.cpu._is_avx512_supported = torch.cpu._is_avx512_bf16_supported = lambda: False
import vllm.platforms
vllm.platforms.current_platform.import_kernels()
from sage_unsloth.trainers.loading import load_unsloth
load_unsloth()
from real_engine import BASE, CONFIG, requests
from sage_unsloth.sampling.vllm_engine import VllmEngine
engine = VllmEngine(BASE, max_length=128)
print("DREW", len(engine.draw(*requests(engine.tokenizer, 1, 2), CONFIG)))
"""


def test_unsloth_is_imported_beside_the_kernels_of_an_older_processor():
    """Those for AVX2: without the guard a second library of kernels ends the process."""
    folder = Path(__file__).parent
    paths = [str(folder), str(folder.parent), str(folder.parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", OLDER],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "DREW 2" in done.stdout, done.stderr[-3000:]
