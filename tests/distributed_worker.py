"""One process of `test_distributed.py`: trains in several ways and keeps what came out.

    torchrun --nproc-per-node 2 tests/distributed_worker.py FOLDER

The tiny model's global batch is the same for any number of processes: what is sampled is a function
of step, prompt and place in the group.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch
from conftest import LETTERS, build_trainer
from my_own_code import Lift
from oracle import Recording
from transformers import TrainerCallback

from sage_unsloth import __main__
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.reward_functions import get_rewards
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.prompts import PromptFormat
from sage_unsloth.trainers.loading import load_unsloth
from sage_unsloth.trainers.trainer_names import ContractError

ROWS = 8  # of a step, over all processes: two prompts, four completions each
TWO = dict(gradient_accumulation_steps=2)
OWN = "my_own_code:"
TAGS = PromptFormat(system=None, reasoning=None, solution=("?=", "=?"))


def branch(**settings):
    return BranchGuide(ratio=0.3, threshold=1.2, **settings)


def always(value):
    return CosineSchedule(value, value)


CASES = {
    # name: (settings of GRPOConfig, of guided_kl)
    "no guide": (dict(), dict(log_entropy=True)),
    "branch, clipped": (dict(max_grad_norm=0.05), dict(guide=branch)),
    "token": (dict(loss_type="dapo"), dict(guide=lambda: TokenGuide(sigma=always(0.0)))),
    "dr_grpo, two micro-batches": (dict(loss_type="dr_grpo", **TWO), dict(guide=branch)),
    "forward-kl, bnpo, two micro-batches": (
        dict(loss_type="bnpo", **TWO),
        dict(guide=branch, kl_estimator="forward-kl"),
    ),
    "sequence credit": (
        dict(loss_type="dr_grpo", scale_rewards="none", use_bias_correction_kl=True),
        dict(guide=lambda: branch(source="reference"), kl_estimator="k3-is", credit="sequence"),
    ),
    "adaptive": (dict(), dict(guide=lambda: AdaptiveGuide(guide=branch(), target=0.001))),
    "a user's reward, verifier, rule and guide": (
        dict(own=True, loss_type="dr_grpo"),
        dict(guide=Lift, advantages=f"{OWN}surprising,lift=0.3"),
    ),
    "random": (dict(), dict(guide=lambda: Recording(RandomGuide(always(1.0), always(0.2))))),
}
STAGE = (
    "max_steps=4", "save_steps=2", "prompts_per_step=2", "num_generations=2", "preflight_prompts=2",
    "max_completion_length=24", "sample_steps=1", "eval_steps=2", "eval_rows=4", "eval_samples=2",
)  # fmt: skip


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


def fix_rollouts(trainer, tagged=False):
    """Completions by step, prompt and place in the group: 1 to 12 tokens, every second one ended by
    <eos>; on request with the answer's tags around the first letters.
    """
    size = trainer.num_generations
    opened, closed = ([2 + LETTERS.index(c) for c in tag] for tag in TAGS.solution)

    def single_turn(prompt_ids, *_, **__):
        rows, first = [], trainer.accelerator.process_index * len(prompt_ids)
        for i, prompt in enumerate(prompt_ids, first):
            draw = random.Random(f"{trainer.state.global_step} {list(prompt)} {i % size}")
            ids = [draw.randrange(2, 40) for _ in range(draw.randint(1, 12))]
            if tagged:
                ids = [*opened, *ids[:2], *closed, *ids[2:6]]
            rows.append([*ids[:-1], 0] if i % 2 else ids)
        return rows, None

    trainer._generate_single_turn = single_turn


def run(name, folder):
    """What one case leaves: logs, gradients by step, weights, and what a recorded guide
    returned.
    """
    settings, options = CASES[name]
    share = ROWS // int(os.environ.get("WORLD_SIZE", "1"))
    accumulation = settings.get("gradient_accumulation_steps", 1)
    settings = {"gradient_accumulation_steps": 1, "max_steps": 2} | settings
    own = settings.pop("own", False)
    with Grader(checker=get_verifier(f"{OWN}first_is_later"), prompt=TAGS) as grader:
        if own:
            rewards = get_rewards(["answer", f"{OWN}vowels=0.5"])
            total = TotalReward(rewards, grader, 60.0)
            settings |= {"reward": total.functions, "reward_weights": total.weights}
            settings["columns"] = lambda i: {"answer": LETTERS[i % 26], "level": i % 3}
        trainer = build_trainer(
            str(folder), per_device_train_batch_size=share // accumulation, **settings
        )
        fix_rollouts(trainer, tagged=own)
        return train(trainer, options)


def train(trainer, options):
    """`run` with a trainer."""
    kept = Kept(trainer)
    trainer.add_callback(kept)
    guide = options.get("guide", lambda: None)()
    with with_methods(trainer, **(options | {"guide": guide})):
        trainer.train()
    calls = [
        (call["log_guide"], call["signals"].mask.bool()) for call in getattr(guide, "calls", ())
    ]
    return {
        "logs": trainer.state.log_history,
        "gradients": kept.gradients,
        "weights": {n: p.detach().clone() for n, p in trained(trainer).items()},
        "guide": calls,
    }


def unaveraged(folder):
    """The message of a run without Unsloth's averaging of gradients."""
    rl = sys.modules["unsloth.models.rl"]
    average = rl._unsloth_average_gradients
    rl._unsloth_average_gradients = lambda ddp: None
    try:
        run("no guide", folder)
    except ContractError as error:
        return str(error)
    finally:
        rl._unsloth_average_gradients = average


def stage(folder):
    """The real command in every process: once as a whole; once with SIGTERM for one process in the
    third step, and started again.
    """

    def train(out):
        return __main__.main(
            [
                "train",
                "--algorithm",
                "sage-branch",
                "--from",
                "arithmetic-base",
                "--out",
                f"{folder}/{out}",
                *("--reward", "answer", "--reward", f"{OWN}digits=0.1"),
                *("--verifier", f"{OWN}same_text"),
                "--force",  # what few prompts the preflight sees are all failed
                "--set",
                *STAGE,
            ]
        )

    def stopped(self, signals, *, step, **time):
        if step == 2 and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        return plain(self, signals, step=step, **time)

    codes, plain = [train("whole")], BranchGuide.log_guide
    BranchGuide.log_guide = stopped
    codes.append(train("resumed"))
    BranchGuide.log_guide = plain
    return [*codes, train("resumed"), train("resumed")]


def main(folder):
    load_unsloth()
    torch.set_num_threads(1)
    results = {name: run(name, f"{folder}/{i}") for i, name in enumerate(CASES)}
    results["unaveraged"] = unaveraged(f"{folder}/unaveraged")
    results["stage"] = stage(folder)
    torch.save(results, Path(folder) / f"rank{os.environ.get('RANK', '0')}.pt")


if __name__ == "__main__":
    main(sys.argv[1])
