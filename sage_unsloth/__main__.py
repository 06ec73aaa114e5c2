"""The command line: `python -m sage_unsloth COMMAND`; each command lives beside the code it starts.

Exit codes: 0 for success, 1 for a failed check, 2 for bad input (the message says what to do), 130
for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 141 where the reader of the output has gone.
"""

import argparse
import importlib
import logging
import os
import shlex
import sys

from sage_unsloth.runs.stopping import Terminated, ending
from sage_unsloth.runs.text import log_to_terminal, printable, without_secrets

# In the order of `--help`. Each function adds a command's parser, whose `act` takes the options
# and returns the exit code. These modules load nothing heavy: what a command needs, its `act`
# imports.
COMMANDS = (
    ("quickstart", "add_quickstart"),
    ("study.command", "add_study"),
    ("training.command", "add_sft"),
    ("training.command", "add_train"),
    ("evaluation.ask", "add_ask"),
    ("evaluation.command", "add_evaluate"),
    ("evaluation.command", "add_compare"),
    ("evaluation.convert_command", "add_convert"),
    ("analysis.command", "add_analyze"),
    ("analysis.regrade_command", "add_regrade"),
    ("planning.command", "add_plan"),
    ("export.command", "add_export"),
    ("doctor", "add_doctor"),
)

IN_A_CLONE = ("benchmark", "cost", "frontier")
"""Commands of `research/`, which is not installed."""


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, and return the exit code.

    After a signal, an optimizer step or a batch of completions in flight is finished and saved
    first; a second signal ends the process at once.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in IN_A_CLONE:
        print(
            f"error: {words[0]} is not installed; run it from a clone: python -m "
            f"research.{words[0]}",
            file=sys.stderr,
        )
        return 2
    return run_command(make_parser(), words)


def run_command(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> int:
    """Parse, call the parser's `act`, and return the exit code; None takes the process's words."""
    options = parser.parse_args(arguments)
    log_to_terminal()
    for name in ("sage_unsloth", "research"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        with ending():
            code = options.act(options)
            sys.stdout.flush()  # whoever reads it may have gone
            return code
    except (KeyboardInterrupt, Terminated) as stop:
        again = shlex.join(sys.argv[1:] if arguments is None else arguments)
        print(
            f"\n{str(stop) or 'stopped'}; to resume: {parser.prog} {again}",
            file=sys.stderr,
        )
        return stop.code if isinstance(stop, Terminated) else 130
    except BrokenPipeError:
        # The reader, such as `head`, has what it wants; Python would complain once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RuntimeError) as error:
        # Of RuntimeErrors, the package's own (ContractError, EngineError) say what to do; any other
        # is a defect, whose traceback is needed.
        ours = type(error).__module__.partition(".")[0] in ("sage_unsloth", "research")
        if isinstance(error, RuntimeError) and not ours:
            raise
        print(f"error: {printable(without_secrets(str(error)))}", file=sys.stderr)
        return 2


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_unsloth",
        description="SAGE inside Unsloth's GRPO loss: train, evaluate, compare, export.",
        epilog="From a clone: "
        + ", ".join(f"python -m research.{name}" for name in IN_A_CLONE)
        + ".",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, add in COMMANDS:
        getattr(importlib.import_module(f"sage_unsloth.{module}"), add)(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
