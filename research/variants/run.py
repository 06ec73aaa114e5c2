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
from dataclasses import replace
from pathlib import Path

from research.benchmark.design import SFT
from research.benchmark.records import result_path
from research.benchmark.run import task_settings
from research.benchmark.worker import carry_out
from research.variants.design import (
    RATES,
    Variant,
    VariantDesign,
    VariantRun,
    load_variant,
    queue_runs,
)
from sage_unsloth.models.embedded import settle_process
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.runs.stopping import ending
from sage_unsloth.runs.text import log_to_terminal

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
                logger.info("%s: %s", variant.start, SFT if step is None else step.name)
                write_json(path, carry_out(VariantDesign(run), variant.task, step, folder))


def next_run(out: Path, queue: Path) -> VariantRun | None:
    """The first run of the queue that has no result; None if all have one."""
    for line in queue.read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        for run in queue_runs(line):
            if not result_path(out / load_variant(run.variant).start, run).exists():
                return run
    return None


def prepare(out: Path, variant: Variant) -> Path:
    """The folder of a variant's SFT model, which is trained if it is not there."""
    from sage_unsloth.training.sft_stage import sft

    task, folder = variant.task, out / variant.start
    settings = task_settings(task) | {"command": "variants"}
    open_run(folder, settings)
    for name in ("samples", "results"):
        (folder / name).mkdir(exist_ok=True)
    if not (folder / "sft" / "model").is_dir():
        sft(task.sft, task.prepare(out / "bases"), task.sft_rows, folder / "sft")
    return folder


def sample_rates(out: Path) -> None:
    """Write `RATES`: the SFT model's correct samples of each training problem."""
    from sage_unsloth.grading.checker import Grade
    from sage_unsloth.models.loading import load_policy
    from sage_unsloth.sampling.engines import TransformersEngine
    from sage_unsloth.sampling.record_sets import sample_and_grade

    variant = load_variant("skewed")
    folder = prepare(out, variant)
    task = variant.task
    records = sample_and_grade(
        replace(task.sampling, num_samples=RATE_SAMPLES),
        TransformersEngine(*load_policy(folder / "sft" / "model")),
        task.train_rows,
        folder / "samples" / f"{SFT}.train.jsonl",
        model=SFT,
        benchmark=f"{task.name}-train",
        checker=task.checker,
    )
    correct = dict.fromkeys((row["id"] for row in task.train_rows), 0)
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
    with ending(), locked(options.out / "queue"):
        if options.rates:
            sample_rates(options.out)
        else:
            run_queue(options.out, options.queue)
    return 0


if __name__ == "__main__":
    sys.exit(main())
