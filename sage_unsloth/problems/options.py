"""Options for the rows and the prompt of a command."""

import argparse
import logging
from pathlib import Path

from sage_unsloth.problems.columns import Columns, parse_columns
from sage_unsloth.prompts import TAGS, TEMPLATES, PromptFormat, prompt_format

logger = logging.getLogger(__name__)


def add_columns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--columns",
        nargs="+",
        action="extend",
        metavar="NAME=COLUMN",
        help="columns of your data: problem=question answer=answer, messages=, solution=; any "
        "other NAME is passed to rewards",
    )
    parser.add_argument(
        "--answer-pattern",
        metavar="REGEX",
        help="the answer is this pattern's one group in the answer column: '#### (.+)' for GSM8K",
    )
    parser.add_argument("--split", help="of data on the hub (default: train; evaluate: test)")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        help="chat template of the prompts: this package's or the model's own (default: the one of "
        "its training here; otherwise its own for an instruct model, this package's for others)",
    )
    parser.add_argument(
        "--system-prompt",
        metavar="FILE|TEXT",
        help="replaces this package's; none: no system prompt (default: the one of the model's "
        "training here; otherwise this package's, which names the tags)",
    )
    parser.add_argument(
        "--tags",
        nargs="+",
        metavar="TAG",
        help=f"{', '.join(TAGS)}; or two tags around the answer, or four around working and answer "
        "(default: those of the model's training here, otherwise project)",
    )


def column_options(options: argparse.Namespace) -> Columns:
    """The values of `add_columns`."""
    return parse_columns(options.columns, options.answer_pattern, options.split)


def prompt_option(options: argparse.Namespace) -> PromptFormat | None:
    """The values of `add_prompt`; None without any.

    Warns of a system prompt that does not name the tags of the answer.
    """
    system = None if options.system_prompt is None else _system_prompt(options.system_prompt)
    prompt = prompt_format(system, options.tags)
    if prompt is not None and prompt.missing_marks:
        logger.warning(
            "The system prompt does not mention %s, which marks the answer: a model that was not "
            "trained to write this is unlikely to do so.",
            " and ".join(prompt.missing_marks),
        )
    return prompt


def _system_prompt(text: str) -> str:
    """The text, or the content of the file it names; ValueError for a missing or binary file."""
    # A name of more than 255 bytes is an error of the file system.
    path = Path(text) if len(text.encode()) <= 255 and "\n" not in text else None
    if path is not None and path.is_file():
        try:
            return path.read_text(encoding="utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"--system-prompt must be text, or a file of text, got {path} ({error})"
            ) from error
    one_word = not any(sign.isspace() for sign in text.strip())
    if path is not None and one_word and ("/" in text or path.suffix):
        raise ValueError(
            f"--system-prompt must be text, or a file of text, but there is no file {text}"
        )
    return text
