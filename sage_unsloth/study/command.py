"""The command `study`."""

import argparse
from typing import Any

from sage_unsloth.grading.command import add_verifier
from sage_unsloth.problems.options import add_columns, add_prompt, column_options, prompt_option
from sage_unsloth.training.setting_options import add_processes, add_set


def add_study(commands: Any) -> None:
    """Adds the parser of `study`."""
    parser = commands.add_parser(
        "study",
        help="test whether one method is better than another on your task: methods x strengths x "
        "training seeds, compared by pass@k",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=[],
        metavar="NAME[=VALUES][:SETTING=VALUES]",
        help="algorithms of train --list or your own module:name, with values of their strength or "
        "of any numeric setting, separated by commas: grpo=0.05 pkpo:k=4 "
        "sage-branch:threshold=.8:ratio=.1; the first point is the baseline",
    )
    parser.add_argument("--seeds", type=int, metavar="COUNT", help="training seeds of each point")
    parser.add_argument(
        "--first-seed", type=int, default=1, help="first training seed (default: %(default)s)"
    )
    parser.add_argument(
        "--claims",
        nargs="+",
        action="extend",
        default=[],
        metavar="A>B@K",
        help="the comparisons that the study should decide, in quotes: 'maxrl>grpo@K'; name them "
        "before the first run, because Holm's correction covers only these",
    )
    parser.add_argument(
        "--from",
        default="runs/sft",
        dest="start",
        help="what RL starts from, as in train (default: %(default)s)",
    )
    parser.add_argument("--data", help="training rows, as in train")
    parser.add_argument(
        "--benchmarks",
        nargs="+",
        default=[],
        metavar="NAME[=FILE]",
        help="problems that every model answers, as in evaluate; the first is the main one",
    )
    parser.add_argument(
        "--task",
        help="instead of --from, --data and --benchmarks: arithmetic (the embedded task), or "
        "module:name of a function that returns a Task",
    )
    parser.add_argument(
        "--reward",
        action="append",
        metavar="REWARD[=WEIGHT]",
        dest="rewards",
        help="as in train (default: answer)",
    )
    add_verifier(parser)
    add_columns(parser)
    add_prompt(parser)
    parser.add_argument(
        "--group", metavar="COLUMN", help="also report each value of this benchmark column"
    )
    parser.add_argument(
        "--guess",
        help="chance of a blind guess: a number, a column of the benchmarks, or answers, which "
        "guesses the answer of a random training row (default: answers)",
    )
    parser.add_argument(
        "--n", type=int, help="samples of each problem; pass@k is reported up to half of it"
    )
    parser.add_argument(
        "--temperature", type=float, help="temperature of the evaluation (default: training's)"
    )
    parser.add_argument(
        "--free",
        nargs="*",
        metavar="LINE",
        help="variants of the baseline that need sampling but no training: early, scale, "
        "temperature (default: all; the mixture with the start model is free and always included)",
    )
    add_set(parser, "settings of every run, as in train")
    add_processes(parser)
    parser.add_argument(
        "--out",
        default="runs/study",
        help="folder; the same command resumes, and may add methods and seeds (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--report", action="store_true", help="only report on the seeds that are complete"
    )
    parser.add_argument("--reduced", action="store_true", help="fewer methods and seeds by default")
    parser.add_argument(
        "--smoke", action="store_true", help="a minimal size that only checks that everything works"
    )
    parser.set_defaults(act=_act)


def _act(options: argparse.Namespace) -> int:
    from sage_unsloth.grading.verifiers import get_verifier
    from sage_unsloth.runs.settings import parse_settings
    from sage_unsloth.study.plan import FREE_VARIANTS
    from sage_unsloth.study.runner import study
    from sage_unsloth.training.rlvr_config import RlvrConfig
    from sage_unsloth.training.setting_options import naming_options

    own: dict[str, Any] = {}
    with naming_options(RlvrConfig, by_set=True):
        settings = parse_settings(options.settings, RlvrConfig)
    if options.task is None:
        if options.data is None or not options.benchmarks:
            given = [f"--{name}" for name in ("data", "benchmarks") if getattr(options, name)]
            raise ValueError(
                f"a study needs --data and --benchmarks, or --task, got {given or 'none'}"
            )
        sampling = {"num_samples": options.n, "temperature": options.temperature}
        own = {
            "start": options.start,
            "data": options.data,
            "benchmarks": options.benchmarks,
            "columns": column_options(options),
            "rewards": options.rewards,
            "group": options.group,
            "guess": options.guess or "answers",
            "prompt": prompt_option(options),
            "template": options.template,
            "sampling": {name: value for name, value in sampling.items() if value is not None},
        }
        if options.verifier is not None:
            confined = {"allow_unconfined": options.allow_unconfined}
            own["verifier"] = get_verifier(options.verifier, **confined)
    else:
        own = {"data": options.data, "rewards": options.rewards, "group": options.group}
        own |= {"benchmarks": options.benchmarks or None, "n": options.n}
        # Given all the same, so that they are refused and not ignored.
        own |= {"temperature": options.temperature, "guess": options.guess}
        own |= {"verifier": options.verifier, "template": options.template}
        own |= {"columns": column_options(options) or None, "prompt": prompt_option(options)}
    study(
        options.out,
        methods=options.methods,
        task=options.task,
        seeds=options.seeds,
        first_seed=options.first_seed,
        claims=options.claims,
        free=FREE_VARIANTS if options.free is None else options.free,
        processes=options.processes,
        reduced=options.reduced,
        smoke=options.smoke,
        report_only=options.report,
        # A setting may have the name of an option that a task refuses.
        **(own | settings),
    )
    return 0
