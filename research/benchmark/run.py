"""Every algorithm over training seeds on one task, in parallel processes, resumable at any point.

SFT runs once. Each run (an algorithm and a seed) is RL in a folder of its own and an evaluation on
every set of the task; one seed gives every algorithm the same rows in the same order and the same
first completions, so differences are taken seed by seed. Workers are processes that take the next
run that nobody holds; a run belongs to one of them by a lock, also to one that is still saving when
its call was killed and the next call begins.
"""

import contextlib
import json
import logging
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from research.benchmark.design import BenchmarkConfig
from research.benchmark.publish import publish
from research.benchmark.records import DESIGN, result_path
from research.benchmark.tasks import Task
from research.benchmark.text import power_lines
from sage_unsloth.models.device import has_gpu
from sage_unsloth.planning.plan import duration
from sage_unsloth.runs.children import end_children, start_child
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import open_run

WORKER = "research.benchmark.worker"

logger = logging.getLogger(__name__)


class BenchmarkError(RuntimeError):
    """A worker failed."""


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
        RuntimeError: a worker failed; its log is named, and what others finished is kept.
    """
    task = config.load_task()
    settings = task_settings(task) | {"command": "benchmark"}
    if config.beta is not None:
        settings["beta"] = config.beta

    def announce(workers: int) -> str:
        return plan(config, task, Path(out), workers)

    with run_all(out, config, task, settings, WORKER, workers, announce) as folder:
        return publish(folder, config)


def task_settings(task: Task) -> dict[str, Any]:
    """What must be equal for a folder of runs to be resumed, whatever is compared."""
    settings = {
        name: json.loads(json.dumps(asdict(getattr(task, name))))
        for name in ("sft", "rlvr", "sampling")
    }
    del settings["rlvr"]["seed"]  # each run's own
    settings["task"] = task.name
    settings["sets"] = {name: [len(one.rows), one.num_samples] for name, one in task.sets.items()}
    return settings


@contextlib.contextmanager
def run_all(
    out: str | Path,
    design: Any,
    task: Task,
    settings: dict[str, Any],
    worker: str,
    workers: int | None,
    announce: Callable[[int], str],
) -> Iterator[Path]:
    """SFT, then every run of a design, in worker processes; the folder, held until the block ends.

    Args:
        out: folder.
        design: a dataclass with `runs()`; recorded in `design.json`, where workers read it.
        task: what is trained and answered.
        settings: those in which a folder that is resumed must agree.
        worker: the module that workers run, with the folder and perhaps `--sft`.
        workers: processes; None takes one for each core, or one in all where there is a GPU.
        announce: from the number of workers to what is logged first.
    """
    if workers is None:
        workers = 1 if has_gpu() else len(os.sched_getaffinity(0))
    with locked(out):
        out = open_run(out, settings)
        write_json(out / DESIGN, asdict(design))
        runs = design.runs()
        logger.info("%s", announce(workers))
        for folder in ("samples", "results", "workers"):
            (out / folder).mkdir(exist_ok=True)
        if not (out / "sft" / "model").is_dir():
            _watch(out, task, [], [_start(out, worker, 0, "--sft")])
        while left := [run for run in (None, *runs) if not result_path(out, run).exists()]:
            count = min(workers, len(left))
            _watch(out, task, runs, [_start(out, worker, number) for number in range(count)])
            time.sleep(1)  # a worker of a killed call may hold one until it has saved it
        yield out


def plan(config: BenchmarkConfig, task: Task, out: Path, workers: int) -> str:
    """What will be done, how long it should take, and which differences it can find."""
    runs = config.runs()
    left = [run for run in runs if not result_path(out, run).exists()]
    samples = sum(len(one.rows) * one.num_samples for one in task.sets.values())
    each = task.rlvr.max_steps * task.seconds["step"] + samples * task.seconds["completion"]
    sets = ", ".join(
        f"{len(one.rows)} {one.title} x {one.num_samples}" for one in task.sets.values()
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


def _start(out: Path, worker: str, number: int, *arguments: str) -> tuple[subprocess.Popen, Path]:
    """A worker and its log; it ends itself when this process ends and so closes its input."""
    log = out / "workers" / f"worker-{number}.log"
    cache = out / "workers" / f"compiled-{number}"
    return start_child([worker, str(out), *arguments], log, cache), log


def _watch(out: Path, task: Task, runs: Sequence[Any], workers: list) -> None:
    """Waits for the workers and shows their progress; passes an interruption on to them."""
    from sage_unsloth.runs.progress import progress

    steps = task.rlvr.max_steps
    try:
        with progress(
            total=steps * max(1, len(runs)), desc="runs" if runs else "SFT", unit="step"
        ) as bar:
            while any(process.poll() is None for process, _ in workers):
                finished = [run for run in runs if result_path(out, run).exists()]
                going = [run for run in runs if run not in finished]
                bar.n = steps * len(finished) + sum(_steps_done(out / run.name) for run in going)
                bar.set_postfix_str(f"{len(finished)} of {len(runs)} runs" if runs else "")
                bar.refresh()
                time.sleep(1)
    except BaseException:
        end_children([process for process, _ in workers])
        raise
    for process, log in workers:
        if process.returncode:
            tail = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()[-8:]
            raise BenchmarkError(
                f"every worker must end with 0; one ended with {process.returncode}, and its log "
                f"{log} ends:\n" + "\n".join(tail) + "\nwhat was finished is kept; the same "
                "command resumes"
            )


def _steps_done(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0
