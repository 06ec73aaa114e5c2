"""The other embedded tasks for the installed `study`.

python -m sage_unsloth study --task research.frontier.study_tasks:countdown --reduced
"""

from dataclasses import replace
from pathlib import Path

from research.benchmark.tasks import get_task
from research.frontier.guessing import blind_chances
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.study.tasks import Task


def arithmetic_fresh() -> Task:
    return _as_study("arithmetic-fresh")


def countdown() -> Task:
    return _as_study("countdown")


def countdown_fresh() -> Task:
    return _as_study("countdown-fresh")


def _as_study(name: str) -> Task:
    """The task's test set, each problem with the chance of a blind attempt, 64 samples of each."""
    task = get_task(name)
    test = task.sets["test"]
    chances = blind_chances(name, [row["id"] for row in test.rows])
    assert chances is not None
    rows = [row | {"guess": float(p)} for row, p in zip(test.rows, chances, strict=True)]
    return Task(
        name=name,
        title=task.title,
        model=str(task.prepare(Path())),
        rows=task.train_rows,
        benchmarks=(
            Benchmark(
                name="test", rows=rows, provenance=[{"embedded": name}], checker=test.checker
            ),
        ),
        rlvr=task.rlvr,
        sampling=replace(task.sampling, num_samples=64),
        verifier=task.checker,
        sft=task.sft,
        sft_rows=task.sft_rows,
        seconds=task.seconds,
    )
