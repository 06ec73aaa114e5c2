"""One process of a benchmark: SFT alone, or every run that no other worker holds.

python -m research.benchmark.worker FOLDER [--sft]
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from research.benchmark.design import SFT, BenchmarkConfig
from research.benchmark.records import DESIGN, SERIES, count_records, result_path, rounded
from research.benchmark.tasks import Task
from sage_unsloth.models.device import release_memory
from sage_unsloth.models.embedded import settle_process
from sage_unsloth.models.loading import load_policy
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.patch.loading import load_unsloth
from sage_unsloth.runs.children import end_with_parent
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.locks import HeldError, locked
from sage_unsloth.runs.record import environment
from sage_unsloth.runs.stopping import ending
from sage_unsloth.runs.text import log_to_terminal
from sage_unsloth.sampling.engines import TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics


class Design(Protocol):
    """What runs there are, and what each trains: `BenchmarkConfig`, or the frontier's."""

    def load_task(self) -> Task: ...
    def runs(self) -> Sequence[Any]: ...
    def training(self, run: Any, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]: ...


def recorded_design(out: Path) -> dict[str, Any]:
    """The fields of the design that `run_all` recorded, its lists as the tuples that they were."""
    recorded = json.loads((out / DESIGN).read_text())
    lists = {key: tuple(value) for key, value in recorded.items() if isinstance(value, list)}
    return recorded | lists


def work(out: Path, design: Design, sft_only: bool = False) -> None:
    """SFT alone, or every run that no other worker holds."""
    task = design.load_task()
    load_unsloth()
    settle_process()
    if sft_only:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sage_unsloth"
        sft(task.sft, task.prepare(cache), task.sft_rows, out / "sft")
        return
    for run in (None, *design.runs()):
        path = result_path(out, run)
        if path.exists():
            continue
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(locked(path))
            except HeldError:
                continue
            if not path.exists():  # another one may have finished it since
                write_json(path, carry_out(design, task, run, out))


def carry_out(design: Design, task: Task, run: Any, out: Path) -> dict[str, Any]:
    """Train and evaluate one run, or evaluate the SFT model; what its result file holds."""
    merged, adapter, name = out / "sft" / "model", None, SFT if run is None else run.name
    training = {}
    if run is not None:
        settings, guide = design.training(run, task.rlvr)
        folder = out / name
        adapter = rlvr(
            settings, merged, task.train_rows, folder, guide, name, verifier=task.checker
        )
        metrics = read_metrics(out / name)
        training = {
            key: [rounded(step.get(source)) for step in metrics] for key, source in SERIES.items()
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
        sets[title] = count_records(task, one.rows, records)
    return {
        "run": None if run is None else asdict(run),
        "sets": sets,
        "training": training,
        "environment": environment(),
    }


def main(design: Callable[..., Design], arguments: Sequence[str]) -> None:
    """One worker's process: `arguments` are the folder and perhaps `--sft`."""
    log_to_terminal()
    logging.getLogger().setLevel(logging.INFO)
    end_with_parent()
    out = Path(arguments[0])
    with ending():
        work(out, design(**recorded_design(out)), "--sft" in arguments[1:])


if __name__ == "__main__":
    main(BenchmarkConfig, sys.argv[1:])
