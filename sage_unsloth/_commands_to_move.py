"""Commands on their way to the modules that they start."""

import argparse


def add_evaluate(commands) -> None:
    parser = commands.add_parser(
        "evaluate",
        help="pass@k with intervals of models on benchmarks; goes on where it was stopped",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        required=True,
        metavar="NAME=PATH[+ADAPTER]",
        help="model folder or hub id, and a LoRA folder to put on it; one name twice: training "
        "seeds of one method",
    )
    parser.add_argument(
        "--benchmarks",
        nargs="+",
        required=True,
        metavar="NAME[=FILE]",
        help="aime, amc23, math500-l5, minerva, knights-and-knaves:3, arithmetic, "
        "reasoning-gym:TASK and so on; "
        "with a file: a local copy, or problems of your own",
    )
    parser.add_argument(
        "--data", metavar="FOLDER", help="local copies, NAME.jsonl and so on; no network"
    )
    parser.add_argument("--out", default="runs/evaluation", help="folder (default: %(default)s)")
    parser.add_argument(
        "--n", type=int, default=256, help="samples of each problem (default: %(default)s)"
    )
    parser.add_argument("--problems", type=int, help="only the first so many of each benchmark")
    parser.add_argument(
        "--engine",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="auto: vllm where there are a GPU and the package",
    )
    parser.add_argument("--batch", type=int, help="completions drawn together (64; with vllm 1,024)")
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
    parser.set_defaults(act=_evaluate)


def _evaluate(options: argparse.Namespace) -> int:
    from sage_unsloth.evaluation import evaluator
    from sage_unsloth.evaluation.report import summary
    from sage_unsloth.sampling.engines import SamplingConfig

    models = [evaluator.parse_model(text) for text in options.models]
    engine = evaluator.choose_engine(options.engine)
    config = SamplingConfig(
        num_samples=options.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        max_completion_length=options.max_tokens,
        batch_size=options.batch or evaluator.BATCH_SIZES[engine],
        seed=options.seed,
    )
    result = evaluator.evaluate(
        models,
        [evaluator.parse_benchmark(t, options.data, options.problems) for t in options.benchmarks],
        options.out,
        config,
        engine=engine,
        training=_training_rows(options.train) if options.train else (),
        against=options.against,
    )
    print(f"\n{summary(result)}\n\nTables and figures: {options.out}")
    return 0


def _training_rows(path: str) -> list[dict]:
    """A training set's problems, in our columns or in DAPO's."""
    from sage_unsloth.problems.sources import check_columns, read_file

    rows = [
        {"problem": row["prompt"]} if "problem" not in row and "prompt" in row else row
        for row in read_file(path)
    ]
    check_columns(rows, ("problem",))
    return rows


def add_compare(commands) -> None:
    parser = commands.add_parser(
        "compare", help="the same report on any record sets that are on disk"
    )
    parser.add_argument("sets", nargs="+", help=".jsonl files of record sets, or folders with some")
    parser.add_argument("--out", default="runs/comparison", help="folder (default: %(default)s)")
    parser.add_argument(
        "--against", metavar="NAME", help="model of the difference plot (the first one)"
    )
    parser.set_defaults(act=_compare)


def _compare(options: argparse.Namespace) -> int:
    from sage_unsloth.evaluation import report as compare

    result = compare.compare(options.sets, options.out, options.against)
    print(f"{compare.summary(result)}\n\nTables and figures: {options.out}")
    return 0


def add_analyze(commands) -> None:
    parser = commands.add_parser(
        "analyze",
        help="patterns, training dynamics, case studies, perplexity and where the guide acts, of "
        "finished runs",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders of quickstart, train, grid or evaluate, or record sets (.jsonl)",
    )
    parser.add_argument("--out", default="runs/analysis", help="folder (default: %(default)s)")
    parser.add_argument(
        "--against", metavar="NAME", help="model that others are compared with (the first one)"
    )
    parser.add_argument(
        "--pattern",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=REGEX",
        help="further patterns to look for in correct solutions",
    )
    parser.add_argument(
        "--perplexity",
        metavar="PATH[+ADAPTER]",
        help="score the responses under this baseline model; goes on where it was stopped",
    )
    parser.add_argument(
        "--responses",
        type=int,
        default=64,
        help="of each problem and model that are scored (default: %(default)s)",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="score the case studies under the runs that had a guide, and show its tokens",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="local copies of the benchmarks, for the texts of the problems",
    )
    parser.set_defaults(act=_analyze)


def _analyze(options: argparse.Namespace) -> int:
    from sage_unsloth.analysis.report import analyze

    patterns = {}
    for text in options.pattern:
        name, equals, expression = text.partition("=")
        if not (equals and name and expression):
            raise ValueError(f"--pattern takes NAME=REGEX; got {text!r}")
        patterns[name] = expression
    analyze(
        options.runs,
        options.out,
        patterns=patterns,
        against=options.against,
        baseline=options.perplexity,
        responses=options.responses,
        page=options.page,
        data=options.data,
    )
    return 0


def add_benchmark(commands) -> None:
    parser = commands.add_parser(
        "benchmark",
        help="every algorithm over training seeds, with a verdict on each claim of the paper",
    )
    parser.add_argument(
        "--model",
        default="arithmetic",
        help="the task: arithmetic, or smollm2 with problems of reasoning-gym (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--algorithms",
        nargs="+",
        default=[],
        metavar="NAME",
        help="rows of train --list, or all; grpo must be among them (default: the task's, which "
        "two cores train in 100 minutes)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        metavar="COUNT",
        help="training seeds of each (default: the task's, 8 for arithmetic and 1 for smollm2)",
    )
    parser.add_argument(
        "--first-seed", type=int, default=1, help="the seeds count from here (default: %(default)s)"
    )
    parser.add_argument(
        "--grid-seeds",
        type=int,
        metavar="COUNT",
        help="of these, how many train the threshold x ratio grid (default: the task's; 0 for none)",
    )
    parser.add_argument(
        "--beta",
        type=float,
        help="KL coefficient of all algorithms that have a KL term (default: the paper's 0.05)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        help="processes (default: one for each core, or one where there is a GPU)",
    )
    parser.add_argument(
        "--out",
        help="folder; the same command goes on where it stopped, and takes more seeds and "
        "algorithms (default: runs/benchmark-MODEL)",
    )
    parser.add_argument(
        "--report", action="store_true", help="only report on the seeds that are complete"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="two steps of each, and only shows that everything works",
    )
    parser.set_defaults(act=_benchmark)


def _benchmark(options: argparse.Namespace) -> int:
    from pathlib import Path

    from sage_unsloth.lab.evidence import report as evidence_report
    from sage_unsloth.lab.evidence import run as evidence
    from sage_unsloth.lab.evidence.tasks import get_task

    for name in ("seeds", "workers"):
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be >= 1; got {value}")
    count = options.seeds or get_task(options.model).num_seeds
    names = evidence.all_algorithms() if options.algorithms == ["all"] else options.algorithms
    config = evidence.BenchmarkConfig(
        task=options.model,
        algorithms=tuple(names),
        seeds=tuple(range(options.first_seed, options.first_seed + count)),
        grid_seeds=options.grid_seeds,
        beta=options.beta,
        smoke=options.smoke,
    )
    out = Path(options.out or f"runs/benchmark-{options.model}")
    if options.report:
        evidence_report.write(out, config)
    else:
        evidence.benchmark(out, config, options.workers)
    return 0


def add_grid(commands) -> None:
    parser = commands.add_parser(
        "grid", help="threshold x ratio of the Branch guide on the embedded task, beside plain GRPO"
    )
    parser.add_argument(
        "--out",
        default="runs/grid",
        help="folder; the same command goes on where it stopped, and takes cells that are there "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--thresholds",
        type=float,
        nargs="+",
        default=[0.8, 1.2, 2.0],
        help="nats (default: the paper's, %(default)s)",
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="+",
        default=[0.1, 0.3, 0.5],
        help="per nat (default: the paper's, %(default)s)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[3407],
        help="training seeds of every cell (default: %(default)s)",
    )
    parser.add_argument(
        "--floor-seeds",
        type=int,
        default=3,
        metavar="COUNT",
        help="training seeds of plain GRPO, the cells' own and more: its spread is the noise "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, help="optimizer steps of each run (default: the quickstart's 100)"
    )
    parser.add_argument(
        "--n", type=int, help="samples of each problem (default: the quickstart's 64)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a minute or two, and only shows that everything works"
    )
    parser.set_defaults(act=_grid)


def _grid(options: argparse.Namespace) -> int:
    from dataclasses import replace

    from sage_unsloth import quickstart
    from sage_unsloth.lab.grid import GridConfig, grid

    run = quickstart.smoke_config() if options.smoke else quickstart.QuickstartConfig()
    if options.steps is not None:
        run = replace(run, rlvr=replace(run.rlvr, max_steps=options.steps))
    if options.n is not None:
        run = replace(run, sampling=replace(run.sampling, num_samples=options.n))
    more = range(max(options.seeds) + 1, max(options.seeds) + 1 + options.floor_seeds)
    grid(
        options.out,
        GridConfig(
            thresholds=tuple(options.thresholds),
            ratios=tuple(options.ratios),
            seeds=tuple(options.seeds),
            floor_seeds=(*options.seeds, *more)[: max(len(options.seeds), options.floor_seeds)],
            run=run,
        ),
    )
    return 0


def add_bench(commands) -> None:
    bench = commands.add_parser(
        "bench",
        help="what a guide costs in time and memory, beside GRPO and a loss that keeps all logits",
    )
    bench.add_argument(
        "--small",
        action="store_true",
        help="minutes on a CPU (the default without a GPU): hidden 256, length 128",
    )
    bench.add_argument("--hidden", type=int, nargs="+", help="hidden sizes (3584 on a GPU)")
    bench.add_argument("--length", type=int, nargs="+", help="completion tokens (2048 on a GPU)")
    bench.add_argument("--vocabulary", type=int, nargs="+", help="tokens (151936)")
    bench.add_argument("--batch", type=int, nargs="+", help="completions of a pass (8)")
    bench.add_argument(
        "--variants",
        nargs="+",
        metavar="NAME",
        help="algorithms beside grpo, and materialised (default: the paper's guides, and "
        "materialised)",
    )
    bench.add_argument(
        "--rounds", type=int, default=4, help="over all variants (default: %(default)s)"
    )
    bench.add_argument(
        "--steps",
        type=int,
        default=2,
        help="whole optimizer steps of each variant; 0: the loss alone (default: %(default)s)",
    )
    bench.add_argument(
        "--growth",
        action="store_true",
        help="also how cost grows with length, batch, vocabulary, iterations, accumulation",
    )
    bench.add_argument(
        "--log-entropy",
        action="store_true",
        help="every variant asks for entropies, as the training stages do",
    )
    bench.add_argument("--threads", type=int, default=1, help="of the CPU (default: %(default)s)")
    bench.add_argument("--out", default="runs/bench", help="folder (default: %(default)s)")
    bench.set_defaults(act=_bench)


def _bench(options: argparse.Namespace) -> int:
    from itertools import product

    from sage_unsloth.figures import show_table
    from sage_unsloth.lab.cost import report as bench_report
    from sage_unsloth.lab.cost import run as bench

    default = bench.SMALL if options.small else bench.default_size()
    fields = ("hidden", "vocabulary", "length", "batch")
    values = (getattr(options, name) or [getattr(default, name)] for name in fields)
    sizes = [bench.Size(**dict(zip(fields, row, strict=True))) for row in product(*values)]
    report = bench.run(
        options.out,
        sizes,
        names=options.variants,
        rounds=options.rounds,
        steps=options.steps,
        growth=options.growth,
        threads=options.threads,
        log_entropy=options.log_entropy,
    )
    print(f"\n{bench_report.conditions(report)}\n")
    for title, rows in bench_report.tables(report).items():
        print(title)
        show_table(rows)
        print()
    print(f"Written to {options.out}: bench.json, bench.png, bench.csv")
    if not options.growth:
        print("Next: the same with --growth, or other sizes: --hidden 1536 --length 256 512")
    return 0


def add_quickstart(commands) -> None:
    parser = commands.add_parser(
        "quickstart", help="SFT, GRPO, SAGE-Branch and pass@k on the embedded task"
    )
    parser.add_argument(
        "--out", default="runs/quickstart", help="folder of the run (default: %(default)s)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a minute's run that only shows that it works"
    )
    parser.set_defaults(act=_quickstart)


def _quickstart(options: argparse.Namespace) -> int:
    from sage_unsloth import quickstart

    quickstart.run(options.out, quickstart.smoke_config() if options.smoke else None)
    return 0


def add_doctor(commands) -> None:
    parser = commands.add_parser(
        "doctor", help="versions, device, memory, patch contract: what is missing, and the remedy"
    )
    parser.set_defaults(act=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from sage_unsloth import doctor

    return 1 if doctor.run() else 0
