"""The command `regrade`: grades record sets and rollouts again, without drawing."""

import argparse
from pathlib import Path


def add_regrade(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of `regrade`."""
    parser = commands.add_parser(
        "regrade",
        help="grade what is on disk again by today's rules, without drawing; resumes where it was "
        "stopped",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="record sets (.jsonl), rollouts (completions.jsonl), or folders with some below",
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        help="grade copies there, and leave what there is as it is (one PATH, a folder)",
    )
    parser.set_defaults(act=_regrade)


def _regrade(options: argparse.Namespace) -> int:
    from sage_unsloth.analysis.regrading import change_rows, regrade
    from sage_unsloth.figures import show_table

    results = regrade([Path(path) for path in options.paths], options.to and Path(options.to))
    show_table(change_rows(results), "Graded again:")
    changed = sum(n for result in results for pair, n in result.changes.items() if len({*pair}) > 1)
    print(
        f"\n{sum(result.changes.total() for result in results):,} of "
        f"{sum(result.total for result in results):,} lines were graded again, and {changed:,} got "
        "another grade. Reports and figures that were made of them are as they were: run compare "
        "or analyze for new ones."
    )
    return 0
