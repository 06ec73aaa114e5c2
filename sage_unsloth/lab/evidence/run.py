"""The command `benchmark`: every algorithm over training seeds on one task, in parallel processes,
resumable at any point.

SFT runs once. Each run (an algorithm and a seed) is RL in a folder of its own and an evaluation on
every set of the task; one seed gives every algorithm the same rows in the same order and the same
first completions, so differences are taken seed by seed. Workers are processes that take the next
run that nobody holds; a run belongs to one of them by a lock, also to one that is still saving when
its call was killed and the next call begins.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.grading.checker import Grade
from sage_unsloth.lab.evidence.tasks import Task, get_task
from sage_unsloth.lab.grid import RATIOS, THRESHOLDS
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.planning.plan import duration
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import HeldError, locked
from sage_unsloth.runs.record import environment, open_run
from sage_unsloth.runs.stopping import allow, ending
from sage_unsloth.runs.text import log_to_terminal
from sage_unsloth.training.algorithms import ALGORITHMS, Algorithm, get_algorithm

SFT = "sft"
UNWINDING = 600.0
"""Seconds for a worker to finish and save what it does; an end of this process, by a second Ctrl-C,
ends it sooner.
"""
SERIES = {
    "reward": "reward",
    "kl": "kl/ref_k3",
    "entropy": "sage/entropy",
    "grad_norm": "grad_norm",
    "guide_mean": "sage/guide_mean",
    "share_touched": "sage/share_touched",
    "mean_length": "completions/mean_length",
    "dead_groups": "frac_reward_zero_std",
}
"""Columns of a run's training series, and what the trainer calls them."""


@dataclass(frozen=True)
class Run:
    """One RL run: an algorithm and a seed, and the cell of the grid where it is one."""

    algorithm: str
    seed: int
    threshold: float | None = None
    ratio: float | None = None

    @property
    def name(self) -> str:
        cell = (
            "" if self.threshold is None else f"_threshold-{self.threshold:g}_ratio-{self.ratio:g}"
        )
        return f"{self.algorithm}{cell}_seed-{self.seed}"

    def row(self, beta: float | None = None) -> Algorithm:
        """What is trained; `beta` takes the place of the algorithm's own, where that is not 0."""
        algorithm = get_algorithm(self.algorithm)
        if beta is not None and algorithm.beta:
            algorithm = replace(algorithm, beta=beta)
        if self.threshold is None:
            return algorithm
        return replace(algorithm, guide=BranchGuide(threshold=self.threshold, ratio=self.ratio))


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What is run.

    Attributes:
        task: a name of `tasks.TASKS`.
        algorithms: rows of `ALGORITHMS`; empty takes the task's default set, which fits into 100
            minutes on two cores.
        seeds: training seeds of every algorithm; empty takes as many as the task has by default,
            from 1.
        grid_seeds: how many of the seeds train the threshold × ratio grid of the Branch guide; None
            takes the task's own number.
        beta: KL coefficient of every algorithm that has a KL term; None leaves each its own, the
            paper's .05.
        smoke: two steps of everything, to see that it works.

    Raises:
        ValueError: an unknown task or algorithm, one named twice, no seeds, `grpo` not among the
            algorithms, or one that needs a teacher.
    """

    task: str = "arithmetic"
    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    grid_seeds: int | None = None
    beta: float | None = None
    smoke: bool = False

    def __post_init__(self) -> None:
        task = self.load_task()
        if not self.algorithms:
            object.__setattr__(self, "algorithms", task.algorithms)
        if not self.seeds:
            object.__setattr__(self, "seeds", tuple(range(1, task.num_seeds + 1)))
        if self.grid_seeds is None:
            object.__setattr__(self, "grid_seeds", min(task.grid_seeds, len(self.seeds)))
        for name in ("algorithms", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different values, at least one; got {values}")
        for name in self.algorithms:
            guide = get_algorithm(name).guide
            if guide is not None and "teacher_logps" in guide.needs:
                raise ValueError(f"the benchmark has no teacher, which {name} needs; leave it out")
        if "grpo" not in self.algorithms:
            raise ValueError(
                f"grpo must be among the algorithms because all others are compared with it; got "
                f"{self.algorithms}"
            )
        if self.beta is not None and not self.beta > 0:
            raise ValueError(
                f"beta must be > 0, as grpo-no-kl is without the term; got {self.beta}"
            )
        if not 0 <= self.grid_seeds <= len(self.seeds):
            raise ValueError(
                f"grid_seeds must be in [0, {len(self.seeds)}], a number of the seeds; got "
                f"{self.grid_seeds}"
            )

    def load_task(self) -> Task:
        return get_task(self.task, smoke=self.smoke)

    def runs(self) -> list[Run]:
        """Seed by seed, so that at any time the seeds that are complete make a whole benchmark; the
        grid last.
        """
        runs = [Run(name, seed) for seed in self.seeds for name in self.algorithms]
        default = BranchGuide()
        for seed in self.seeds[: self.grid_seeds]:
            for threshold in THRESHOLDS:
                for ratio in RATIOS:
                    if (threshold, ratio) != (default.threshold, default.ratio):
                        runs.append(Run("sage-branch", seed, threshold, ratio))
                    elif "sage-branch" not in self.algorithms:
                        runs.append(Run("sage-branch", seed))
        return runs


def all_algorithms() -> tuple[str, ...]:
    """Every row of the table that needs no teacher."""
    return tuple(
        name
        for name, row in ALGORITHMS.items()
        if row.guide is None or "teacher_logps" not in row.guide.needs
    )


def benchmark(
    out: str | Path, config: BenchmarkConfig, workers: int | None = None
) -> dict[str, Any]:
    """Run or resume the benchmark in the folder `out`, print its report, and return what
    `report.json` holds.

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
    from sage_unsloth.lab.evidence import report as evidence_report
    from sage_unsloth.models.device import has_gpu

    task = config.load_task()
    settings = {
        name: json.loads(json.dumps(asdict(getattr(task, name))))
        for name in ("sft", "rlvr", "sampling")
    }
    del settings["rlvr"]["seed"]  # each run's own
    settings |= {"command": "benchmark", "task": task.name}
    if config.beta is not None:
        settings["beta"] = config.beta
    settings["sets"] = {name: [len(one.rows), one.num_samples] for name, one in task.sets.items()}
    if workers is None:
        workers = 1 if has_gpu() else len(os.sched_getaffinity(0))
    with locked(out):
        out = open_run(out, settings)
        write_json(out / "benchmark.json", asdict(config))
        runs = config.runs()
        print(plan(config, task, out, workers))
        for folder in ("samples", "results", "workers"):
            (out / folder).mkdir(exist_ok=True)
        if not (out / "sft" / "model").is_dir():
            _watch(out, task, [], [_start(out, 0, "--sft")])
        while left := [run for run in (None, *runs) if not result_path(out, run).exists()]:
            _watch(
                out, task, runs, [_start(out, number) for number in range(min(workers, len(left)))]
            )
            time.sleep(1)  # a worker of a killed call may hold one until it has saved it
        return evidence_report.write(out, config)


def plan(config: BenchmarkConfig, task: Task, out: Path, workers: int) -> str:
    """What will be done, how long it should take, and what it will be able to see."""
    from sage_unsloth.lab.evidence import report as evidence_report

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
            *evidence_report.power_lines(config, task),
            f"Estimate: {duration((len(left) + 1) * each / workers)} for {len(left)} runs in "
            f"{workers} process"
            f"{'es' * (workers > 1)} on idle cores; the bar shows this machine's own pace.",
            "Stop it whenever you like: the same command goes on; a report on the seeds that are "
            "complete: --report.\n",
        ]
    )


def result_path(out: Path, run: Run | None) -> Path:
    """Where a run's result stands once it is complete; None is the SFT model."""
    return out / "results" / f"{SFT if run is None else run.name}.json"


# --- the workers ----------------------------------------------------------------------------------


def _start(out: Path, number: int, *arguments: str) -> tuple[subprocess.Popen, Path]:
    """A worker; it ends itself when this process is gone, whose end of its standard input then
    closes.
    """
    log = out / "workers" / f"worker-{number}.log"
    log.parent.mkdir(exist_ok=True)
    cache = out / "workers" / f"compiled-{number}"
    with log.open("a") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "sage_unsloth.lab.evidence.run", str(out), *arguments],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ
            | {
                "OMP_NUM_THREADS": "1",
                "UNSLOTH_COMPILE_LOCATION": str(cache),
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            start_new_session=True,  # Ctrl-C is ours to pass on
        )
    return process, log


def _watch(out: Path, task: Task, runs: Sequence[Run], workers: list) -> None:
    """Waits for the workers and shows how far they are; passes an interruption on to them."""
    from tqdm.auto import tqdm

    steps = task.rlvr.max_steps
    try:
        with tqdm(
            total=steps * max(1, len(runs)), desc="benchmark" if runs else "SFT", unit="step"
        ) as bar:
            while any(process.poll() is None for process, _ in workers):
                finished = [run for run in runs if result_path(out, run).exists()]
                going = [run for run in runs if run not in finished]
                bar.n = steps * len(finished) + sum(_steps_done(out / run.name) for run in going)
                bar.set_postfix_str(f"{len(finished)} of {len(runs)} runs" if runs else "")
                bar.refresh()
                time.sleep(1)
    except BaseException:
        allow(UNWINDING + 10)
        for process, _ in workers:
            process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + UNWINDING
        for process, _ in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            process.kill()
        raise
    for process, log in workers:
        if process.returncode:
            tail = log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()[-8:]
            raise BenchmarkError(
                f"every worker must end well; one ended with {process.returncode}, and its log "
                f"{log} ends:\n"
                + "\n".join(tail)
                + "\nwhat was finished is kept, and the same command goes on"
            )


class BenchmarkError(RuntimeError):
    """A worker of the benchmark failed."""


def _steps_done(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def work(out: Path, sft_only: bool = False) -> None:
    """One worker: SFT alone, or every run that no other worker holds."""
    from sage_unsloth.models.embedded import settle_process
    from sage_unsloth.patch.loading import load_unsloth
    from sage_unsloth.training.sft_stage import sft

    recorded = json.loads((out / "benchmark.json").read_text())
    config = BenchmarkConfig(
        **{key: tuple(v) if isinstance(v, list) else v for key, v in recorded.items()}
    )
    task = config.load_task()
    load_unsloth()
    settle_process()
    if sft_only:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sage_unsloth"
        sft(task.sft, task.prepare(cache), task.sft_rows, out / "sft")
        return
    for run in (None, *config.runs()):
        path = result_path(out, run)
        if path.exists():
            continue
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(path))
            except HeldError:
                continue
            if not path.exists():  # another one may have finished it since
                write_json(path, carry_out(task, run, out, config.beta))


def carry_out(task: Task, run: Run | None, out: Path, beta: float | None) -> dict[str, Any]:
    """Train and evaluate one run, or evaluate the SFT model; what its result file holds."""
    from sage_unsloth.models.device import release_memory
    from sage_unsloth.models.loading import load_policy
    from sage_unsloth.sampling.engines import TransformersEngine
    from sage_unsloth.sampling.record_sets import sample_and_grade
    from sage_unsloth.training.rlvr_stage import rlvr
    from sage_unsloth.training.stage import read_metrics

    merged, adapter, name = out / "sft" / "model", None, SFT if run is None else run.name
    training = {}
    if run is not None:
        row = run.row(beta)
        settings = replace(row.configure(task.rlvr), seed=run.seed)
        adapter = rlvr(settings, merged, task.train_rows, out / name, row.guide, name)
        metrics = read_metrics(out / name)
        training = {
            key: [_rounded(step.get(source)) for step in metrics] for key, source in SERIES.items()
        }
    release_memory()
    engine = TransformersEngine(*load_policy(merged, adapter=adapter))
    sets = {}
    for title, one in task.sets.items():
        length = one.max_completion_length or task.sampling.max_completion_length
        sampling = replace(task.sampling, num_samples=one.num_samples, max_completion_length=length)
        path = out / "samples" / f"{name}.{title}.jsonl"
        records = sample_and_grade(
            sampling,
            engine,
            one.rows,
            path,
            model=name,
            benchmark=f"{task.name}-{title}",
            checker=one.checker,
        )
        sets[title] = _counts(task, one.rows, records)
    return {
        "run": None if run is None else asdict(run),
        "sets": sets,
        "training": training,
        "environment": environment(),
    }


def _counts(task: Task, rows: Sequence[dict], records: Sequence[dict]) -> dict[str, Any]:
    """Of each problem, in the order of the rows: correct completions, those by the rare way, and
    those that are both.
    """
    place = {row["id"]: number for number, row in enumerate(rows)}
    counts = {name: np.zeros(len(rows), int) for name in ("correct", "rare", "rare_correct")}
    for record in records:
        at, right = place[record["problem_id"]], record["grade"] == Grade.CORRECT
        rare = task.route is not None and task.route(record["completion"]) == task.rare_route
        counts["correct"][at] += right
        counts["rare"][at] += rare
        counts["rare_correct"][at] += right and rare
    result: dict[str, Any] = {name: values.tolist() for name, values in counts.items()}
    result["mean_tokens"] = _rounded(float(np.mean([record["num_tokens"] for record in records])))
    result["in_format"] = _rounded(
        float(np.mean([record["extracted"] is not None for record in records]))
    )
    return result


def _rounded(value: float | None) -> float | None:
    """Five significant digits: what the series are good for."""
    return None if value is None else float(f"{value:.5g}")


def _end_with_parent() -> None:
    """SIGTERM for this process once the one that started it is gone and its end of standard input
    has closed.
    """

    def wait() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock Python wants at its end
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    import logging

    log_to_terminal()
    logging.getLogger().setLevel(logging.INFO)
    _end_with_parent()
    with ending():
        work(Path(sys.argv[1]), "--sft" in sys.argv[2:])
