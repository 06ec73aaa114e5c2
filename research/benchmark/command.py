"""The command `python -m research.benchmark`."""

import argparse
from pathlib import Path

from research import command
from sage_unsloth.planning.presets import PAPER_BETA


def make_parser() -> argparse.ArgumentParser:
    parser = command.make_parser(
        "benchmark",
        "every algorithm over training seeds, with a verdict on each claim of the paper",
    )
    parser.add_argument(
        "--task",
        default="arithmetic",
        help="arithmetic or countdown (default: %(default)s)",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=[],
        metavar="NAME",
        help="rows of train --list, or all; grpo must be among them (default: the task's, which "
        "two cores train in two hours)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="COUNT",
        help="training seeds of each (default: the task's, 8)",
    )
    parser.add_argument(
        "--first-seed", type=int, default=1, help="the seeds count from here (default: %(default)s)"
    )
    parser.add_argument(
        "--grid-seeds",
        type=int,
        metavar="COUNT",
        help="how many of the seeds train the threshold x ratio grid (default: the task's; 0 for "
        "none)",
    )
    parser.add_argument(
        "--beta",
        type=float,
        help="KL coefficient of all algorithms that have a KL term (default: the paper's "
        f"{PAPER_BETA})",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes (default: one for each core, or one where there is a GPU)",
    )
    parser.add_argument(
        "--out",
        help="folder; the same command resumes, and takes more seeds and algorithms (default: "
        "runs/benchmark-TASK)",
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
    from research.benchmark.design import BenchmarkConfig, all_algorithms
    from research.benchmark.publish import publish
    from research.benchmark.run import benchmark
    from research.benchmark.tasks import get_task
    from research.benchmark.text import summary

    for name in ("seeds", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be >= 1; got {value}")
    count = options.seeds or get_task(options.task).num_seeds
    names = all_algorithms() if options.algorithms == ["all"] else options.algorithms
    config = BenchmarkConfig(
        task=options.task,
        algorithms=tuple(names),
        seeds=tuple(range(options.first_seed, options.first_seed + count)),
        grid_seeds=options.grid_seeds,
        beta=options.beta,
        smoke=options.smoke,
    )
    out = Path(options.out or f"runs/benchmark-{options.task}")
    done = publish(out, config) if options.report else benchmark(out, config, options.workers)
    print(f"\n{summary(done)}\n")
    print(f"Written to {out}: records.json, report.json, report.md, figures with their tables")
    print(
        f"Next: look at {out / 'report.md'}; completions are in {out / 'samples'}; more seeds or "
        "algorithms: the same command with them"
    )
    return 0
