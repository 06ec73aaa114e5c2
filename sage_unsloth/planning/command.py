"""The command `plan`: whether an RL run fits a GPU, before anything is loaded."""

import argparse
from typing import Any

from sage_unsloth.planning.presets import CARDS


def add_plan(commands: Any) -> None:
    parser = commands.add_parser(
        "plan", help="how much memory an RL run needs and whether it fits on your GPU"
    )
    parser.add_argument(
        "--model",
        help="a preset, a folder or a hub id; without it, the table of all presets and GPUs",
    )
    *sizes, largest = CARDS
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help=f"memory of the GPU; {', '.join(sizes)}, {largest} and other whole numbers are "
        "nominal sizes, of which a GPU reports less (default: this machine's)",
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
    model = model_preset(options.model)
    memory = memory_of_card(options.memory)
    setup = plan_setup(model, memory)
    print(full_report(setup, model.name, memory, model.rl_steps))
    if memory is not None:
        check_fits(setup, memory)
    return 0
