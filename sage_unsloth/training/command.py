"""The commands `sft` and `train`: both stages, with an option for each of their settings."""

import argparse
from typing import Any

from sage_unsloth.grading.command import add_verifier
from sage_unsloth.problems.options import add_columns, add_prompt, columns_of, prompt_of
from sage_unsloth.runs.settings import DATA, EVALUATION, MODEL, OBJECTIVE, SAVING, parse_settings
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.setting_options import (
    add_groups,
    add_set,
    add_settings,
    naming_options,
    recorded_command,
)
from sage_unsloth.training.sft_config import SftConfig

EPILOG = (
    "Defaults are the paper's. The model's preset, the GPU and the algorithm may change them. Your "
    "options override all of these."
)


def add_sft(commands: Any) -> None:
    parser, groups = _add_stage(
        commands, "sft", "stage 1: fine-tune on worked solutions", "runs/sft", "openmath"
    )
    groups[MODEL].add_argument(
        "--model",
        default="qwen2.5-math-7b",
        help="a preset, a folder or a hub id (default: %(default)s)",
    )
    groups[EVALUATION].add_argument(
        "--held-out",
        type=int,
        default=32,
        help="rows for the comparison before and after; 0 for none (default: %(default)s)",
    )
    add_settings(groups, SftConfig)
    parser.set_defaults(act=_sft)


def _sft(options: argparse.Namespace) -> int:
    with naming_options(SftConfig):
        settings = _settings(options, SftConfig)
        # Imported late: it loads PyTorch, which --help does without.
        from sage_unsloth.training.sft_recipe import run_sft

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
            command=recorded_command(options.words),
            **settings,
        )
    return 0


def add_train(commands: Any) -> None:
    parser, groups = _add_stage(
        commands,
        "train",
        "stage 2: RL with verifiable rewards, by any algorithm",
        "runs/train",
        "dapo",
    )
    groups[OBJECTIVE].add_argument(
        "--algorithm",
        default="sage-branch",
        help="a name in --list, or your module:name (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="print the algorithms and exit")
    groups[MODEL].add_argument(
        "--from",
        default="runs/sft",
        dest="start",
        metavar="MODEL",
        help="folder of an SFT run or, for a second stage, of an RL run; or a preset, a model "
        "folder or a hub id (default: %(default)s)",
    )
    groups[MODEL].add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="memory of the GPU to plan for (default: this machine's)",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="train even if every group of the preflight is dead (equal rewards)",
    )
    groups[OBJECTIVE].add_argument(
        "--reward",
        action="append",
        metavar="REWARD[=WEIGHT]",
        dest="rewards",
        help="your module:function in TRL's form, or `answer`, which grades the answer; repeat it "
        "for several rewards (default: answer)",
    )
    groups[EVALUATION].add_argument(
        "--eval-file",
        metavar="FILE",
        help="rows for the held-out curve (--eval-steps), in the columns of --path; without it, "
        "rows of the data are held out",
    )
    add_settings(groups, RlvrConfig)
    parser.set_defaults(act=_train)


def _train(options: argparse.Namespace) -> int:
    if options.list:
        from sage_unsloth.training.algorithms import listing

        print(listing())
        return 0
    with naming_options(RlvrConfig):
        settings = _settings(options, RlvrConfig)
        from sage_unsloth.runs.processes import first_process_speaks
        from sage_unsloth.training.recipes import run_rlvr

        with first_process_speaks():
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
                command=recorded_command(options.words),
                **settings,
            )
    return 0


def _add_stage(
    commands: Any, name: str, description: str, out: str, corpus: str
) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """A parser with the options that both stages share, and its groups of options."""
    parser = commands.add_parser(
        name,
        help=description,
        description=f"{description[0].upper()}{description[1:]}.",
        usage=f"%(prog)s {'--model' if name == 'sft' else '--from'} MODEL [options]",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    groups = add_groups(parser)
    groups[SAVING].add_argument(
        "--out",
        default=out,
        help="folder of the run; the same command resumes it (default: %(default)s)",
    )
    groups[DATA].add_argument(
        "--data",
        help=f"{corpus}, arithmetic, your own FILE (.jsonl, .json, .parquet, .csv), "
        "OWNER/NAME[:CONFIG] on the hub, or reasoning-gym:TASK "
        f"(default: {corpus}; the embedded model has its own)",
    )
    groups[DATA].add_argument(
        "--path",
        metavar="FILE",
        help="a local copy of the data (.jsonl, .json, .parquet, .csv) with the hub's columns, or "
        "with --columns",
    )
    groups[DATA].add_argument(
        "--limit",
        type=int,
        metavar="N",
        help="read only the first N rows, before the filters (default: all; for dapo the paper's "
        "2,000)",
    )
    add_columns(groups[DATA])
    add_prompt(groups[DATA])
    add_verifier(groups[DATA])
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="read options from a .yaml or .toml file, or repeat the run of a run.json",
    )
    add_set(parser, "settings by name: NAME=VALUE is --NAME VALUE")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a run of half a minute that only checks that everything works",
    )
    return parser, groups


def _settings(options: argparse.Namespace, stage: type) -> dict[str, Any]:
    """The given settings, from their own options or from `--set`."""
    given = {"template": options.template, "prompt": prompt_of(options)}
    given = {name: value for name, value in given.items() if value is not None}
    return parse_settings(options.settings, stage) | given
