"""From completions to the counts of a benchmark, and from counts to tables.

Everything that a report says is computed from one file, `records.json`, so that it can be made
again, or differently, without training anything:

    sets       name -> title, problem ids, families, samples of each problem
    runs       algorithm, seed, cell of the grid; of each set the correct completions of each
               problem, those by the rare way, those that are both; the training series
    settings, environment    what was run, where and when

Shapes: S seeds, P problems.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from research.benchmark.design import SFT, BenchmarkConfig
from research.benchmark.tasks import Task
from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.grading.checker import Grade
from sage_unsloth.runs.record import environment
from sage_unsloth.study.plan import SERIES as SERIES

DESIGN = "design.json"
"""The file of a folder that says which runs it is for."""


class Named(Protocol):
    """A run: its folder and its files are named after it."""

    @property
    def name(self) -> str: ...


def result_path(out: Path, run: Named | None) -> Path:
    """The file of a run's result once it is complete; None is the SFT model."""
    return out / "results" / f"{SFT if run is None else run.name}.json"


def count_records(task: Task, rows: Sequence[dict], records: Sequence[dict]) -> dict[str, Any]:
    """Correct completions of each problem, those by the rare way, and those that are both.

    Lists in the order of the rows; and the mean length and the share in format.
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
    result["mean_tokens"] = rounded(float(np.mean([record["num_tokens"] for record in records])))
    result["in_format"] = rounded(
        float(np.mean([record["extracted"] is not None for record in records]))
    )
    return result


def rounded(value: float | None) -> float | None:
    """Five significant digits: what the series are good for."""
    return None if value is None else float(f"{value:.5g}")


def collect(out: Path, config: BenchmarkConfig) -> dict[str, Any]:
    """What `records.json` holds: every run of the seeds that are complete.

    Raises:
        ValueError: the SFT model or every seed is incomplete.
    """
    task = config.load_task()
    complete = [
        seed
        for seed in config.seeds
        if all(
            result_path(out, run).exists()
            for run in config.runs()
            if run.seed == seed and run.threshold is None
        )
    ]
    if not complete or not result_path(out, None).exists():
        raise ValueError(
            "a report needs the SFT model's samples and one training seed of every algorithm; in "
            f"{out} none is complete; resume the benchmark, or ask for fewer algorithms"
        )
    chosen = [
        run for run in config.runs() if run.seed in complete and result_path(out, run).exists()
    ]
    none = {"algorithm": SFT, "seed": None, "threshold": None, "ratio": None}
    return gather(out, task, chosen, none) | {"rare_route": task.rare_route}


def gather(
    out: Path, task: Task, runs: Sequence[Named], untrained: Mapping[str, Any]
) -> dict[str, Any]:
    """The results of the SFT model and of complete runs, and what they are of.

    `untrained` says what a run's entry says, for the SFT model.
    """
    results = [json.loads(result_path(out, run).read_text()) for run in (None, *runs)]
    sets = {
        name: {
            "title": item.title,
            "problems": [row["id"] for row in item.rows],
            "families": [row["family"] for row in item.rows],
            "num_samples": item.num_samples,
        }
        | ({"units": [row["unit"] for row in item.rows]} if "unit" in item.rows[0] else {})
        for name, item in task.sets.items()
    }
    entries = [
        (result["run"] or dict(untrained))
        | {"sets": result["sets"], "training": result["training"]}
        for result in results
    ]
    recorded = json.loads((out / "run.json").read_text())
    return {
        "task": task.name,
        "title": task.title,
        "settings": recorded["settings"],
        "environment": recorded["environment"] | {"finished": environment()["date"]},
        "sets": sets,
        "runs": entries,
    }


class Records:
    """The tables of a `records.json`, each (S, P), with the seeds in one order for all algorithms.

    The SFT model was trained once, so its row repeats.
    """

    def __init__(self, data: Mapping[str, Any]):
        self.data = data
        plain = [run for run in data["runs"] if run["threshold"] is None]
        self.algorithms = list(dict.fromkeys(run["algorithm"] for run in plain))
        self.runs = {(run["algorithm"], run["seed"]): run for run in plain}
        trained = [name for name in self.algorithms if name != SFT]
        seeds = [{seed for name, seed in self.runs if name == algorithm} for algorithm in trained]
        self.seeds = sorted(set.intersection(*seeds)) if seeds else []
        self.cells: dict[tuple[float, float], dict[int, dict]] = {}
        for run in data["runs"]:
            if run["threshold"] is not None:
                self.cells.setdefault((run["threshold"], run["ratio"]), {})[run["seed"]] = run

    def of(self, algorithm: str) -> list[dict]:
        return [self.runs[algorithm, None if algorithm == SFT else seed] for seed in self.seeds]

    def groups(self, name: str) -> dict[str, np.ndarray]:
        """All problems of a set and, where it has several, each family: title -> (P,) bool."""
        families = np.array(self.data["sets"][name]["families"])
        result = {"all": np.ones(len(families), bool)}
        if len(set(families)) > 1:
            result |= {family: families == family for family in dict.fromkeys(families)}
        return result

    def ks(self, name: str) -> list[int]:
        """1, 4, 16 and n, as far as there are samples."""
        n = self.data["sets"][name]["num_samples"]
        return sorted({k for k in (1, 4, 16, n) if k <= n})

    def pass_at_k(self, runs: Sequence[dict], name: str, k: int) -> np.ndarray:
        correct = np.array([run["sets"][name]["correct"] for run in runs])
        return np.asarray(pass_at_k(self.data["sets"][name]["num_samples"], correct, k))

    def route_share(self, algorithm: str, name: str = "test") -> np.ndarray:
        """The share of a problem's completions by the rare way."""
        rare = np.array([run["sets"][name]["rare"] for run in self.of(algorithm)], float)
        return rare / self.data["sets"][name]["num_samples"]

    def solutions_by_rare_way(self, algorithm: str, name: str = "test") -> np.ndarray:
        """Eq. 13: the share of a problem's *correct* completions, 0 where it has none."""
        correct = np.array([run["sets"][name]["correct"] for run in self.of(algorithm)], float)
        rare = np.array([run["sets"][name]["rare_correct"] for run in self.of(algorithm)], float)
        return rare / np.maximum(correct, 1)

    def series(self, algorithm: str, column: str) -> np.ndarray | None:
        """(S, steps), or None where it was not logged."""
        if algorithm == SFT:
            return None
        values = [run["training"].get(column, [None]) for run in self.of(algorithm)]
        return None if any(None in row for row in values) else np.array(values, float)

    def third(self, algorithm: str, column: str, number: int) -> np.ndarray | None:
        """Mean over the first, middle or last third (0, 1, 2) of training, (S, 1)."""
        values = self.series(algorithm, column)
        if values is None:
            return None
        parts = np.array_split(values, 3, axis=1)
        return parts[number].mean(axis=1, keepdims=True) if parts[number].size else None
