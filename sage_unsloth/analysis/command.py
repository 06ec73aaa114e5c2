"""The command `analyze`."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sage_unsloth.problems.options import add_columns, column_options

if TYPE_CHECKING:
    from sage_unsloth.objective.protocols import Guide

# The analysis and its libraries are imported when the command runs: `--help` needs none of them.
RESPONSES = 64  # as in `report.analyze`


def add_analyze(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "analyze",
        help="analyze finished runs: patterns, training dynamics, case studies, perplexity, where "
        "the guide acts",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folders of quickstart, train or evaluate, or record sets (.jsonl)",
    )
    parser.add_argument("--out", default="runs/analysis", help="folder (default: %(default)s)")
    parser.add_argument(
        "--against", metavar="NAME", help="compare the others with this model (default: the first)"
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
        help="score the responses with this baseline model; resumes after a stop",
    )
    parser.add_argument(
        "--responses",
        type=int,
        default=RESPONSES,
        help="responses to score for each problem and model (default: %(default)s)",
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="score the case studies, or a run's last completions, under runs that had a guide, "
        "and show its tokens",
    )
    parser.add_argument(
        "--guide",
        metavar="MODULE:NAME",
        help="custom guide or algorithm of these runs, for --page (default: as in run.json)",
    )
    parser.add_argument(
        "--path",
        metavar="FOLDER",
        help="local copies of the benchmarks, for the texts of the problems",
    )
    parser.add_argument(
        "--benchmarks",
        nargs="+",
        default=[],
        metavar="NAME=FILE",
        help="benchmark files, as for evaluate, if the records lack the problems' texts",
    )
    add_columns(parser)
    parser.set_defaults(act=_analyze)


def _analyze(options: argparse.Namespace) -> int:
    from sage_unsloth.analysis.report import analyze
    from sage_unsloth.analysis.traces import own_algorithm
    from sage_unsloth.evaluation.evaluator import check_columns_are_used, parse_benchmark
    from sage_unsloth.runs.record import read_record
    from sage_unsloth.training.stage import read_metrics

    patterns, columns = _parse_patterns(options.pattern), column_options(options)
    benchmarks = [parse_benchmark(text, None, None, columns) for text in options.benchmarks]
    check_columns_are_used(options.benchmarks, columns)
    out = Path(options.out)
    before = _versions(out)
    result = analyze(
        options.runs,
        out,
        patterns=patterns,
        against=options.against,
        baseline=options.perplexity,
        responses=options.responses,
        page=options.page,
        data=options.path,
        known={benchmark.name: benchmark for benchmark in benchmarks},
        guide=None if options.guide is None else _own_guide(options.guide),
    )
    print(_list_files(out, before))
    folders = [Path(folder) for folder in result["runs"].values()]
    records = [record for f in folders if (record := read_record(f)) is not None]
    # The page shows no guide that needs a teacher.
    guided = not any(record["settings"].get("teacher") for record in records) and any(
        row.get("sage/share_touched") for f in folders for row in read_metrics(f)
    )
    own = next(filter(None, map(own_algorithm, records)), None)
    if guided and not options.page and options.guide is None:
        options.guide = own
    starts = [record["model_path"] for record in records if result["benchmarks"]]
    next_step = _next_step(options, patterns, guided=guided, starts=starts)
    if next_step:
        print(next_step)
    return 0


def _parse_patterns(texts: list[str]) -> dict[str, str]:
    """`["NAME=REGEX"]` as a dict; ValueError for another form."""
    patterns = {}
    for text in texts:
        name, equals, expression = text.partition("=")
        if not (equals and name and expression):
            raise ValueError(f"--pattern takes NAME=REGEX, got {text!r}")
        patterns[name] = expression
    return patterns


def _own_guide(reference: str) -> "Guide":
    """The guide of `module:name`; ValueError if there is none."""
    from sage_unsloth.training.own_algorithms import named_algorithm

    guide = named_algorithm(reference).guide
    if guide is None:
        raise ValueError(f"--guide must name a guide, but the algorithm {reference} has none")
    return guide


def _versions(folder: Path) -> dict[Path, tuple[int, int]]:
    """Inode and modification time of every file.

    Only compared for equality, because clocks may be set back.
    """
    return {f: (f.stat().st_ino, f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()}


def _list_files(out: Path, before: dict[Path, tuple[int, int]]) -> str:
    """Lists the files of this run, and those of earlier ones."""
    after = {str(file.relative_to(out)): version for file, version in _versions(out).items()}
    earlier = {str(file.relative_to(out)): version for file, version in before.items()}
    made = sorted(
        name
        for name in after
        if name.endswith((".png", ".html", ".csv", ".json", ".jsonl"))
        and not name.endswith(".baseline.json")
    )
    new = [name for name in made if after[name] != earlier.get(name)]
    old = [name for name in made if name not in new]
    return f"\nWritten to {out}: {', '.join(new)}" + (
        f"\nOf an earlier run: {', '.join(old)}" if old else ""
    )


def _next_step(
    options: argparse.Namespace, patterns: dict[str, str], *, guided: bool, starts: Sequence[str]
) -> str:
    """The command that adds what is missing: a guide's tokens, then perplexity, or "".

    Perplexity is scored by the model that training began with, the first of `starts`.
    """
    words = ["analyze", *options.runs, "--out", options.out]
    given = {"--against": options.against, "--path": options.path, "--guide": options.guide}
    responses = None if options.responses == RESPONSES else str(options.responses)
    given |= {"--perplexity": options.perplexity, "--responses": responses}
    for flag, value in given.items():
        words += [] if value is None else [flag, value]
    for name, pattern in patterns.items():
        words += ["--pattern", f"{name}={pattern}"]
    if options.benchmarks:
        words += ["--benchmarks", *options.benchmarks, *column_options(options).options()]
    words += ["--page"] if options.page else []
    again = f"\nNext: python -m sage_unsloth {shlex.join(words)}"
    if guided and not options.page:
        return f"{again} --page"
    if starts and not options.perplexity:
        return f"{again} --perplexity {shlex.quote(starts[0])}"
    return ""
