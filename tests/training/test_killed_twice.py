"""Runs of several methods at once, by both backends: killed twice they end in the same bits as a
run that was left alone.

    python tests/training/test_killed_twice.py BACKEND FOLDER [CASE ...]
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

CASES = {
    "random": dict(
        advantages="maxrl",
        token_advantages="clip-cov,share=0.2",
        num_iterations=2,
        rehearsal_coef=0.5,
        rehearsal="forward-kl,samples=2,batch=2,problems=8",
        max_resamples=1,
        eval_steps=2,
        eval_samples=2,
        eval_rows=4,
    ),
    "none": dict(advantages="unlikeliness", kl_in="reward"),
    "adaptive": dict(credit="sequence", kl_estimator="k2", advantages="pkpo,k=2"),
    "token": dict(eval_steps=1, eval_samples=2, eval_rows=4, patience=3),
    "dropout": dict(rehearsal_coef=0.5, rehearsal="js,samples=2,batch=2,problems=8"),
}
ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize("backend", ["unsloth", "trl"])
def test_a_run_that_is_killed_twice_ends_as_one_that_was_left_alone(tmp_path, backend):
    """Every case in one process, which loads the backend and trains the SFT model once."""
    done = subprocess.run(
        [sys.executable, __file__, backend, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
    )
    assert done.returncode == 0, done.stderr[-4000:]


class Killed(BaseException):
    """What no code of a run can catch, as SIGKILL."""


def by_length(completions, **_):
    return [float(len(completion[0]["content"]) % 3 == 0) for completion in completions]


def main(backend, folder, cases):
    if backend == "trl":
        import without_unsloth  # noqa: F401
    from sage_unsloth.trainers.backends import load_backend

    load_backend(backend)

    import torch
    from safetensors.torch import load_file
    from same_run import differences, timeless_files
    from transformers import TrainerCallback

    from sage_unsloth.methods.adaptive import AdaptiveGuide
    from sage_unsloth.models.embedded import BASE_MODEL, data_folder
    from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
    from sage_unsloth.objective.schedule import CosineSchedule
    from sage_unsloth.problems import arithmetic
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.rlvr_stage import rlvr
    from sage_unsloth.training.sft_stage import sft

    class Kill(TrainerCallback):
        def __init__(self, step):
            self.step = step

        def on_step_end(self, args, state, control, **_):
            if state.global_step == self.step:
                raise Killed

    smoke = smoke_config()
    common = dict(max_steps=6, save_steps=2, learning_rate=5e-3, preflight_prompts=0)
    start = sft(smoke.sft, data_folder() / BASE_MODEL, arithmetic.problems("sft"), folder / "sft")

    def train(case, out, *callbacks):
        lora = replace(smoke.rlvr.lora, dropout=0.2 if case == "dropout" else 0.0)
        config = replace(smoke.rlvr, backend=backend, lora=lora, **common, **CASES[case])
        guide = {
            "random": RandomGuide(CosineSchedule(0.5, 0.5)),
            "none": None,
            "adaptive": AdaptiveGuide(BranchGuide(threshold=0.5), target=0.01),
            "token": TokenGuide(),
            "dropout": None,
        }[case]
        rows = arithmetic.problems("train")
        rewards = ["answer"] if config.eval_steps or config.rehearsal_coef else [by_length]
        return rlvr(config, start, rows, out, guide, rewards=rewards, callbacks=callbacks)

    for case in cases:
        whole = train(case, folder / case / "whole")
        for step in (3, 5):
            try:
                train(case, folder / case / "killed", Kill(step))
            except Killed:
                continue
            raise AssertionError(f"the run ended before it was killed at step {step}: {case}")
        killed = train(case, folder / case / "killed")
        expected, found = (load_file(out / "adapter_model.safetensors") for out in (whole, killed))
        assert max(w.abs().max() for name, w in expected.items() if "lora_B" in name) > 1e-4
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected), case
        metrics = [timeless_files(out.parent)["metrics.jsonl"] for out in (whole, killed)]
        assert not list(differences(*metrics, "metrics")), case


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:] or CASES))
