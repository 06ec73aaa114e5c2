"""From the committed counts of a benchmark to tables.

Everything that its report says is computed from one file, `records.json`:

    sets       name -> title, problem ids, families, samples of each problem
    runs       algorithm, seed, cell of the grid; of each set the correct completions of each
               problem, those by the rare way, those that are both; the training series
    settings, environment    what was run, where and when

Shapes: S seeds, P problems.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sage_unsloth.evaluation.metrics import pass_at_k

SFT = "sft"  # the model that every run starts from
BASELINE = "grpo"  # all others are compared with it


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
