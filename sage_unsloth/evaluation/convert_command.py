"""The command `convert`: results in the formats of other tools."""

import argparse
from pathlib import Path

FORMATS = ("inspect", "hub")


def add_convert(commands: argparse._SubParsersAction) -> None:
    """Adds the parser of `convert`."""
    parser = commands.add_parser(
        "convert", help="record sets as logs of inspect_ai, or as result files of the hub"
    )
    parser.add_argument(
        "sets", nargs="+", metavar="SETS", help=".jsonl files of record sets, or folders with some"
    )
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument("--out", required=True, help="folder")
    parser.add_argument(
        "--task",
        nargs="+",
        default=[],
        metavar="BENCHMARK=TASK",
        help="for --to hub: task_id in the data set's eval.yaml (default: the benchmark's name)",
    )
    parser.set_defaults(act=_convert)


def _convert(options: argparse.Namespace) -> int:
    from sage_unsloth.evaluation.record_tables import read_texts
    from sage_unsloth.evaluation.report import compare, find_sets
    from sage_unsloth.evaluation.sample_logs import parse_pairs

    files, logs = find_sets(options.sets)
    if logs:
        raise ValueError(
            f"convert takes record sets, but {next(iter(logs))} is another tool's log, which only "
            "compare reads"
        )
    out = Path(options.out)
    if options.to == "inspect":
        from sage_unsloth.evaluation.inspect_writer import write_inspect_log

        for file in files:
            print(write_inspect_log(file, out, read_texts(file)))
        print(f"to look at them: inspect view --log-dir {out}")
        return 0
    from sage_unsloth.evaluation.hub_results import eval_results, write_eval_results

    tasks = parse_pairs(options.task, "--task BENCHMARK=TASK", "gsm8k=gsm8k")
    report = compare(files, out / "report")
    written = []
    for model in dict.fromkeys(row["model"] for row in report["table"]):
        entries, reasons = eval_results(report, model, tasks)
        written += write_eval_results(out / model, entries)
        for benchmark, reason in reasons.items():
            print(f"{model} on {benchmark}: nothing written, because {reason}")
    print("\n".join(map(str, written)) or "No result file was written.")
    return 0 if written else 1
