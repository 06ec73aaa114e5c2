"""From the results of processes to `records.json`, and from its counts to tables.

Everything that a report says is computed from that one file, without training anything again:

    sets       benchmark -> problem ids, `families`, `units`, `guess`
    runs       point, seed; of each set n and the correct completions of each problem; the series
               of training; seconds, commit and versions
    start, variants    the model that every run begins with, and the baseline's free variants;
               `later` of the start model are the samples that the trained models do not have
    doses      of each guide on completions of the start model

Shapes: S seeds, P problems, U units.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.runs.files import read_json, write_text
from sage_unsloth.runs.record import environment
from sage_unsloth.study.chord import Place, mixture_pass_at_k, random_attempt
from sage_unsloth.study.plan import Plan
from sage_unsloth.study.points import START


def collect(plan: Plan) -> dict[str, Any]:
    """What `records.json` holds: every run of the seeds in which every point is complete.

    Raises:
        ValueError: the start model or every seed is incomplete.
    """
    names = {
        seed: [plan.result(plan.run_name(point, seed)) for point in plan.points]
        for seed in plan.seeds
    }
    complete = [seed for seed, files in names.items() if all(file.exists() for file in files)]
    if not complete or not plan.result(START).exists():
        raise ValueError(
            "a report needs the start model's samples and one training seed of every point, but "
            f"{plan.out} has none complete. Resume the study, or ask for fewer methods"
        )
    files_of_variants = [job.result for job in plan.variant_jobs() if job.result.exists()]
    variants = [row for file in files_of_variants for row in read_json(file)["variants"]]
    recorded = read_json(plan.out / "run.json")
    design = read_json(plan.out / "design.json")
    return {
        "task": plan.task.name,
        "title": plan.task.title,
        "baseline": plan.baseline.name,
        "points": design["points"],
        "claims": design["claims"],
        "ks": plan.ks,
        "settings": recorded["settings"],
        "environment": recorded["environment"] | {"finished": environment()["date"]},
        "sets": {
            benchmark.name: {
                "problems": [row["id"] for row in benchmark.rows],
                **_column(benchmark.rows, "family", "families"),
                **_column(benchmark.rows, "unit", "units"),
                **_column(benchmark.rows, "guess", "guess"),
            }
            for benchmark in plan.task.benchmarks
        },
        "start": read_json(plan.result(START)),
        "variants": [variant for variant in variants if variant["seed"] in complete],
        "doses": [read_json(job.result) for job in plan.dose_jobs() if job.result.exists()],
        "runs": [read_json(file) for seed in complete for file in names[seed]],
    }


def _column(rows: Sequence[Mapping[str, Any]], column: str, name: str) -> dict[str, list]:
    return {name: [row[column] for row in rows]} if all(column in row for row in rows) else {}


def write_records(path: Path, data: Mapping[str, Any]) -> None:
    """JSON with a line for each run, so that a thousand numbers are not a thousand lines."""
    head = {key: value for key, value in data.items() if key != "runs"}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in data["runs"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n"
    write_text(path, text)


def by_unit(values_SP: np.ndarray, units: Sequence[str]) -> np.ndarray:
    """The mean over the problems of each unit, (S, U), in order of first appearance."""
    places = list(dict.fromkeys(units))
    if len(places) == len(units):
        return values_SP  # a product with 1s and 0s would round
    member_PU = np.array([[unit == place for place in places] for unit in units], float)
    return values_SP @ (member_PU / member_PU.sum(axis=0))


class Tables:
    """The tables of one benchmark of a `records.json`, with the seeds in one order for all."""

    def __init__(self, data: Mapping[str, Any], name: str):
        self.data, self.name = data, name
        self.set = data["sets"][name]
        self.baseline = data["baseline"]
        self.runs = {(run["point"], run["seed"]): run for run in data["runs"]}
        self.points = list(dict.fromkeys(run["point"] for run in data["runs"]))
        self.seeds = sorted({run["seed"] for run in data["runs"]})
        self.ks = list(data["ks"])
        self.units = self.set.get("units", self.set["problems"])
        self.families = self.set.get("families", ["all"] * len(self.units))

    def runs_at(self, point: str) -> list[dict[str, Any]]:
        return [self.runs[point, seed] for seed in self.seeds]

    def correct(self, point: str) -> tuple[int, np.ndarray]:
        """n and the (S, P) counts of a point; the start model was not trained, so its row
        repeats.
        """
        runs = [self.data["start"]] * len(self.seeds) if point == START else self.runs_at(point)
        sets = [run["sets"][self.name] for run in runs]
        return sets[0]["num_samples"], np.array([item["correct"] for item in sets])

    def by_problem(self, point: str, k: int) -> np.ndarray:
        return np.asarray(pass_at_k(*self.correct(point), k))

    def values(self, point: str, k: int) -> np.ndarray:
        """(S, U) pass@k."""
        return by_unit(self.by_problem(point, k), self.units)

    def place(self, point: str, k: int) -> Place:
        return Place(self.values(point, 1), self.values(point, k))

    def variant_places(self, kind: str, k: int) -> dict[float, Place]:
        """The baseline's variants of a kind that every seed has: value -> its place."""
        by_value: dict[float, dict[int, Any]] = {}
        for item in self.data["variants"]:
            if item["kind"] == kind:
                by_value.setdefault(item["value"], {})[item["seed"]] = item["sets"][self.name]
        places = {}
        for value, by_seed in by_value.items():
            if set(by_seed) != set(self.seeds):
                continue
            n = next(iter(by_seed.values()))["num_samples"]
            counts = np.array([by_seed[seed]["correct"] for seed in self.seeds])
            first, many = (by_unit(np.asarray(pass_at_k(n, counts, j)), self.units) for j in (1, k))
            places[value] = Place(first, many)
        return places

    def mixture(self, m: int, k: int) -> Place:
        """The baseline with m of k attempts by the start model."""
        n, trained = self.correct(self.baseline)
        item = self.data["start"]["sets"][self.name]
        later = item.get("later", item)  # absent from the records of the frontiers
        start = np.array([later["correct"]] * len(self.seeds))
        many = mixture_pass_at_k(n, trained, later["num_samples"], start, k, m)
        both = {"start": self.values(START, 1), "trained": self.values(self.baseline, 1)}
        return Place(random_attempt(both, m, k), by_unit(many, self.units))


# --- groups of problems: the mean is a weighted mean over them, and its change a sum ---


def family_weights(families: Sequence[str], units: Sequence[str]) -> dict[str, float]:
    """Family -> its share of the units."""
    of_unit = dict(zip(units, families, strict=True))
    names = list(dict.fromkeys(families))
    return {name: list(of_unit.values()).count(name) / len(of_unit) for name in names}


def family_curves(
    values_KSU: Mapping[int, np.ndarray], families: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Family -> k -> mean pass@k over its units; keys of k are text, as in JSON."""
    member = np.array(families)
    return {
        family: {
            str(k): float(values[:, member == family].mean()) for k, values in values_KSU.items()
        }
        for family in dict.fromkeys(families)
    }


def family_parts(
    start: Mapping[str, Mapping[str, float]],
    trained: Mapping[str, Mapping[str, float]],
    weights: Mapping[str, float],
) -> dict[str, Any]:
    """Family -> k -> what it adds to the change of the mean; `all` -> k -> their sum."""
    parts = {
        family: {k: weight * (trained[family][k] - start[family][k]) for k in trained[family]}
        for family, weight in weights.items()
    }
    first = next(iter(parts.values()))
    return parts | {"all": {k: sum(part[k] for part in parts.values()) for k in first}}
