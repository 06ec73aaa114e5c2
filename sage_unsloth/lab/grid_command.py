"""The command `grid`."""

import argparse
from dataclasses import replace
from typing import Any


def add_grid(commands: Any) -> None:
    parser = commands.add_parser(
        "grid", help="threshold x ratio of the Branch guide on the embedded task, beside plain GRPO"
    )
    parser.add_argument(
        "--out",
        default="runs/grid",
        help="folder; the same command resumes, and takes cells that are there (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--thresholds",
        type=float,
        nargs="+",
        default=[0.8, 1.2, 2.0],
        help="nats (default: the paper's, %(default)s)",
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.1, 0.3, 0.5],
        help="per nat (default: the paper's, %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[3407],
        help="training seeds of every cell (default: %(default)s)",
    )
    parser.add_argument(
        "--floor-seeds",
        type=int,
        default=3,
        metavar="COUNT",
        help="training seeds of plain GRPO, the cells' own and more: its spread is the noise "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each run (default: the quickstart's 100)"
    )
    parser.add_argument(
        "--n", type=int, help="samples of each problem (default: the quickstart's 64)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a minute or two, and only shows that everything works"
    )
    parser.set_defaults(act=_act)


def _act(options: argparse.Namespace) -> int:
    from sage_unsloth.lab.grid import grid
    from sage_unsloth.lab.grid_design import GridConfig
    from sage_unsloth.quickstart import QuickstartConfig, smoke_config

    run = smoke_config() if options.smoke else QuickstartConfig()
    if options.steps is not None:
        run = replace(run, rlvr=replace(run.rlvr, max_steps=options.steps))
    if options.n is not None:
        run = replace(run, sampling=replace(run.sampling, num_samples=options.n))
    more = range(max(options.seeds) + 1, max(options.seeds) + 1 + options.floor_seeds)
    grid(
        options.out,
        GridConfig(
            thresholds=tuple(options.thresholds),
            ratios=tuple(options.ratios),
            seeds=tuple(options.seeds),
            floor_seeds=(*options.seeds, *more)[: max(len(options.seeds), options.floor_seeds)],
            run=run,
        ),
    )
    return 0
