"""The counts of a frontier: a benchmark's `records.json`, a row of it for each point and seed."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from research.benchmark.records import SFT, Records
from research.frontier.line import area
from research.tasks import blind_chances
from sage_unsloth.evaluation.metrics import pass_at_k, powers_of_two
from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.study.points import Point, find_twin
from sage_unsloth.study.records import by_unit
from sage_unsloth.training.algorithms import ALGORITHMS
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import recorded_guide

START = "start_model.json"
"""The counts of many samples of the SFT model, beside `records.json` ."""
BASELINE = f"grpo beta={PAPER_BETA:g}"
"""The point whose pass@1 the others are asked for."""
KS = (1, 4, 8, 16, 32)
K = KS[-1]
"""Of pass@k: what coverage is measured by, as far as there are samples."""


def as_study(data: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The records in the form of a study's, so that its statistics are a study's.

    Args:
        data: what `records.json` holds.
        start: what `start_model.json` holds, where the SFT model was sampled again.
    """
    records = FrontierRecords(data)
    name, samples = records.set, records.num_samples
    trained = {
        point: Point(place["algorithm"], _settings(place))
        for point, place in records.points.items()
        if point != SFT
    }
    configured = {
        point: item.configure(RlvrConfig())[1]
        for point, item in trained.items()
        if item.algorithm in ALGORITHMS
    }
    posed = dict(data["sets"][name])
    chances = blind_chances(str(data["task"]), posed["problems"])
    if chances is not None:
        posed["guess"] = chances.tolist()
    many = {"num_samples": samples} | records.of(SFT)[0]["sets"][name]
    if start is not None:
        many = {"num_samples": start["num_samples"], "correct": start["correct"]}
    return {
        "title": data["title"],
        "baseline": BASELINE,
        "ks": [k for k in KS if k <= samples],
        "points": {
            point: {
                "algorithm": item.algorithm,
                "settings": dict(item.settings),
                "guide": recorded_guide(configured.get(point)),
                "twin": find_twin(item, list(trained.values()), {}),
            }
            for point, item in trained.items()
        },
        "claims": {},
        "variants": [],
        "settings": data["settings"],
        "environment": data["environment"],
        "sets": {name: posed},
        "start": {"sets": {name: many}},
        "runs": [
            {
                "point": point,
                "seed": run["seed"],
                "sets": {name: {"num_samples": samples} | run["sets"][name]},
                "training": run["training"],
            }
            for point in trained
            for run in records.of(point)
        ],
    }


class FrontierRecords(Records):
    """The tables of a frontier: a benchmark's, in which each point is an algorithm of its own."""

    def __init__(self, data: Mapping[str, Any]):
        self.points: dict[str, dict[str, Any]] = {}
        runs = []
        for run in data["runs"]:
            place = {name: run[name] for name in ("algorithm", "setting", "strength")}
            point = Point(place["algorithm"], _settings(place)).name
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


def _settings(place: Mapping[str, Any]) -> tuple[tuple[str, float], ...]:
    strength = place["strength"]
    return () if strength is None else ((place["setting"], strength),)


def method_name(place: Mapping[str, Any]) -> str:
    """`grpo`, or `grpo by max_steps` where the strength is not β."""
    setting = place["setting"]
    return place["algorithm"] + ("" if setting == "beta" else f" by {setting}")
