"""The command line: `python -m sage_unsloth quickstart | evaluate | compare | doctor`."""

import argparse
import logging
import sys


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; 0 for success, 1 for a failed check, 2 for bad input (the message says what to do)."""
    parser = argparse.ArgumentParser(prog="python -m sage_unsloth", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_add_quickstart, _add_evaluate, _add_compare, _add_doctor):
        add(commands)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        return options.run(options)
    except (ValueError, OSError, RuntimeError) as error:
        # Of RuntimeErrors, the package's own (ContractError, EngineError) say what to do; any other is a defect to trace.
        if isinstance(error, RuntimeError) and not type(error).__module__.startswith(
            "sage_unsloth"
        ):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


# Each command imports for itself, since they load different amounts.


def _add_quickstart(commands) -> None:
    parser = commands.add_parser(
        "quickstart", help="SFT, GRPO, SAGE-Branch and pass@k on the embedded task"
    )
    parser.add_argument(
        "--out", default="runs/quickstart", help="folder of the run (default: %(default)s)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a minute's run that only shows that it works"
    )
    parser.set_defaults(run=_quickstart)


def _quickstart(options: argparse.Namespace) -> int:
    from sage_unsloth import quickstart

    quickstart.run(options.out, quickstart.smoke_config() if options.smoke else None)
    return 0


def _add_evaluate(commands) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="pass@k with intervals of models on benchmarks; goes on where it was stopped",
    )
    parser.add_argument(
        "--models", nargs="+", required=True, metavar="NAME=PATH[+ADAPTER]",
        help="model folder or hub id, and a LoRA folder to put on it; one name twice: training seeds of one method",
    )  # fmt: skip
    parser.add_argument(
        "--benchmarks", nargs="+", required=True, metavar="NAME[=FILE]",
        help="aime, amc23, math500-l5, minerva, knights-and-knaves:3, arithmetic, reasoning-gym:TASK and so on; "
        "with a file: a local copy, or problems of your own",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="FOLDER", help="local copies, NAME.jsonl and so on; no network"
    )
    parser.add_argument("--out", default="runs/evaluation", help="folder (default: %(default)s)")
    parser.add_argument(
        "--n", type=int, default=256, help="samples of each problem (default: %(default)s)"
    )
    parser.add_argument("--problems", type=int, help="only the first so many of each benchmark")
    parser.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto",
                        help="auto: vllm where there are a GPU and the package")  # fmt: skip
    parser.add_argument("--batch", type=int, help="completions drawn together (64; with vllm 4096)")
    for name, kind, default, text in (
        ("temperature", float, 0.3, ""),
        ("top-p", float, 1.0, ""),
        ("top-k", int, -1, ""),
        ("min-p", float, 0.01, ""),
        ("max-tokens", int, 1024, "longest completion"),
        ("seed", int, 3407, "from which each completion's own is derived"),
    ):
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--train", metavar="FILE", help="training set to look for in the benchmarks"
    )
    parser.add_argument(
        "--against", metavar="NAME", help="model of the difference plot (the first one)"
    )
    parser.set_defaults(run=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    from sage_unsloth import evaluate
    from sage_unsloth.compare import summary
    from sage_unsloth.engines import SamplingConfig
    from sage_unsloth.sources import read_file

    models = [evaluate.parse_model(text) for text in options.models]
    engine = evaluate.choose_engine() if options.engine == "auto" else options.engine
    config = SamplingConfig(
        num_samples=options.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_completion_length=options.max_tokens,
        batch_size=options.batch or evaluate.BATCH_SIZES[engine],
        seed=options.seed,
    )
    result = evaluate.evaluate(
        models,
        [evaluate.parse_benchmark(t, options.data, options.problems) for t in options.benchmarks],
        options.out,
        config,
        engine=engine,
        training=read_file(options.train) if options.train else (),
        against=options.against,
    )
    print(f"\n{summary(result)}\n\nTables and figures: {options.out}")
    return 0


def _add_compare(commands) -> None:
    parser = commands.add_parser(
        "compare", help="the same report on any record sets that are on disk"
    )
    parser.add_argument("sets", nargs="+", help=".jsonl files of record sets, or folders with some")
    parser.add_argument("--out", default="runs/comparison", help="folder (default: %(default)s)")
    parser.add_argument(
        "--against", metavar="NAME", help="model of the difference plot (the first one)"
    )
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    from sage_unsloth import compare

    result = compare.compare(options.sets, options.out, options.against)
    print(f"{compare.summary(result)}\n\nTables and figures: {options.out}")
    return 0


def _add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor", help="versions, device, memory, patch contract: what is missing, and the remedy"
    )
    parser.set_defaults(run=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from sage_unsloth import doctor

    return 1 if doctor.run() else 0


if __name__ == "__main__":
    sys.exit(main())
