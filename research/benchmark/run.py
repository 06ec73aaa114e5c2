"""Every algorithm over training seeds on one task, in parallel processes, resumable at any point.

SFT runs once. Each run (an algorithm and a seed) is RL in a folder of its own and an evaluation on
every set of the task; one seed gives every algorithm the same rows in the same order and the same
first completions, so differences are taken seed by seed. Each run is a process of the package's own
runner (`training.side_by_side`).
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from research.benchmark.design import SFT, BenchmarkConfig, Design
from research.benchmark.publish import publish
from research.benchmark.records import DESIGN, result_path
from research.benchmark.tasks import Task
from research.benchmark.text import power_lines
from sage_unsloth.models.device import has_gpu
from sage_unsloth.planning.plan import duration
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import open_run
from sage_unsloth.training.quickstart_plan import SECONDS
from sage_unsloth.training.side_by_side import Job, run_side_by_side

PROCESSES = "processes"
"""The folder of what processes log while they run."""

logger = logging.getLogger(__name__)


def benchmark(
    out: str | Path, config: BenchmarkConfig, workers: int | None = None
) -> dict[str, Any]:
    """Run or resume the benchmark in the folder `out`, and return what `report.json` holds.

    Leaves `records.json` (every count that the report rests on), `report.json`, `report.md`,
    figures with their tables, and a folder for each run with its metrics and adapter; `samples/`
    has the completions.

    Args:
        out: folder.
        config: what is run; a later call may add algorithms and seeds.
        workers: processes; None takes one for each core, or one in all where there is a GPU.

    Raises:
        ValueError: the folder holds a benchmark with other settings, or another process runs it.
        SideBySideError: a run failed; its log is named, and what others finished is kept.
    """
    task = config.load_task()
    settings = task_settings(task) | {"command": "benchmark"}
    if config.beta is not None:
        settings["beta"] = config.beta

    def announce(workers: int) -> str:
        return plan(config, task, Path(out), workers)

    with run_all(out, config, task, settings, workers, announce) as folder:
        return publish(folder, config)


def task_settings(task: Task) -> dict[str, Any]:
    """What must be equal for a folder of runs to be resumed, whatever is compared."""
    settings = {
        name: json.loads(json.dumps(asdict(getattr(task, name))))
        for name in ("sft", "rlvr", "sampling")
    }
    del settings["rlvr"]["seed"]  # each run's own
    settings["task"] = task.name
    settings["sets"] = {
        name: [len(item.rows), item.num_samples] for name, item in task.sets.items()
    }
    return settings


@contextlib.contextmanager
def run_all(
    out: str | Path,
    design: Any,
    task: Task,
    settings: dict[str, Any],
    workers: int | None,
    announce: Callable[[int], str],
) -> Iterator[Path]:
    """SFT, then every run of a design, each in a process; the folder, held until the block ends.

    Args:
        out: folder.
        design: a dataclass that is a `Design`; recorded in `design.json`.
        task: what is trained and answered.
        settings: those in which a folder that is resumed must agree.
        workers: processes at a time; None takes one for each core, or one where there is a GPU.
        announce: from the number of workers to what is logged first.
    """
    if workers is None:
        workers = 1 if has_gpu() else len(os.sched_getaffinity(0))
    with exclusive_lock(out):
        out = open_run(out, settings)
        write_json(out / DESIGN, asdict(design))
        logger.info("%s", announce(workers))
        for folder in ("samples", "results"):
            (out / folder).mkdir(exist_ok=True)
        sft = _job(out, design, "sft", "train_sft", out / "sft" / "model", task.sft.max_steps)
        jobs = [
            _job(out, design, SFT if run is None else run.name, "record_run",
                 result_path(out, run), task.rlvr.max_steps if run else 0, run=run)
            for run in (None, *design.runs())
        ]  # fmt: skip
        for stage in ([sft], jobs):
            if left := [job for job in stage if not job.is_complete]:
                run_side_by_side(left, min(workers, len(left)), out / PROCESSES)
        shutil.rmtree(out / PROCESSES, ignore_errors=True)  # of an earlier call that failed
        yield out


def _job(
    out: Path, design: Design, name: str, function: str, result: Path, steps: int, **more: Any
) -> Job:
    return Job(
        name=name,
        work=f"research.benchmark.worker:{function}",
        arguments={"design": design, "out": out} | more,
        folder=out / name,
        result=result,
        max_steps=steps,
    )


def plan(config: BenchmarkConfig, task: Task, out: Path, workers: int) -> str:
    """What will be done, how long it should take, and which differences it can find."""
    runs = config.runs()
    left = [run for run in runs if not result_path(out, run).exists()]
    samples = sum(len(item.rows) * item.num_samples for item in task.sets.values())
    each = task.rlvr.max_steps * task.seconds["step"] + samples * task.seconds["completion"]
    each += SECONDS["start"]
    sets = ", ".join(
        f"{len(item.rows)} {item.title} x {item.num_samples}" for item in task.sets.values()
    )
    grid = len(runs) - len(config.algorithms) * len(config.seeds)
    return "\n".join(
        [
            f"Benchmark -> {out}  ({task.title})",
            f"  {len(config.algorithms)} algorithms x {len(config.seeds)} training seeds"
            + (
                f", and {grid} runs of the threshold x ratio grid ({config.grid_seeds} seeds)"
                if grid
                else ""
            ),
            f"  each: {task.rlvr.max_steps} steps of {task.rlvr.completions_per_step} "
            f"completions; samples: {sets}",
            *power_lines(config, task),
            f"Estimate: {duration((len(left) + 1) * each / workers)} for {len(left)} runs in "
            f"{workers} process{'es' * (workers > 1)} on idle cores; the bar shows this machine's "
            "own pace.",
            "Stop it whenever you like: the same command resumes it; a report on the seeds that "
            "are complete: --report.\n",
        ]
    )
