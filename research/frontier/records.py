"""The counts of a frontier: a benchmark's `records.json`, a row of it for each point and seed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from research.benchmark.design import SFT
from research.benchmark.records import Records, gather, result_path
from research.frontier.design import FrontierConfig, point_name
from research.frontier.line import area
from sage_unsloth.evaluation.metrics import pass_at_k, powers_of_two
from sage_unsloth.study.records import by_unit

START = "start_model.json"
"""The counts of many samples of the SFT model, beside `records.json` (see `start_model`)."""
K = 32
"""Of pass@k: what coverage is measured by, as far as there are samples."""


def collect(out: Path, config: FrontierConfig) -> dict[str, Any]:
    """What `records.json` holds: every run of the seeds in which every point is complete.

    Raises:
        ValueError: the SFT model or every seed is incomplete.
    """
    runs = config.runs()
    missing = {run.seed for run in runs if not result_path(out, run).exists()}
    chosen = [run for run in runs if run.seed not in missing]
    if not chosen or not result_path(out, None).exists():
        raise ValueError(
            "a report needs the SFT model's samples and one training seed of every point; in "
            f"{out} none is complete; resume the frontier, or ask for fewer methods or seeds"
        )
    untrained = {"algorithm": SFT, "setting": "", "strength": None, "seed": None}
    return gather(out, config.load_task(), chosen, untrained) | {"problems": config.problems}


class FrontierRecords(Records):
    """The tables of a frontier: a benchmark's, in which each point is an algorithm of its own."""

    def __init__(self, data: Mapping[str, Any]):
        self.points: dict[str, dict[str, Any]] = {}
        runs = []
        for run in data["runs"]:
            place = {name: run[name] for name in ("algorithm", "setting", "strength")}
            point = point_name(**place)
            self.points[point] = place
            runs.append(run | {"algorithm": point, "threshold": None, "ratio": None})
        super().__init__(dict(data) | {"runs": runs, "rare_route": None})
        self.set = next(iter(data["sets"]))
        item = data["sets"][self.set]
        self.num_samples = item["num_samples"]
        self.units = item.get("units", item["problems"])
        self.k = min(K, self.num_samples)

    def methods(self) -> dict[str, list[str]]:
        """Method -> its points, by ascending strength; a point without one is a method alone."""
        result: dict[str, list[str]] = {}
        for point, place in self.points.items():
            if place["strength"] is not None:
                result.setdefault(method_name(place), []).append(point)
            elif point != SFT:
                result[point] = [point]
        return {
            method: sorted(points, key=lambda point: self.points[point]["strength"] or 0.0)
            for method, points in result.items()
        }

    def values(self, point: str) -> dict[str, np.ndarray]:
        """`pass@1`, `pass@k` and `area` over the powers of two up to k, each (S, U) of U units."""
        ks = powers_of_two(self.k)
        correct = np.array([run["sets"][self.set]["correct"] for run in self.of(point)])
        curve = np.stack([pass_at_k(self.num_samples, correct, k) for k in ks])
        result = {"pass@1": curve[0], "pass@k": curve[-1], "area": area(curve, ks)}
        return {name: by_unit(values, self.units) for name, values in result.items()}

    def families(self, point: str) -> dict[str, dict[str, float]]:
        """Family -> mean `pass@1` and `pass@k` over its problems and the seeds."""
        correct = np.array([run["sets"][self.set]["correct"] for run in self.of(point)])
        return {
            family: {
                name: float(np.mean(pass_at_k(self.num_samples, correct[:, chosen], k)))
                for name, k in (("pass@1", 1), ("pass@k", self.k))
            }
            for family, chosen in self.groups(self.set).items()
            if family != "all"
        }


def method_name(place: Mapping[str, Any]) -> str:
    """`grpo`, or `grpo by max_steps` where the strength is not β."""
    setting = place["setting"]
    return place["algorithm"] + ("" if setting == "beta" else f" by {setting}")
