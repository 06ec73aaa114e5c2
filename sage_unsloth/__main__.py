"""The command line: `python -m sage_unsloth COMMAND`; each command is next to its code.

Exit codes: 0 for success, 1 for a failed check, 2 for bad input (the message says what to do), 130
for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP, 141 if the reader of the output has gone.
"""

import argparse
import difflib
import importlib
import io
import logging
import os
import re
import shlex
import sys

from sage_unsloth.runs.stopping import Terminated, handle_stop_signals
from sage_unsloth.runs.text import log_to_terminal, printable, without_secrets

logger = logging.getLogger("sage_unsloth")  # this module's own name is __main__

OTHER_WORDS = {
    "--model": "--from",
    "--from": "--model",
    "--dataset": "--data",
    "--data": "--path",
    "--limit": "--problems",
    "--problems": "--limit",
    "--output-dir": "--out",
    "--lr": "--learning-rate",
    "--optimizer": "--optim",
    "--steps": "--max-steps",
    "--warmup-steps": "--warmup-ratio",
    "--num-train-epochs": "--epochs",
    "--gradient-accumulation-steps": "--micro-batch-size",
    "--per-device-train-batch-size": "--micro-batch-size",
    "--group-size": "--num-generations",
    "--max-tokens": "--max-completion-length",
    "--max-new-tokens": "--max-completion-length",
    "--max-completion-length": "--max-tokens",
    "--kl-coef": "--beta",
    "--lora-rank": "--lora.rank",
    "--lora-alpha": "--lora.alpha",
}
"""Names of options in other commands and libraries -> our names."""

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
    ("analysis.command", "add_analyze"),
    ("planning.command", "add_plan"),
    ("export.command", "add_export"),
    ("doctor", "add_doctor"),
)

WITH_CONFIG = ("sft", "train")
"""Commands with `--config`."""
IN_A_CLONE = ("cost",)
"""Commands of `research/`, which is not installed."""


def main(arguments: list[str] | None = None) -> int:
    """Parses, runs, and returns the exit code.

    After a signal, the optimizer step or batch of completions in flight is finished and saved
    first; a second signal ends the process at once.
    """
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in IN_A_CLONE:
        print(
            f"error: {words[0]} is not installed. Run it from a clone: python -m "
            f"research.{words[0]}",
            file=sys.stderr,
        )
        return 2
    known = dict.fromkeys(name for _, name in COMMANDS)
    only = f"add_{words[0]}" if words and f"add_{words[0]}" in known else None
    try:
        words = _insert_config([_with_dashes(word) for word in words])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_command(make_parser(only), words)


def _with_dashes(word: str) -> str:
    """`--max_steps` as `--max-steps`."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _insert_config(words: list[str]) -> list[str]:
    """The words with `--config FILE` replaced by its options."""
    if not words or words[0] not in WITH_CONFIG:
        return words
    from sage_unsloth.training.setting_options import expand_config

    return expand_config(words)


def _did_you_mean(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    """A suggestion for unknown words; empty if nothing is near."""
    known = re.findall(r"--[a-z][\w.-]*", parser.format_help())
    for word in unknown:
        other = OTHER_WORDS.get(word.partition("=")[0])
        near = [other] if other in known else difflib.get_close_matches(word, known, 1)
        if word.startswith("--") and near:
            return f". Did you mean {near[0]}?"
    return ""


def run_command(parser: argparse.ArgumentParser, arguments: list[str] | None = None) -> int:
    """Parses, calls the parser's `act`, and returns the exit code; None takes `sys.argv`."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen = parser
        if hasattr(options, "parsers"):
            chosen = options.parsers[options.command]
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{_did_you_mean(unknown, chosen)}")
    options.words = sys.argv[1:] if arguments is None else arguments
    log_to_terminal()
    for name in ("sage_unsloth", "research"):
        logging.getLogger(name).setLevel(logging.INFO)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Into a file or a pipe too each line is written at once, and an error after its header.
        sys.stdout.reconfigure(line_buffering=True)
    if _takes_long(options):
        logger.info("%s: loading libraries.", options.command)
    try:
        with handle_stop_signals():
            code = options.act(options)
            sys.stdout.flush()  # whoever reads it may have gone
            return code
    except (KeyboardInterrupt, Terminated) as stop:
        again = shlex.join(sys.argv[1:] if arguments is None else arguments)
        print(
            f"\n{str(stop) or 'stopped'}. To resume: {parser.prog} {again}",
            file=sys.stderr,
        )
        return 128 + stop.signum if isinstance(stop, Terminated) else 130
    except BrokenPipeError:
        # The reader, such as `head`, has what it wants; Python would complain once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RuntimeError) as error:
        # Of RuntimeErrors, the package's own (ContractError, EngineError) say what to do; any other
        # is a defect, whose traceback is needed.
        is_own = type(error).__module__.partition(".")[0] in ("sage_unsloth", "research")
        if isinstance(error, RuntimeError) and not is_own:
            raise
        print(f"error: {printable(without_secrets(str(error)))}", file=sys.stderr)
        return 2


def _takes_long(options: argparse.Namespace) -> bool:
    """Whether the command loads slowly; only the first of several processes says so."""
    quick = getattr(options, "command", "plan") == "plan" or getattr(options, "list", False)
    return not quick and os.environ.get("RANK", "0") == "0"


def make_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one, by the name of the function that adds it."""
    parser = argparse.ArgumentParser(
        prog="python -m sage_unsloth",
        description="SAGE inside Unsloth's GRPO loss: train, evaluate, compare, export.",
        epilog="From a clone: "
        + ", ".join(f"python -m research.{name}" for name in IN_A_CLONE)
        + ".",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module, add in COMMANDS:
        if only not in (None, add):
            continue  # its module need not be loaded
        getattr(importlib.import_module(f"sage_unsloth.{module}"), add)(commands)
    parser.set_defaults(parsers=commands.choices)
    return parser


if __name__ == "__main__":
    sys.exit(main())
