"""What a process of a benchmark does: SFT, or one run with its evaluation."""

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from research.benchmark.design import SFT, Design
from research.benchmark.records import SERIES, count_records, result_path, rounded
from research.benchmark.tasks import Task
from sage_unsloth.models.device import release_memory
from sage_unsloth.models.loading import load_policy
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.sampling.engines import TransformersEngine
from sage_unsloth.sampling.record_sets import sample_and_grade
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics


def train_sft(design: Design, out: Path) -> None:
    """SFT, which every run begins with."""
    task = design.load_task()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sage_unsloth"
    sft(task.sft, task.prepare(cache), task.sft_rows, out / "sft")


def record_run(design: Design, out: Path, run: Any) -> None:
    """`carry_out`, and its result in the folder's `results`."""
    write_json(result_path(out, run), carry_out(design, design.load_task(), run, out))


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
    for title, item in task.sets.items():
        length = item.max_completion_length or task.sampling.max_completion_length
        sampling = replace(
            task.sampling, num_samples=item.num_samples, max_completion_length=length
        )
        path = out / "samples" / f"{name}.{title}.jsonl"
        records = sample_and_grade(
            sampling,
            engine,
            item.rows,
            path,
            model=name,
            benchmark=f"{task.name}-{title}",
            checker=item.checker,
        )
        sets[title] = count_records(task, item.rows, records)
    return {
        "run": None if run is None else asdict(run),
        "sets": sets,
        "training": training,
        "environment": environment(),
    }
