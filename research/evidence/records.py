"""The counts of a benchmark or a frontier in the form of a study's, so that its statistics are one.

The `records.json` of both were written by commands that came before `study`. A run has an
algorithm, a seed, the correct completions of each problem and the series of training; in a frontier
also the setting that was changed and its strength.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.tasks import blind_chances
from sage_unsloth.evaluation.metrics import powers_of_two
from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.runs.files import read_json
from sage_unsloth.study.points import START, Point, find_twin
from sage_unsloth.training.algorithms import ALGORITHMS
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_job import recorded_guide

SFT = "sft"
"""The algorithm of the run that every other starts from."""
BASELINES = ("grpo", f"grpo beta={PAPER_BETA:g}")
"""The point that the others are compared with: the first of them that was trained."""
MORE_SAMPLES = "start_model.json"
"""The counts of many samples of the SFT model, beside `records.json`."""


def read_study(folder: Path, *, more_samples: bool = True) -> dict[str, Any]:
    """The records of a folder as those of a study.

    Args:
        folder: with `records.json`.
        more_samples: use the larger sample of the SFT model, if there is one.
    """
    more = folder / MORE_SAMPLES
    start = read_json(more) if more_samples and more.exists() else None
    return as_study(read_json(folder / "records.json"), start)


def as_study(data: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The records in the form of a study's, of the seeds that every point has.

    Args:
        data: what `records.json` holds.
        start: what `start_model.json` holds, where the SFT model was sampled again.
    """
    main = next(iter(data["sets"]))
    runs: dict[Point, dict[int, Mapping[str, Any]]] = {}
    for run in data["runs"]:
        if run["algorithm"] != SFT and run.get("threshold") is None:
            runs.setdefault(_point(run), {})[run["seed"]] = run
    seeds = sorted(set.intersection(*map(set, runs.values())))
    posed = {name: dict(item) for name, item in data["sets"].items()}
    chances = blind_chances(str(data["task"]), posed[main]["problems"])
    if chances is not None:
        posed[main]["guess"] = chances.tolist()
    (start_run,) = (run for run in data["runs"] if run["algorithm"] == SFT)
    start_sets = _with_samples(start_run, posed)
    if start is not None:
        start_sets[main] = {"num_samples": start["num_samples"], "correct": start["correct"]}
    return {
        "task": data["task"],
        "problems": data.get("problems"),  # "pilot" or "fresh" of a frontier
        "title": ", ".join(filter(None, (data["title"], data.get("problems")))),
        "baseline": next(name for name in BASELINES if name in {point.name for point in runs}),
        "ks": powers_of_two(posed[main]["num_samples"]),
        "points": {
            point.name: {
                "algorithm": point.algorithm,
                "settings": dict(point.settings),
                "guide": _guide(point),
                "twin": find_twin(point, list(runs), RlvrConfig(), {}),
            }
            for point in runs
        },
        "claims": {},
        "variants": [],
        "settings": data["settings"],
        "environment": _environment(data["environment"]),
        "sets": posed,
        "start": {"sets": start_sets},
        "runs": [
            {
                "point": point.name,
                "seed": seed,
                "sets": _with_samples(by_seed[seed], posed),
                "training": by_seed[seed]["training"],
            }
            for point, by_seed in runs.items()
            for seed in seeds
        ],
    }


def _environment(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """With the version and the digest of the code, which were not recorded then."""
    packages = {"sage_unsloth": "before 0.1.0"} | recorded["packages"]
    return {"commit": None, "code_tree": "not recorded", **recorded, "packages": packages}


def _point(run: Mapping[str, Any]) -> Point:
    strength = run.get("strength")
    return Point(run["algorithm"], () if strength is None else ((run["setting"], strength),))


def _guide(point: Point) -> str | None:
    if point.algorithm not in ALGORITHMS:
        return None
    return recorded_guide(point.configure(RlvrConfig())[1])


def _with_samples(run: Mapping[str, Any], posed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"num_samples": posed[name]["num_samples"]} | item
        for name, item in run["sets"].items()
    }


__all__ = ["MORE_SAMPLES", "START", "as_study", "read_study"]
