"""The command `plan`: whether an RL run fits a card, before anything is loaded."""

import argparse
from typing import Any

from sage_unsloth.planning.presets import CARDS

SETUP_OPTIONS = (
    "prompts_per_step",
    "num_generations",
    "max_prompt_length",
    "max_completion_length",
    "micro_batch",
    "lora_rank",
)
"""Fields of `Setup` that are options of the same name."""


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="what an RL run needs and whether it fits, before anything is loaded"
    )
    parser.add_argument(
        "--model",
        help="a preset, a folder or a hub id; without it, the table of all presets and cards",
    )
    *sizes, largest = CARDS
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help=f"memory of the card; {', '.join(sizes)}, {largest} and other whole numbers are the "
        "size on its box, of which it reports less (default: this machine's)",
    )
    parser.add_argument("--steps", type=int, help="optimizer steps, in place of the preset's")
    parser.add_argument("--rows", type=int, help="rows of the training data")
    parser.add_argument(
        "--first-step-seconds", type=float, help="measured, for the time of the run"
    )
    for name in SETUP_OPTIONS:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, help="in place of the preset's")
    parser.add_argument(
        "--weight-bits", type=int, choices=(4, 16, 32), help="in place of the preset's"
    )
    parser.add_argument(
        "--rollouts", choices=("vllm", "transformers"), help="in place of the preset's"
    )
    parser.set_defaults(act=_plan)


def _plan(options: argparse.Namespace) -> int:
    from sage_unsloth.figures import show_table
    from sage_unsloth.planning.fitting import check_fits, memory_of_card, plan_setup
    from sage_unsloth.planning.plan import full_report, what_fits
    from sage_unsloth.planning.presets import model_preset

    if options.model is None:
        show_table(what_fits())
        return 0
    changes = {name: getattr(options, name) for name in (*SETUP_OPTIONS, "weight_bits")}
    if options.rollouts is not None:
        changes["use_vllm"] = options.rollouts == "vllm"
    model = model_preset(options.model)
    memory = memory_of_card(options.memory)
    setup = plan_setup(model, memory, **changes)
    steps = model.rl_steps if options.steps is None else options.steps
    print(full_report(setup, model.name, memory, steps, options.rows, options.first_step_seconds))
    if memory is not None:
        check_fits(setup, memory)
    return 0
