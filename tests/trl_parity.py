"""The same batches through Unsloth's trainer and TRL's own, by one code.

    python tests/trl_parity.py FOLDER every|pairs

is TRL's side, in a process without Unsloth, kept in FOLDER/trl.pt; `patch/test_trl_parity.py` takes
Unsloth's side in its own and compares. Completions are a function of step, prompt and place in the
group, so both trainers get the same.
"""

import itertools
import sys
from pathlib import Path

import torch
from distributed_worker import fix_rollouts
from oracle import Recording
from transformers import TrainerCallback
from trl_trainer import build_trl_trainer, letters

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.penalties import KL_ESTIMATORS
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.objective.schedule import CosineSchedule

# Unsloth's tensors are wider by the prompts' padding, so that noise falls on other tokens where
# prompts differ in length: here they do not.
NO_NOISE = CosineSchedule(0.0, 0.0)
# Where Unsloth's GRPOConfig has other defaults than TRL's; and Adam would make of gradients that
# differ in their last digit around 0 steps that differ in all.
PINNED = dict(
    optim="sgd",
    learning_rate=0.05,
    weight_decay=0.0,
    lr_scheduler_type="constant",
    warmup_steps=0,
    epsilon_high=0.25,
    mask_truncated_completions=False,
)
EVEN = [{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(8)]
GUIDES = {
    "none": lambda: None,
    "branch": lambda: BranchGuide(threshold=1.2),
    "surprisal": lambda: TokenGuide(sigma=NO_NOISE),
    "causal": lambda: TokenGuide(norm="causal", sigma=NO_NOISE),
    "reference": lambda: BranchGuide(threshold=1.2, source="reference"),
    "random": lambda: RandomGuide(CosineSchedule(1.0, 1.0), CosineSchedule(0.2, 0.2)),
}
CAUSAL = ("none", "branch", "causal", "reference")
REVERSE = ("k2", "k3-is")
RUNS = {
    # name: (settings of GRPOConfig, of guided_kl)
    "accumulation": (dict(gradient_accumulation_steps=2), dict(guide=GUIDES["branch"])),
    "dapo, accumulation": (
        dict(gradient_accumulation_steps=2, loss_type="dapo"),
        dict(guide=GUIDES["reference"]),
    ),
    "dr_grpo, accumulation, k2": (
        # Unsloth takes "none" for dr_grpo, whatever is set.
        dict(gradient_accumulation_steps=2, loss_type="dr_grpo", scale_rewards="none"),
        dict(guide=GUIDES["surprisal"], kl_estimator="k2"),
    ),
    "off-policy": (
        dict(num_iterations=2, epsilon=0.05, use_bias_correction_kl=True),
        dict(guide=GUIDES["branch"], kl_estimator="k3-is"),
    ),
    "temperature": (dict(temperature=0.7), dict(guide=GUIDES["branch"], kl_estimator="forward-kl")),
    "adaptive": (
        dict(),
        dict(guide=lambda: AdaptiveGuide(BranchGuide(threshold=1.2), target=0.001)),
    ),
    "a rule": (dict(), dict(guide=GUIDES["branch"], advantages="rs-grpo")),
    "the KL in the reward": (dict(scale_rewards="none"), dict(kl_in="reward", log_entropy=True)),
    "sequence credit": (
        dict(loss_type="dr_grpo", scale_rewards="none"),
        dict(guide=GUIDES["reference"], kl_estimator="k2", credit="sequence"),
    ),
    "random": (dict(rows=EVEN), dict(guide=GUIDES["random"])),
}


def combinations():
    """Every (guide, penalty, loss type, credit), as far as they go together."""
    for guide, penalty in itertools.product(GUIDES, KL_ESTIMATORS):
        for loss, credit in itertools.product(LOSS_TYPES, ("token", "sequence")):
            if credit == "token" or (guide in CAUSAL and penalty in REVERSE):
                yield guide, penalty, loss, credit


def logged(values):
    """Of a row or of the trainer's lists: what both trainers must log alike."""
    ours = ("sage/", "kl/", "advantages/")
    return {
        name: value[-1] if isinstance(value, list) else value
        for name, value in values.items()
        if name.startswith(ours) or name in ("reward", "reward_std", "loss")
    }


def one_batch(trainer, name):
    """Loss, gradients and metrics of one micro-batch under one combination."""
    guide, penalty, loss_type, credit = name
    trainer.loss_type = trainer.args.loss_type = loss_type
    trainer.args.use_bias_correction_kl = penalty == "k3-is"
    trainer._metrics["train"].clear()
    trainer._step, trainer._buffered_inputs = 0, None
    trainer.model.train()
    trainer.model.zero_grad()
    guide = GUIDES[guide]()
    recording = guide and Recording(guide)
    rows = [trainer.train_dataset[i // 4] for i in range(8)]
    torch.manual_seed(0)  # of the shuffle
    with with_methods(trainer, recording, kl_estimator=penalty, credit=credit, log_entropy=True):
        inputs = trainer._prepare_inputs(rows)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
    named = trainer.model.named_parameters()
    batch = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    return {
        "loss": loss.item(),
        "gradients": {n: p.grad.clone() for n, p in named if p.requires_grad},
        "metrics": logged(trainer._metrics["train"]),
        "inputs": {key: inputs[key].clone() for key in batch},
        "log_guide": recording and recording.calls[0]["log_guide"],
    }


def run(trainer, options):
    """The rows, gradients by step and last weights of a training run."""
    gradients = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            named = trainer.model.named_parameters()
            gradients.append({n: p.grad.clone() for n, p in named if p.requires_grad})

    trainer.add_callback(Keep())
    with with_methods(trainer, **options | {"guide": options.get("guide", lambda: None)()}):
        trainer.train()
    rows = [logged(row) for row in trainer.state.log_history if "loss" in row]
    named = trainer.model.named_parameters()
    weights = {n: p.detach().clone() for n, p in named if p.requires_grad}
    return {"rows": rows, "gradients": [*gradients, weights]}


def everything(build, folder):
    """Combinations and runs of trainers that `build` makes."""
    result = {}
    for rows in (None, EVEN):
        settings = {} if rows is None else {"rows": rows}
        trainer = build(
            output_dir=str(folder),
            gradient_accumulation_steps=1,
            reward=letters,
            **PINNED | settings,
        )
        trainer.current_gradient_accumulation_steps = 1
        fix_rollouts(trainer)
        for name in combinations():
            if (name[0] == "random") == (rows is EVEN):
                result[name] = one_batch(trainer, name)
    for name, (settings, options) in RUNS.items():
        accumulation = settings.get("gradient_accumulation_steps", 1)
        trainer = build(
            output_dir=str(folder),
            reward=letters,
            max_steps=2,
            per_device_train_batch_size=8 // accumulation,
            **PINNED | {"gradient_accumulation_steps": 1} | settings,
        )
        fix_rollouts(trainer)
        result[name] = run(trainer, options)
    return result


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    torch.save(everything(build_trl_trainer, out / "run"), out / "trl.pt")
    assert "unsloth" not in sys.modules
