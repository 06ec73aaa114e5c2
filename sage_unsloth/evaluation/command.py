"""The commands `evaluate` and `compare`."""

import argparse
from dataclasses import replace

from sage_unsloth.evaluation.engine_options import add_engine_options, engine_options
from sage_unsloth.grading.command import add_verifier
from sage_unsloth.problems.options import add_columns, add_prompt, columns_of, prompt_of
from sage_unsloth.sampling.engine_choice import ROLLOUTS
from sage_unsloth.sampling.engines import BATCH_SIZES, SamplingConfig

OUT = "runs/evaluation"
SMOKE_OPTIONS = {"n": 2, "problems": 2, "max_tokens": 64, "out": f"{OUT}-smoke"}

# Evaluation and its libraries are imported when a command runs: `--help` needs none of them.


def add_evaluate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="pass@k with intervals of models on benchmarks; resumes after a stop",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        required=True,
        metavar="NAME=MODEL[+ADAPTER]",
        help="folder of a run, an adapter or a model, a preset, or a hub id, and optionally a LoRA "
        "folder; give several training seeds of a method the same name",
    )
    parser.add_argument(
        "--benchmarks",
        nargs="+",
        required=True,
        metavar="NAME[=FILE[,FILE]]",
        help="aime, amc23, math500-l5, minerva, knights-and-knaves:3, arithmetic, "
        "reasoning-gym:TASK and others; with a file: a local copy, or your problems, which "
        "may also be OWNER/NAME[:CONFIG] on the hub",
    )
    parser.add_argument(
        "--path", metavar="FOLDER", help="local copies, NAME.jsonl and so on; no network"
    )
    parser.add_argument(
        "--out",
        default=OUT,
        help="folder (default: %(default)s, with --smoke runs/evaluation-smoke)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a few short completions, only to check that everything works (other options "
        "override these sizes)",
    )
    add_columns(parser)
    add_prompt(parser)
    parser.add_argument(
        "--problems", type=int, help="use only this many problems of each benchmark"
    )
    parser.add_argument(
        "--engine",
        choices=ROLLOUTS,
        default="auto",
        help="auto: vllm if it is installed and the GPU supports it (default: %(default)s)",
    )
    add_engine_options(parser)
    parser.add_argument(
        "--load-in-4bit",
        action=argparse.BooleanOptionalAction,
        help="quantise the weights of all models (a 7B model on a GPU of 16 GB; needs "
        "transformers), or of none (default: of models that were trained in 4 bits)",
    )
    parser.add_argument(
        "--batch",
        type=int,
        help="completions sampled together (default: "
        + ", ".join(f"{size:,} with {engine}" for engine, size in BATCH_SIZES.items())
        + ")",
    )
    sampling = SamplingConfig()
    for flag, default, text in (
        ("--n", sampling.num_samples, "samples of each problem"),
        ("--top-k", sampling.top_k, "sample from this many most probable tokens; -1: all"),
        ("--max-tokens", sampling.max_completion_length, "longest completion"),
        ("--seed", sampling.seed, "the seed of each completion is derived from it"),
    ):
        parser.add_argument(
            flag, type=type(default), default=default, help=f"{text} (default: %(default)s)"
        )
    for flag, default, text in (
        ("--temperature", sampling.temperature, "logits are divided by it"),
        ("--top-p", sampling.top_p, "share of the probability that is kept; 1: all of it"),
        ("--min-p", sampling.min_p, "least probability of a token, relative to the likeliest"),
    ):
        default = f"that of the RL runs, else {default}"
        parser.add_argument(flag, type=float, help=f"{text} (default: {default})")
    parser.add_argument(
        "--train",
        metavar="FILE",
        help="training set; benchmark problems that overlap with it are reported (columns as for "
        "train --data)",
    )
    add_verifier(parser)
    parser.add_argument(
        "--other-verifier",
        action="store_true",
        help="grade your problems with --verifier although a model was trained with another one",
    )
    _add_against(parser)
    parser.set_defaults(act=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    from sage_unsloth.evaluation import evaluator
    from sage_unsloth.evaluation.named_models import parse_model
    from sage_unsloth.evaluation.report_text import report_text
    from sage_unsloth.evaluation.trained_verifier import choose_verifier, trained_sampling
    from sage_unsloth.grading.mathematics import MATH
    from sage_unsloth.grading.verifiers import get_verifier
    from sage_unsloth.problems.benchmarks import NAMES
    from sage_unsloth.problems.overlap import training_problems

    if options.smoke:
        _shorten(options)
    prompt, columns = prompt_of(options), columns_of(options)
    models = [
        parse_model(text, options.template, prompt, options.load_in_4bit) for text in options.models
    ]
    benchmarks = [
        evaluator.parse_benchmark(text, options.path, options.problems, columns)
        for text in options.benchmarks
    ]
    evaluator.check_columns_are_used(options.benchmarks, columns)
    engine = evaluator.choose_engine(
        options.engine, load_in_4bit=any(m.load_in_4bit for m in models)
    )
    engine_settings = engine_options(options, engine)
    drawn = {name: getattr(options, name) for name in ("temperature", "top_p", "min_p")}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    trained = {k: v for k, v in trained_sampling(models).items() if k not in drawn}
    if any(value != getattr(SamplingConfig, name) for name, value in trained.items()):
        words = ", ".join(f"{name} {value:g}" for name, value in trained.items())
        print(f"Completions are sampled as in training: {words}.")
    config = SamplingConfig(
        num_samples=options.n,
        **trained | drawn,
        top_k=options.top_k,
        max_completion_length=options.max_tokens,
        batch_size=BATCH_SIZES[engine] if options.batch is None else options.batch,
        seed=options.seed,
    )
    own = [text.partition("=")[0] for text in options.benchmarks if "=" in text]
    own = [name for name in own if name not in NAMES]  # else a local copy
    if options.verifier is not None:
        checker = get_verifier(options.verifier, allow_unconfined=options.allow_unconfined)
        benchmarks = [replace(benchmark, checker=checker) for benchmark in benchmarks]
    if own:
        name = choose_verifier(models, options.verifier, other=options.other_verifier)
        if name is not None and options.verifier is None:
            checker = get_verifier(name, allow_unconfined=options.allow_unconfined)
            benchmarks = [
                replace(b, checker=checker) if b.name in own and b.checker is MATH else b
                for b in benchmarks
            ]
            print(f"Answers of {', '.join(own)} are graded by {name}, as in training.")
    result = evaluator.evaluate_models(
        models,
        benchmarks,
        options.out,
        config,
        engine=engine,
        training=training_problems(options.train) if options.train else (),
        against=options.against,
        **engine_settings,
        show=print,
    )
    print(f"\n{report_text(result)}\n\nTables and figures: {options.out}")
    return 0


def _shorten(options: argparse.Namespace) -> None:
    """Sets the options of `--smoke` that were not given."""
    sampling = SamplingConfig()
    usual = {"n": sampling.num_samples, "max_tokens": sampling.max_completion_length}
    for name, value in SMOKE_OPTIONS.items():
        if getattr(options, name) == (usual | {"problems": None, "out": OUT})[name]:
            setattr(options, name, value)


def add_compare(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "compare",
        help="the same report for record sets on disk",
    )
    parser.add_argument(
        "sets",
        nargs="+",
        metavar="SETS",
        help=".jsonl files of record sets, or folders with some",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="report on the problems and samples that all models have, before sampling is complete",
    )
    parser.add_argument("--out", default="runs/comparison", help="folder (default: %(default)s)")
    _add_against(parser)
    parser.set_defaults(act=_compare)


def _compare(options: argparse.Namespace) -> int:
    from sage_unsloth.evaluation.report import compare_sets
    from sage_unsloth.evaluation.report_text import report_text

    result = compare_sets(options.sets, options.out, options.against, partial=options.partial)
    print(f"{report_text(result)}\n\nTables and figures: {options.out}")
    return 0


def _add_against(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against", metavar="NAME", help="compare the others with this model (default: the first)"
    )
