"""`doctor --deep`."""

import argparse
from collections.abc import Callable

SELFTEST_FILE = "selftest.json"


def add_deep(parser: argparse.ArgumentParser, act: Callable[[argparse.Namespace], int]) -> None:
    """The options of the self-test; without `--deep` the command is `act`."""
    parser.add_argument(
        "--deep",
        action="store_true",
        help="then test this machine: losses and gradients in each number format, cost, memory, "
        "vLLM, resuming, export; ten minutes at most, no network",
    )
    parser.add_argument(
        "--again", action="store_true", help="with --deep: repeat checks that have passed, too"
    )
    parser.add_argument(
        "--out",
        default=SELFTEST_FILE,
        help="with --deep: file for the report, which you can send (default: %(default)s)",
    )

    def choose(options: argparse.Namespace) -> int:
        if not options.deep:
            if options.again or options.out != SELFTEST_FILE:
                raise ValueError("--again and --out need --deep")
            return act(options)
        first = act(options)
        from sage_unsloth.runs.files import read_json
        from sage_unsloth.selftest.report import markdown_report
        from sage_unsloth.selftest.run import run_selftest

        failures = run_selftest(options.out, again=options.again)
        print(f"\nTo paste into a report:\n\n{markdown_report(read_json(options.out))}")
        return 1 if failures or first else 0

    parser.set_defaults(act=choose)
