"""Stage 2 on completions that are a function of step, prompt and place in the group, by either
backend and in any number of processes.

    python tests/fixed_rollouts.py FOLDER [NAME=VALUE ...]
    accelerate launch --config_file docs/accelerate/ddp.yaml --num_processes 2 \\
        tests/fixed_rollouts.py FOLDER [NAME=VALUE ...]

NAME=VALUE are settings of `RlvrConfig`, or `guide=none`, `stop=STEP`, in which the run is stopped
as by SIGTERM, and `resume=yes`, which then resumes it here. By TRL the process is one in which
Unsloth is not installed. accelerate does not split a model on a CPU, so FSDP is switched on here.
"""

import os
import random
import signal
import sys
from pathlib import Path

from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.runs.settings import parse_settings
from sage_unsloth.runs.stopping import Terminated
from sage_unsloth.trainers.backends import load_backend
from sage_unsloth.training.rlvr_config import RlvrConfig

BASE = Path(__file__).parents[1] / "data" / "arithmetic-base"
OWN = ("guide", "stop", "resume")
ROWS = [{"problem": f"What is {i} + {i + 1}?", "answer": str(2 * i + 1)} for i in range(2, 10)]
SETTINGS = dict(
    max_steps=2,
    prompts_per_step=2,
    num_generations=4,
    max_completion_length=12,
    learning_rate=1e-3,
    warmup_ratio=0.0,
    save_steps=1,
    preflight_prompts=0,
    sample_steps=0,
    rollouts="transformers",
)


def fix_rollouts():
    """Completions of 1 to 12 tokens, every second one ended by EOS."""
    import trl

    def single_turn(self, prompt_ids, *_, **__):
        size, step = self.num_generations, self.state.global_step
        first, rows = self.accelerator.process_index * len(prompt_ids), []
        for i, prompt in enumerate(prompt_ids, first):
            draw = random.Random(f"{step} {list(prompt)} {i % size}")
            ids = [draw.randrange(20, 300) for _ in range(draw.randint(1, 12))]
            rows.append([*ids[:-1], self.processing_class.eos_token_id] if i % 2 else ids)
        return rows, None

    trl.GRPOTrainer._generate_single_turn = single_turn


def half(completion_ids, **_):
    """A reward that the fixed completions of a group differ in."""
    return [float(len(ids) % 3) for ids in completion_ids]


def shard_on_a_cpu():
    """accelerate applies FSDP to accelerators only; PyTorch's own runs on gloo too."""
    from accelerate import state
    from accelerate.utils import DistributedType

    plain, plugins = state.AcceleratorState.__init__, []

    def init(self, *args, fsdp_plugin=None, **options):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **options)
        plugins.extend([fsdp_plugin] if fsdp_plugin is not None else [])
        if plugins:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = plugins[-1]

    state.AcceleratorState.__init__ = init


def main(folder, *given):
    """Train into `folder`."""
    import torch

    torch.set_num_threads(1)
    own = dict(text.split("=", 1) for text in given if text.split("=")[0] in OWN)
    rest = [text for text in given if text.split("=")[0] not in own]
    settings = SETTINGS | {"backend": "trl"} | parse_settings(rest, RlvrConfig())
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and not torch.cuda.is_available():
        shard_on_a_cpu()
    if settings["backend"] == "trl":
        import without_unsloth  # noqa: F401
    load_backend(settings["backend"])
    fix_rollouts()

    from transformers import TrainerCallback

    from sage_unsloth.training.rlvr_stage import rlvr

    class Stop(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            first = os.environ.get("RANK", "0") == "0"
            if first and state.global_step + 1 == int(own["stop"]):
                signal.raise_signal(signal.SIGTERM)

    def train(*callbacks):
        guide = None if own.get("guide") == "none" else BranchGuide(ratio=0.3, threshold=1.0)
        config = RlvrConfig(**settings)
        rlvr(config, BASE, ROWS, folder, guide, rewards=[half], callbacks=callbacks)

    try:
        train(*[Stop()] * ("stop" in own))
    except Terminated:
        if "resume" not in own:
            return 143
        train()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
