"""The command `python -m research.frontier`."""

import argparse
from pathlib import Path

from research import command


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(
        "frontier",
        "pass@1 against pass@n: methods at several strengths over training seeds",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="NAME[:SETTING][=VALUES]",
        help="rows of train --list, each with values of its strength, split by commas: grpo=0.4 "
        "for β, grpo:max_steps=25 for another number among the settings of RLVR, pkpo=4 for its "
        "rule's k; grpo=0.05 must be among them (default: grpo, its reverse KL, three guides "
        "and three other rules, five hours on two cores)",
    )
    parser.add_argument(
        "--reduced",
        action="store_true",
        help="fewer methods, strengths and seeds by default: an hour on two cores",
    )
    parser.add_argument(
        "--seeds", type=int, metavar="COUNT", help="training seeds of each point (default: 8)"
    )
    parser.add_argument(
        "--first-seed",
        type=int,
        help="the seeds count from here (default: 101 for the pilot, 201 for fresh problems)",
    )
    parser.add_argument(
        "--problems",
        default="pilot",
        help="pilot, to choose strengths, or fresh, for a verdict on what was chosen before "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--task",
        default="arithmetic",
        help="arithmetic, countdown, or another task of benchmark (default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes (default: one for each core, or one where there is a GPU)",
    )
    parser.add_argument(
        "--out",
        help="folder; the same command resumes, and takes more methods and seeds (default: "
        "runs/frontier-TASK-PROBLEMS)",
    )
    parser.add_argument(
        "--report", action="store_true", help="only report on the seeds that are complete"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="two steps of each, and only shows that everything works",
    )
    parser.set_defaults(act=_act)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """As `sage_unsloth.__main__.main`."""
    return command.run_command(make_parser(), arguments)


def _act(options: argparse.Namespace) -> int:
    from research.frontier import design
    from research.frontier.publish import publish
    from research.frontier.run import frontier
    from research.frontier.text import summary

    for name in ("seeds", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be >= 1; got {value}")
    if options.problems not in design.PROBLEMS:
        raise ValueError(
            f"--problems must be one of {', '.join(design.PROBLEMS)}; got {options.problems!r}"
        )
    count = options.seeds or (design.REDUCED_SEEDS if options.reduced else design.NUM_SEEDS)
    config = design.FrontierConfig(
        task=options.task,
        problems=options.problems,
        methods=tuple(options.methods or (design.REDUCED if options.reduced else design.DEFAULT)),
        seeds=design.seeds(options.problems, count, options.first_seed),
        smoke=options.smoke,
    )
    out = Path(options.out or f"runs/frontier-{options.task}-{options.problems}")
    done = publish(out, config) if options.report else frontier(out, config, options.workers)
    print(f"\n{summary(done)}\n")
    print(f"Written to {out}: records.json, report.json, report.md, figures with their tables")
    print(
        f"Next: look at {out / 'report.md'}; choose strengths on the pilot's problems, and run "
        "them once with --problems fresh"
    )
    return 0
