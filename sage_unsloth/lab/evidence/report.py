"""From the counts of a benchmark to its report: tables, paired differences, verdicts on the paper's
claims, power.

Everything is computed from one file, `records.json`, so that a report can be made again, or
differently, without training anything:

    sets       name -> title, problem ids, families, samples of each problem
    runs       algorithm, seed, cell of the grid; of each set the correct completions of each problem, those by the rare way, those that are
               both; the training series
    settings, environment    what was run, where and when

Shapes: S seeds, P problems, K values of k.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.lab.evidence.power import (
    Components,
    components,
    crossed_interval,
    detectable_difference,
)
from sage_unsloth.lab.evidence.run import SERIES, SFT, BenchmarkConfig, result_path
from sage_unsloth.lab.evidence.tasks import Task
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.runs.files import write_json, write_text
from sage_unsloth.runs.record import environment

MATTERS = 0.03
"""A difference of pass@k below this is taken as none: about the largest gain in the paper's tables
is .03.
"""
BASELINE = "grpo"
PAIRS = (
    ("sage-branch-exact", "grpo-exact"),
    ("sage-token-exact", "grpo-exact"),
    ("bnpo-sage-branch", "bnpo-no-kl"),
    ("bnpo-sage-branch", "bnpo"),
    ("dapo-sage-branch", "dapo-no-kl"),
    ("dapo-sage-branch", "dapo"),
)
"""Differences that are reported beside those to grpo and to SFT."""


# --- the records ----------------------------------------------------------------------------------


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
            f"a report needs the SFT model's samples and one training seed of every algorithm; "
            f"in {out} none is complete; run the "
            "benchmark on, or ask for fewer algorithms"
        )
    chosen = [
        run for run in config.runs() if run.seed in complete and result_path(out, run).exists()
    ]
    found = [json.loads(result_path(out, run).read_text()) for run in (None, *chosen)]
    sets = {
        name: {
            "title": one.title,
            "problems": [row["id"] for row in one.rows],
            "families": [row["family"] for row in one.rows],
            "num_samples": one.num_samples,
        }
        for name, one in task.sets.items()
    }
    runs = [
        (result["run"] or {"algorithm": SFT, "seed": None, "threshold": None, "ratio": None})
        | {"sets": result["sets"], "training": result["training"]}
        for result in found
    ]
    recorded = json.loads((out / "run.json").read_text())
    return {
        "task": task.name,
        "title": task.title,
        "rare_route": task.rare_route,
        "settings": recorded["settings"],
        "environment": recorded["environment"] | {"finished": environment()["date"]},
        "sets": sets,
        "runs": runs,
    }


class Records:
    """The tables of a `records.json`, each (S, P): a row for each seed, in one order for every
    algorithm.

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
        found = {"all": np.ones(len(families), bool)}
        if len(set(families)) > 1:
            found |= {family: families == family for family in dict.fromkeys(families)}
        return found

    def ks(self, name: str) -> list[int]:
        """1, 4, 16 and n, as far as there are samples."""
        n = self.data["sets"][name]["num_samples"]
        return sorted({k for k in (1, 4, 16, n) if k <= n})

    def pass_at_k(self, runs: Sequence[dict], name: str, k: int) -> np.ndarray:
        correct = np.array([run["sets"][name]["correct"] for run in runs])
        return pass_at_k(self.data["sets"][name]["num_samples"], correct, k)

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


# --- the claims -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """Something that the paper says, or that its method is for, as a difference of two algorithms.

    Attributes:
        text: the claim.
        paper: the paper's own numbers for it, or what it rests on.
        a, b: the difference is a − b.
        quantity: "pass@1", "pass@n" or "pass@16" on the set; "rare way" or "solutions by the rare
            way"; "reward" of the last third of training.
        set: which problems, "test", or "ood" for all sets out of distribution together.
        kind: "gain": a is better; "no loss": a is not worse by `MATTERS`; "loss": a is worse.
    """

    text: str
    paper: str
    a: str
    b: str
    quantity: str = "pass@n"
    set: str = "test"
    kind: str = "gain"


CLAIMS = (
    Claim("RL raises pass@1 over SFT", ".227 → .266", "grpo", SFT, "pass@1"),
    Claim("RL by GRPO narrows what the SFT model could solve", "what SAGE is for", "grpo", SFT, kind="loss"),
    Claim("Branch raises pass@1 over GRPO", ".266 → .284", "sage-branch", "grpo", "pass@1"),
    Claim("Branch raises pass@16 over GRPO", "curves", "sage-branch", "grpo", "pass@16"),
    Claim("Branch raises pass@n over GRPO", ".714 → .729", "sage-branch", "grpo"),
    Claim("Branch solves no less than SFT at n samples", ".708 → .729", "sage-branch", SFT, kind="no loss"),
    Claim("Token raises pass@n over GRPO", ".714 → .718", "sage-token", "grpo"),
    Claim("Random raises pass@n over GRPO", ".714 → .722", "sage-random", "grpo"),
    Claim("Forward KL raises pass@n over GRPO", ".714 → .727", "grpo-forward-kl", "grpo"),
    Claim("The KL term raises pass@n", ".701 → .714", "grpo", "grpo-no-kl"),
    Claim("Without KL the training reward is higher", "Fig. 2", "grpo-no-kl", "grpo", "reward"),
    Claim("Branch raises pass@n of BNPO without KL", ".699 → .715", "bnpo-sage-branch", "bnpo-no-kl"),
    Claim("Branch raises pass@n of DAPO without KL", ".696 → .712", "dapo-sage-branch", "dapo-no-kl"),
    Claim("Branch keeps the rare way alive better than GRPO", "App. G", "sage-branch", "grpo", "solutions by the " "rare " "way"),
    Claim("Branch helps out of distribution", "Knights and Knaves", "sage-branch", "grpo", set="ood"),
    Claim("With the exact credit Branch raises pass@n", "Eq. 4; not in the paper's code", "sage-branch-exact", "grpo-exact"),
    Claim("With the exact credit Branch keeps the rare way alive", "Eq. 4; not in the paper's code", "sage-branch-exact", "grpo-exact", "solutions by the " "rare " "way"),
)  # fmt: skip


def verdict(kind: str, low: float, high: float, matters: float = MATTERS) -> str:
    """What an interval of a − b says of a claim.

    gain      supported: low > 0.             not supported: high < matters, so that a gain that matters is excluded.
    loss      supported: high < 0.            not supported: low > −matters.
    no loss   supported: low > −matters.      not supported: high < 0.
    """
    if kind == "loss":
        return verdict("gain", -high, -low, matters)
    if kind == "no loss":
        return "supported" if low > -matters else "not supported" if high < 0 else "undecided"
    if low > 0:
        return "supported"
    return "not supported" if high < matters else "undecided"


def judge(claim: Claim, records: Records) -> dict[str, Any] | None:
    """The claim with its difference, interval and verdict; None where an algorithm or quantity of
    it was not run.
    """
    if not {claim.a, claim.b} <= set(records.algorithms):
        return None
    values = [_quantity(records, name, claim) for name in (claim.a, claim.b)]
    if any(value is None for value in values):
        return None
    difference = values[0] - values[1]
    if difference.size < 2:
        return None
    found = crossed_interval(difference)
    # One seed shows how these two models differ, and nothing about their algorithms.
    said = verdict(claim.kind, found.low, found.high) if len(records.seeds) > 1 else "undecided"
    means = {"value_a": float(values[0].mean()), "value_b": float(values[1].mean())}
    return asdict(claim) | asdict(found) | means | {"verdict": said}


def _quantity(records: Records, algorithm: str, claim: Claim) -> np.ndarray | None:
    if claim.quantity == "reward":
        return records.third(algorithm, "reward", 2)
    if claim.quantity in ("rare way", "solutions by the rare way"):
        if records.data["rare_route"] is None:
            return None
        share = (
            records.route_share if claim.quantity == "rare way" else records.solutions_by_rare_way
        )
        return share(algorithm)
    names = [name for name in records.data["sets"] if (name == "test") == (claim.set == "test")]
    tables = []
    for name in names:
        n = records.data["sets"][name]["num_samples"]
        k = n if claim.quantity == "pass@n" else int(claim.quantity.removeprefix("pass@"))
        if k > n:
            return None
        tables.append(records.pass_at_k(records.of(algorithm), name, k))
    return np.concatenate(tables, axis=1) if tables else None


# --- the report -----------------------------------------------------------------------------------


def make_report(data: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that `report.json` holds, from what `records.json` holds."""
    records = Records(data)
    others = [name for name in records.algorithms if name not in (SFT, BASELINE)]
    pairs = [(name, BASELINE) for name in others]
    pairs += [(name, SFT) for name in records.algorithms if name != SFT]
    pairs += [pair for pair in PAIRS if set(pair) <= set(records.algorithms)]
    table: dict[str, Any] = {"pass_at_k": {}, "differences": {}}
    for name in data["sets"]:
        cells, differences = {}, {}
        for group, chosen in records.groups(name).items():
            values = {
                (algorithm, k): records.pass_at_k(records.of(algorithm), name, k)[:, chosen]
                for algorithm in records.algorithms
                for k in records.ks(name)
            }
            cells[group] = {
                algorithm: {
                    str(k): _level(values[algorithm, k], algorithm == SFT) for k in records.ks(name)
                }
                for algorithm in records.algorithms
            }
            differences[group] = {
                f"{a} - {b}": {
                    str(k): _interval(values[a, k] - values[b, k]) for k in records.ks(name)
                }
                for a, b in pairs
            }
        table["pass_at_k"][name], table["differences"][name] = cells, differences
    claims = [judge(claim, records) for claim in CLAIMS]
    return {
        "task": data["task"],
        "title": data["title"],
        "seeds": records.seeds,
        "algorithms": records.algorithms,
        "num_problems": {name: len(one["problems"]) for name, one in data["sets"].items()},
        "num_samples": {name: one["num_samples"] for name, one in data["sets"].items()},
        "settings": data["settings"],
        "environment": data["environment"],
        **table,
        "claims": [claim for claim in claims if claim is not None],
        "not_run": sorted(
            {name for claim in CLAIMS for name in (claim.a, claim.b)} - set(records.algorithms)
        ),
        "behaviour": _behaviour(records),
        "training": _training(records),
        "grid": _grid(records),
        "components": _components(records, pairs),
    }


def _interval(values_SP: np.ndarray, once: bool = False) -> dict[str, float]:
    """As a dict; `once` says that the rows are one and the same model."""
    values_SP = values_SP[:1] if once else values_SP
    if values_SP.size < 2:
        mean = float(values_SP.mean())
        return {"mean": mean, "low": mean, "high": mean}
    found = crossed_interval(values_SP)
    return {name: getattr(found, name) for name in ("mean", "low", "high")}


def _level(values_SP: np.ndarray, once: bool) -> dict[str, float]:
    """`_interval` of shares, which lie in [0, 1]."""
    found = _interval(values_SP, once)
    return {name: min(1.0, max(0.0, value)) for name, value in found.items()}


def _behaviour(records: Records) -> dict[str, Any]:
    """On the test problems: the rare way among all completions and among the correct ones, format,
    length.
    """
    result = {}
    for name in records.algorithms:
        tests = [run["sets"]["test"] for run in records.of(name)]
        row: dict[str, Any] = {
            key: float(np.mean([test[key] for test in tests]))
            for key in ("in_format", "mean_tokens")
        }
        if records.data["rare_route"] is not None:
            row["rare way"] = _level(records.route_share(name), name == SFT)
            row["solutions by the rare way"] = _level(
                records.solutions_by_rare_way(name), name == SFT
            )
        result[name] = row
    return result


def _training(records: Records) -> dict[str, Any]:
    """Mean over seeds of each series in the first, middle and last third of training."""
    result: dict[str, Any] = {}
    for name in records.algorithms:
        for column in SERIES:
            thirds = [records.third(name, column, number) for number in range(3)]
            if all(third is not None for third in thirds):
                result.setdefault(name, {})[column] = [_interval(third) for third in thirds]
    return result


def _grid(records: Records) -> dict[str, Any] | None:
    """Each cell of threshold × ratio against grpo with the same seeds; the default cell is the run
    `sage-branch`.
    """
    if not records.cells:
        return None
    seeds = sorted(
        set.intersection(*(set(cell) for cell in records.cells.values())) & set(records.seeds)
    )
    if not seeds:
        return None
    cells = {key: [cell[seed] for seed in seeds] for key, cell in records.cells.items()}
    if "sage-branch" in records.algorithms:
        default = BranchGuide()
        cells[default.threshold, default.ratio] = [
            records.runs["sage-branch", seed] for seed in seeds
        ]
    plain = [records.runs[BASELINE, seed] for seed in seeds]
    ks = [k for k in records.ks("test") if k in (1, 16)] or records.ks("test")[:1]
    rows = []
    for (threshold, ratio), runs in sorted(cells.items()):
        row: dict[str, Any] = {"threshold": threshold, "ratio": ratio}
        for k in ks:
            difference = records.pass_at_k(runs, "test", k) - records.pass_at_k(plain, "test", k)
            row[f"pass@{k}"] = _interval(difference)
        rows.append(row)
    return {"seeds": seeds, "ks": ks, "cells": rows}


def _components(records: Records, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Variance components of the differences to grpo, for the power of another benchmark; needs two
    seeds.
    """
    if len(records.seeds) < 2:
        return {}
    found: dict[str, Any] = {}
    for a, b in pairs:
        if b != BASELINE:
            continue
        for k in records.ks("test"):
            values = [records.pass_at_k(records.of(name), "test", k) for name in (a, b)]
            if values[0].shape[1] > 1:
                found.setdefault(f"{a} - {b}", {})[f"pass@{k}"] = asdict(
                    components(values[0] - values[1])
                )
    return found


# --- power ----------------------------------------------------------------------------------------


def results_folder(task: str) -> Path:
    """Where the repository keeps a task's results; its pilot's report is in `pilot/`."""
    return data_folder() / "results" / "benchmark" / task


def power_lines(config: BenchmarkConfig, task: Task) -> list[str]:
    """What the design can see, by the variances of a pilot with other seeds."""
    pilot = results_folder(task.name) / "pilot" / "report.json"
    if not pilot.is_file() or config.smoke or len(config.seeds) < 2:
        return [
            "  Power: unknown, since "
            + (
                "one seed shows no difference between methods"
                if len(config.seeds) < 2
                else "there was no pilot of this task at this size"
            )
        ]
    report = json.loads(pilot.read_text())
    problems = len(task.sets["test"].rows)
    lines = [
        f"  Power, from a pilot with {len(report['seeds'])} other seeds: a true difference that "
        f"{len(config.seeds)} seeds x {problems} problems "
        "find 4 times in 5 (95 % intervals):"
    ]
    for pair, by_k in report["components"].items():
        cells = ", ".join(
            f"{title} {detectable_difference(Components(**found), len(config.seeds), problems):.3f}"
            for title, found in by_k.items()
        )
        lines.append(f"    {pair}: {cells}")
    return lines


# --- on disk
# ---------------------------------------------------------------------------------------


def write(out: Path, config: BenchmarkConfig) -> dict[str, Any]:
    """Collect, report, draw and print; returns the report."""
    from sage_unsloth.lab.evidence import text as evidence_text

    data = collect(out, config)
    report = write_from_records(data, out)
    print(
        f"\n{evidence_text.summary(report)}\n\nWritten to {out}: records.json, report.json, "
        f"report.md, figures with their tables"
    )
    print(
        f"Next: look at {out / 'report.md'}; completions are in {out / 'samples'}; more seeds or "
        f"algorithms: the same command with them"
    )
    return report


def write_from_records(data: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """`records.json`, `report.json`, `report.md` and the figures, in a folder that exists."""
    from sage_unsloth.lab.evidence import figures as evidence_plots
    from sage_unsloth.lab.evidence import text as evidence_text

    report = make_report(data)
    _write_compact(out / "records.json", data)
    write_json(out / "report.json", report)
    write_text(out / "report.md", evidence_text.markdown(report))
    evidence_plots.draw(report, Records(data), out)
    return report


def _write_compact(path: Path, data: Mapping[str, Any]) -> None:
    """A line for each run, so that a thousand numbers are no thousand lines."""
    head = {key: value for key, value in data.items() if key != "runs"}
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in data["runs"])
    text = json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n]}\n"
    write_text(path, text)
