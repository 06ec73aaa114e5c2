"""Run a queue of variants in one process, one run after another; resumable at any point.

    python -m research.variants.run --out runs/variants --queue QUEUE.txt

Each line of the queue is `VARIANT ALGORITHM=STRENGTH,… SEED,…`; empty lines and those that begin
with # are skipped, and the file is read again before each run. `--rates` only samples the SFT
model on the training rows, for the variant `by-rate`. Ended by Ctrl-C or SIGTERM it saves the run
in hand, and the same command goes on.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from research.variants.design import (
    RATES,
    SAMPLES,
    SFT,
    Variant,
    VariantRun,
    load_variant,
    queue_runs,
    result_path,
)
from sage_unsloth.grading.checker import Grade
from sage_unsloth.models.device import release_memory
from sage_unsloth.models.embedded import settle_process
from sage_unsloth.models.loading import load_policy
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.runs.stopping import handle_stop_signals
from sage_unsloth.runs.text import log_to_terminal
from sage_unsloth.sampling.engines import TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.study.plan import SERIES
from sage_unsloth.study.tasks import Task
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics

RATE_SAMPLES = 64
logger = logging.getLogger(__name__)


def run_queue(out: Path, queue: Path) -> None:
    """Every run of the queue that has no result yet, in order, the SFT model of each before it.

    The file is read again before each run, so it may be changed meanwhile.
    """
    while run := next_run(out, queue):
        variant = load_variant(run.variant)
        folder = prepare(out, variant)
        for step in (None, run):  # None is the SFT model
            path = result_path(folder, step)
            if not path.exists():
                logger.info("%s: %s", variant.start, path.stem)
                write_json(path, carry_out(variant, step, folder))


def next_run(out: Path, queue: Path) -> VariantRun | None:
    """The first run of the queue that has no result; None if all have one."""
    for line in queue.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        for run in queue_runs(line):
            if not result_path(out / load_variant(run.variant).start, run).exists():
                return run
    return None


def task_settings(task: Task) -> dict[str, Any]:
    """What must be equal for a folder of runs to be resumed."""
    assert task.sft is not None
    rlvr_settings = asdict(task.rlvr)
    del rlvr_settings["seed"]  # each run's own
    return {
        "sft": asdict(task.sft),
        "rlvr": rlvr_settings,
        "sampling": asdict(task.sampling),
        "task": task.name,
        "sets": {benchmark.name: [len(benchmark.rows), SAMPLES] for benchmark in task.benchmarks},
    }


def prepare(out: Path, variant: Variant) -> Path:
    """The folder of a variant's SFT model, which is trained if it is not there."""
    task, folder = variant.task, out / variant.start
    assert task.sft is not None
    open_run(folder, task_settings(task) | {"command": "variants"})
    for name in ("samples", "results"):
        (folder / name).mkdir(exist_ok=True)
    if not (folder / "sft" / "model").is_dir():
        sft(task.sft, variant.base(out / "bases"), list(task.sft_rows), folder / "sft")
    return folder


def carry_out(variant: Variant, run: VariantRun | None, out: Path) -> dict[str, Any]:
    """Train and evaluate one run, or evaluate the SFT model; what its result file holds."""
    task, merged, adapter = variant.task, out / "sft" / "model", None
    name = result_path(out, run).stem
    training = {}
    if run is not None:
        config, guide = run.configure(task.rlvr)
        rows, folder = list(task.rows), out / name
        adapter = rlvr(config, merged, rows, folder, guide, name, verifier=task.verifier)
        metrics = read_metrics(folder)
        training = {
            key: [_rounded(step.get(source)) for step in metrics] for key, source in SERIES.items()
        }
    release_memory()
    (test,) = task.benchmarks
    records = sample_and_grade(
        replace(task.sampling, num_samples=SAMPLES),
        TransformersEngine(*load_policy(merged, adapter=adapter)),
        test.rows,
        out / "samples" / f"{name}.test.jsonl",
        model=name,
        benchmark=f"{task.name}-test",
        checker=test.checker,
    )
    return {
        "run": None if run is None else asdict(run),
        "sets": {"test": count_records(variant.way, test.rows, records)},
        "training": training,
        "environment": environment(),
    }


def count_records(way: str, rows: Sequence[dict], records: Sequence[dict]) -> dict[str, Any]:
    """Correct completions of each problem, those by one way (`rare`), and those that are both.

    Lists in the order of the rows; and the mean length and the share in format.
    """
    place = {row["id"]: number for number, row in enumerate(rows)}
    counts = {name: np.zeros(len(rows), int) for name in ("correct", "rare", "rare_correct")}
    for record in records:
        at, right = place[record["problem_id"]], record["grade"] == Grade.CORRECT
        rare = arithmetic.route(record["completion"]) == way
        counts["correct"][at] += right
        counts["rare"][at] += rare
        counts["rare_correct"][at] += right and rare
    result: dict[str, Any] = {name: values.tolist() for name, values in counts.items()}
    for name, column in (
        ("mean_tokens", [record["num_tokens"] for record in records]),
        ("in_format", [record["extracted"] is not None for record in records]),
    ):
        result[name] = _rounded(float(np.mean(column)))
    return result


def _rounded(value: float | None) -> float | None:
    """Five significant digits: what the series are good for."""
    return None if value is None else float(f"{value:.5g}")


def sample_rates(out: Path) -> None:
    """Write `RATES`: the SFT model's correct samples of each training problem."""
    variant = load_variant("skewed")
    folder = prepare(out, variant)
    task = variant.task
    records = sample_and_grade(
        replace(task.sampling, num_samples=RATE_SAMPLES),
        TransformersEngine(*load_policy(folder / "sft" / "model")),
        list(task.rows),
        folder / "samples" / f"{SFT}.train.jsonl",
        model=SFT,
        benchmark=f"{task.name}-train",
        checker=task.verifier,
    )
    correct = dict.fromkeys((row["id"] for row in task.rows), 0)
    for record in records:
        correct[record["problem_id"]] += record["grade"] == Grade.CORRECT
    recorded = {"num_samples": RATE_SAMPLES, "correct": correct, "environment": environment()}
    write_json(RATES, recorded)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of models and runs")
    parser.add_argument("--queue", type=Path, help="file of the queue")
    parser.add_argument("--rates", action="store_true", help="only sample the training rows")
    options = parser.parse_args(arguments)
    log_to_terminal()
    logging.getLogger().setLevel(logging.INFO)
    # Unsloth patches what is imported after it
    from sage_unsloth.trainers.loading import load_unsloth

    load_unsloth()
    settle_process()
    options.out.mkdir(parents=True, exist_ok=True)
    with handle_stop_signals(), exclusive_lock(options.out / "queue"):
        if options.rates:
            sample_rates(options.out)
        else:
            run_queue(options.out, options.queue)
    return 0


if __name__ == "__main__":
    sys.exit(main())
