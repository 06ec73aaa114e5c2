"""The commands `sft` and `train`: both stages, with their settings given by name."""

import argparse
import ast
import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from sage_unsloth.grading.command import add_verifier
from sage_unsloth.problems.options import add_columns, add_prompt, columns_of, prompt_of


def add_sft(commands: Any) -> None:
    parser = _add_stage(
        commands, "sft", "stage 1: fine-tune on worked solutions", "runs/sft", "openmath"
    )
    parser.add_argument(
        "--model",
        default="qwen2.5-math-7b",
        help="a preset, a folder or a hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--limit", type=int, help="rows to keep, the first of those that pass the filters"
    )
    parser.add_argument(
        "--held-out",
        type=int,
        default=32,
        help="rows for the comparison before and after; 0 for none (default: %(default)s)",
    )
    add_verifier(parser)
    parser.set_defaults(act=_sft)


def _sft(options: argparse.Namespace) -> int:
    from sage_unsloth.training.recipes import run_sft
    from sage_unsloth.training.sft_stage import SftConfig

    with naming_options(SftConfig()):
        run_sft(
            options.out,
            model=options.model,
            data=options.data,
            path=options.path,
            columns=columns_of(options),
            limit=options.limit,
            held_out=options.held_out,
            verifier=options.verifier,
            allow_unconfined=options.allow_unconfined,
            smoke=options.smoke,
            **_settings(options, SftConfig()),
        )
    return 0


def add_train(commands: Any) -> None:
    parser = _add_stage(
        commands,
        "train",
        "stage 2: RL with verifiable rewards, by any algorithm",
        "runs/train",
        "dapo",
    )
    parser.add_argument("--list", action="store_true", help="print the algorithms and exit")
    parser.add_argument(
        "--algorithm",
        default="sage-branch",
        help="a row of --list, or module:name of your own (default: %(default)s)",
    )
    parser.add_argument(
        "--from",
        default="runs/sft",
        dest="start",
        help="folder of an SFT run or, for a second stage, of an RL run; or a preset, a model "
        "folder or a hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=2000,
        help="rows of the data to read, before the filters (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=("unsloth", "trl"),
        help="who trains: Unsloth on one GPU (default), or TRL's own trainer, which accelerate "
        "spreads over many",
    )
    parser.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory of the card to plan for (default: this machine's)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="train also where every group of the preflight got one and the same reward",
    )
    parser.add_argument(
        "--reward",
        action="append",
        metavar="REWARD[=WEIGHT]",
        dest="rewards",
        help="module:function of your own in TRL's form, or `answer`, the checked one; several may "
        "be given, and then the rewards are exactly those (default: answer)",
    )
    add_verifier(parser)
    parser.add_argument(
        "--eval-file",
        metavar="FILE",
        help="rows for the held-out curve (--set eval_steps=), in the columns of --path; without "
        "it, rows of the data are held out",
    )
    parser.set_defaults(act=_train)


def _train(options: argparse.Namespace) -> int:
    if options.list:
        from sage_unsloth.training.algorithms import listing

        print(listing())
        return 0
    from sage_unsloth.runs.processes import first_process_speaks
    from sage_unsloth.training.recipes import run_rlvr
    from sage_unsloth.training.rlvr_config import RlvrConfig

    with first_process_speaks(), naming_options(RlvrConfig()):
        run_rlvr(
            options.out,
            algorithm=options.algorithm,
            start=options.start,
            data=options.data,
            path=options.path,
            columns=columns_of(options),
            limit=options.limit,
            memory=options.memory,
            force=options.force,
            eval_file=options.eval_file,
            rewards=options.rewards,
            verifier=options.verifier,
            allow_unconfined=options.allow_unconfined,
            smoke=options.smoke,
            **_settings(options, RlvrConfig()),
        )
    return 0


def _add_stage(
    commands: Any, name: str, description: str, out: str, corpus: str
) -> argparse.ArgumentParser:
    """A parser with the options that both stages have."""
    parser = commands.add_parser(name, help=description)
    parser.add_argument(
        "--out",
        default=out,
        help="folder of the run; the same command resumes it (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        help=f"{corpus}, arithmetic, a FILE of your own (.jsonl, .json, .parquet), "
        "OWNER/NAME[:CONFIG] of the hub, or reasoning-gym:TASK "
        f"(default: {corpus}; the embedded model has its own)",
    )
    parser.add_argument(
        "--path",
        metavar="FILE",
        help="a local copy of the data (.jsonl, .json, .parquet) with the hub's columns, or with "
        "--columns",
    )
    add_columns(parser)
    add_prompt(parser)
    parser.add_argument(
        "--set",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        dest="settings",
        help="settings in place of the preset's, such as max_steps=200 learning_rate=1e-5 "
        "lora.rank=16",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a run of half a minute that only shows that everything works",
    )
    return parser


def _settings(options: argparse.Namespace, defaults: Any) -> dict[str, Any]:
    """The settings that were given, by `--set` and by an option of their own."""
    given = {"template": options.template, "prompt": prompt_of(options)}
    given["backend"] = getattr(options, "backend", None)
    given = {name: value for name, value in given.items() if value is not None}
    return parse_settings(options.settings, defaults) | given


@contextmanager
def naming_options(defaults: Any) -> Iterator[None]:
    """Inside, what an error says to set ("; set beta=0.05, or …") is written as the option."""
    names = "|".join(field.name for field in fields(defaults))
    try:
        yield
    except ValueError as error:
        rule, semicolon, remedy = str(error).rpartition("; ")
        remedy = re.sub(rf"(?<![\w.-])(?<!--columns )(set )?({names})=", r"--set \2=", remedy)
        if semicolon and len(error.args) == 1:
            error.args = (f"{rule}; {remedy}",)
        raise


def parse_settings(texts: list[str], defaults: Any) -> dict[str, Any]:
    """`["max_steps=200", "lora.rank=16"]` as fields of a config, each of the type of its default.

    Raises:
        ValueError: not NAME=VALUE, an unknown name (with the names that there are), or a value of
            another type.
    """
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    known |= {
        f"lora.{field.name}": getattr(defaults.lora, field.name) for field in fields(defaults.lora)
    }
    del known["lora"], known["prompt"]  # the latter has options of its own
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--set takes NAME=VALUE; got {text!r}")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"--set takes one of {', '.join(known)}; got {name!r}{meant}")
        found[name] = _parse_value(name, value, known[name])
    lora = {name.removeprefix("lora."): found.pop(name) for name in list(found) if "." in name}
    return found | ({"lora": replace(defaults.lora, **lora)} if lora else {})


def _parse_value(name: str, text: str, default: Any) -> Any:
    """The text as a value of its default's type; where that is None, None or a whole number."""
    if isinstance(default, tuple):  # names with commas between, in quotes and brackets or without
        names = [name.strip("()'\" ") for name in text.split(",")]
        return tuple(name for name in names if name)
    try:
        value = text if isinstance(default, str) else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise ValueError(f"{name} must be a value like {default!r}; got {text!r}") from None
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    optional = default is None and (value is None or type(value) is int)
    if type(value) is not type(default) and not optional:
        raise ValueError(f"{name} must be a value like {default!r}; got {value!r}")
    return value
