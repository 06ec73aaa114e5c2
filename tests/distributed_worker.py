"""One process of `test_distributed.py`: trains the tiny model for two steps in each of several ways and keeps what came out.

    torchrun --nproc-per-node 2 tests/distributed_worker.py FOLDER

The global batch is the same for any number of processes: what is sampled is a function of step, prompt and place in the group.
"""

import os
import random
import sys
from contextlib import ExitStack

import torch
from conftest import build_trainer
from transformers import TrainerCallback

from sage_unsloth.adaptive import AdaptiveGuide
from sage_unsloth.guides import BranchGuide, CosineSchedule, RandomGuide, TokenGuide
from sage_unsloth.patch import guided_kl

ALWAYS_0 = CosineSchedule(0.0, 0.0)
ROWS = 8  # of a step, over all processes: two prompts, four completions each


def branch():
    return BranchGuide(ratio=0.3, threshold=1.2)


CASES = {
    # name: (settings of GRPOConfig, of guided_kl)
    "no guide": (dict(), dict(log_entropy=True)),
    "branch, clipped": (dict(max_grad_norm=0.05), dict(guide=branch)),
    "token, dapo": (dict(loss_type="dapo"), dict(guide=lambda: TokenGuide(sigma=ALWAYS_0), log_entropy=True)),
    "branch, dr_grpo, two micro-batches, groups split": (dict(loss_type="dr_grpo", gradient_accumulation_steps=2), dict(guide=branch)),
    "branch, dapo, two micro-batches, groups split": (dict(loss_type="dapo", gradient_accumulation_steps=2), dict(guide=branch)),
    "branch, bnpo": (dict(loss_type="bnpo"), dict(guide=branch)),
    "forward-kl, dapo": (dict(loss_type="dapo"), dict(guide=branch, kl_estimator="forward-kl")),
    "sequence credit": (
        dict(loss_type="dr_grpo", scale_rewards="none", use_bias_correction_kl=True),
        dict(guide=lambda: BranchGuide(ratio=0.3, threshold=1.2, source="reference"), kl_estimator="k3-is", credit="sequence"),
    ),
    "adaptive": (dict(), dict(guide=lambda: AdaptiveGuide(guide=branch(), target=0.001))),
    "entropy mask": (dict(top_entropy_quantile=0.5), dict(guide=branch)),
    "random": (dict(), dict(guide=lambda: RandomGuide(epsilon=CosineSchedule(1.0, 1.0), sigma=CosineSchedule(0.2, 0.2)))),
}  # fmt: skip


class Kept(TrainerCallback):
    """The gradients that the optimizer sees, step by step."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradients.append({n: p.grad.clone() for n, p in trained(self.trainer).items()})


def trained(trainer):
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def fix_rollouts(trainer):
    """Completions by step, prompt and place in the group, 1 to 12 tokens with an <eos> behind some of them."""
    size, state = trainer.num_generations, trainer.state

    def single_turn(prompt_ids, *_, **__):
        first = trainer.accelerator.process_index * len(prompt_ids)
        rows = []
        for i, prompt in enumerate(prompt_ids, first):
            draw = random.Random(f"{trainer.state.global_step} {list(prompt)} {i % size}")
            ids = [draw.randrange(2, 40) for _ in range(draw.randint(1, 12))]
            rows.append([*ids[:-1], 0] if i % 2 else ids)
        return rows, None

    assert state is trainer.state
    trainer._generate_single_turn = single_turn


def run(name, folder, synchronise=True):
    """What one case leaves: logs, gradients by step, weights, and what the guide returned."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings, options = CASES[name]
    accumulation = settings.get("gradient_accumulation_steps", 1)
    trainer = build_trainer(
        str(folder), max_steps=2, per_device_train_batch_size=ROWS // processes // accumulation,
        **{"gradient_accumulation_steps": 1, **settings},
    )  # fmt: skip
    fix_rollouts(trainer)
    kept = Kept(trainer)
    trainer.add_callback(kept)
    options = dict(options)
    guide = options.pop("guide", lambda: None)()
    with ExitStack() as stack:
        stack.enter_context(guided_kl(trainer, guide, **options))
        trainer.train()
    return {
        "logs": trainer.state.log_history,
        "gradients": kept.gradients,
        "weights": {n: p.detach().clone() for n, p in trained(trainer).items()},
    }


def main(folder):
    from sage_unsloth.patch import load_unsloth

    load_unsloth()
    torch.set_num_threads(1)
    results = {name: run(name, f"{folder}/{i}") for i, name in enumerate(CASES)}
    torch.save(results, f"{folder}/rank{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
