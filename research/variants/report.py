"""The records of the variants, and what follows from them.

    python -m research.variants.report --runs runs/variants    # collect, then report
    python -m research.variants.report                         # report on the committed records

`FOLDER.json` holds the counts of every complete run that starts from one SFT model; `report.json`
is computed from these files and from the records of the second verdict alone.

Shapes: S training seeds, P problems, U units.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.data import DATA
from research.variants.design import (
    PLAIN_START,
    RESULTS,
    SAMPLES,
    SFT,
    TITLE,
    VariantRun,
    load_variant,
    queue_runs,
    result_path,
)
from research.variants.pictures import draw_forks
from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.record import environment
from sage_unsloth.study.chord import Place
from sage_unsloth.study.crossed import CrossedEstimate, crossed_interval
from sage_unsloth.study.free_lines import LineNode, distance_to_line
from sage_unsloth.study.records import by_unit
from sage_unsloth.study.verdicts import MATTERS, holm, p_value

QUEUE = RESULTS / "queue.txt"
FRESH = DATA / "results" / "frontier" / "arithmetic" / "fresh"
KS = (1, 8, 16, 32)
OTHER_STARTS = ("sft-2", "sft-3")
VariantPoint = tuple[str, str, float | None]
"""A variant, an algorithm, its β."""
UNGUIDED = {"sage-branch-exact": "grpo-exact", "sage-branch": "grpo"}
"""Each guided algorithm and the same without its guide."""
AGAIN = "-again"
"""Ends the name of the records from a model that was made again on another CPU, and is another."""
UNTRAINED = {"algorithm": SFT, "setting": "", "strength": None, "seed": None, "variant": ""}


def collect(runs_folder: Path) -> list[str]:
    """Write the records of each SFT model's complete runs; the names of the files' starts."""
    by_start: dict[str, list[VariantRun]] = {}
    for line in QUEUE.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            for run in queue_runs(line):
                start = load_variant(run.variant).start
                if result_path(runs_folder / start, run).exists():
                    by_start.setdefault(start, []).append(run)
    for start, runs in by_start.items():
        records = gather(runs_folder / start, runs)
        path = RESULTS / f"{start}.json"
        if path.exists() and not from_same_model(read_json(path), records):
            path = RESULTS / f"{start}{AGAIN}.json"
        write_json(path, add_runs(read_json(path), records) if path.exists() else records)
    return list(by_start)


def from_same_model(some: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two records have the same problems and an SFT model with the same counts."""
    first, second = (
        (records["sets"], [run["sets"] for run in records["runs"] if run["algorithm"] == SFT])
        for records in (some, others)
    )
    return first == second


def add_runs(committed: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The committed records and the new runs, in the order of the queue.

    Raises:
        ValueError: the runs start from another SFT model, or have other settings.
    """

    def by_point(records: Mapping[str, Any]) -> dict[tuple, Mapping[str, Any]]:
        names = ("variant", "algorithm", "strength", "seed")
        return {tuple(run[name] for name in names): run for run in records["runs"]}

    if not from_same_model(committed, new) or not _includes(new["settings"], committed["settings"]):
        raise ValueError(
            "new runs must have the settings and the SFT model of the committed ones, "
            f"but those of {new['task']} differ: rename the committed file, to keep both"
        )
    return {**committed, "runs": list((by_point(new) | by_point(committed)).values())}


def _includes(new: Any, old: Any) -> bool:
    """Whether `new` has every value of `old`; what was added to the settings since may be there."""
    if isinstance(old, Mapping):
        return all(name in new and _includes(new[name], old[name]) for name in old)
    return new == old


def gather(folder: Path, runs: Sequence[VariantRun]) -> dict[str, Any]:
    """The results of the SFT model and of complete runs, and what they are of."""
    task = load_variant(runs[0].variant).task
    results = [read_json(result_path(folder, run)) for run in (None, *runs)]
    entries = [
        (result["run"] or UNTRAINED) | {name: result[name] for name in ("sets", "training")}
        for result in results
    ]
    (test,) = task.benchmarks
    posed = {"title": TITLE, "problems": [row["id"] for row in test.rows]}
    posed |= {"families": [row["family"] for row in test.rows], "num_samples": SAMPLES}
    posed |= {"units": [row["unit"] for row in test.rows]}
    recorded = read_json(folder / "run.json")
    return {
        "task": task.name,
        "title": task.title,
        "settings": recorded["settings"],
        "environment": recorded["environment"] | {"finished": environment()["date"]},
        "sets": {"test": posed},
        "runs": entries,
    }


class VariantRecords:
    """The counts of the runs from one SFT model: point -> seed -> correct samples."""

    def __init__(self, data: Mapping[str, Any], variant: str | None = None):
        problem_set = data["sets"]["test"]
        self.num_samples: int = problem_set["num_samples"]
        self.units: list[str] = problem_set["units"]
        self.families = np.array(problem_set["families"])
        self.runs: dict[VariantPoint, dict[int | None, Mapping[str, Any]]] = {}
        for run in data["runs"]:
            if run["setting"] in ("", "beta"):
                name = run.get("variant") or variant or ""
                point = (name, run["algorithm"], run["strength"])
                self.runs.setdefault(point, {})[run["seed"]] = run["sets"]["test"]

    def seeds(self, *points: VariantPoint) -> list[int]:
        """Those in which every point is complete, ascending."""
        complete = [set(self.runs.get(point, {})) for point in points]
        return sorted(seed for seed in set.intersection(*complete) if seed is not None)

    def counts(self, point: VariantPoint, seeds: Sequence[int | None]) -> np.ndarray:
        return np.array([self.runs[point][seed]["correct"] for seed in seeds])

    def pass_at(self, point: tuple, seeds: Sequence[int], k: int) -> np.ndarray:
        """(S, U)."""
        values = np.asarray(pass_at_k(self.num_samples, self.counts(point, seeds), k))
        return by_unit(values, self.units)

    def place(self, point: VariantPoint, seeds: Sequence[int]) -> Place:
        return Place(self.pass_at(point, seeds, 1), self.pass_at(point, seeds, 32))

    def way_share(self, point: tuple, seeds: Sequence[int]) -> np.ndarray:
        """The share of completions by the counted way, (S, U)."""
        rows = np.array([self.runs[point][seed]["rare"] for seed in seeds], float)
        return by_unit(rows / self.num_samples, self.units)

    def by_family(self, point: tuple, seeds: Sequence[int], k: int) -> dict[str, float]:
        values = np.asarray(pass_at_k(self.num_samples, self.counts(point, seeds), k))
        return {
            family: float(values[:, self.families == family].mean())
            for family in dict.fromkeys(self.families.tolist())
        }


def row_records() -> VariantRecords:
    """D4's: the runs of the queue, and those on skewed rows of the second verdict."""
    records = VariantRecords(read_json(RESULTS / f"{PLAIN_START}.json"))
    published = VariantRecords(read_json(FRESH / "records.json"), "skewed")
    again = records.runs.get(SKEWED, {})
    for seed, run in again.items():
        if run["correct"] != published.runs[SKEWED][seed]["correct"]:
            raise ValueError(
                "a repeated run must equal the published one, "
                f"but seed {seed} on skewed rows differs"
            )
    return _joined(records, published)


SKEWED = ("skewed", "grpo", 0.05)
"""The point that the others are compared with."""
ROW_POINTS = [(rows, rule, 0.05) for rows in ("balanced", "by-rate") for rule in ("grpo", "maxrl")]


LINE = (0.05, 0.2, 0.4)
"""The β of `grpo` on skewed rows that were published."""


def _joined(records: VariantRecords, published: VariantRecords) -> VariantRecords:
    for point, runs in published.runs.items():
        if point[0] == "skewed":
            records.runs[point] = runs
    return records


def report_rows(records: VariantRecords) -> dict[str, Any]:
    """D4: levels, differences to `SKEWED` and to the SFT model, families, and the claims."""
    start = read_json(FRESH / "start_model.json")
    correct = np.array([start["correct"]])
    start_U = {
        k: by_unit(np.asarray(pass_at_k(start["num_samples"], correct, k)), records.units)
        for k in KS
    }
    points = []
    for point in [SKEWED, ("skewed", "maxrl", 0.05), *ROW_POINTS]:
        if not (seeds := records.seeds(SKEWED, point)):
            continue
        row: dict[str, Any] = {"rows": point[0], "algorithm": point[1], "seeds": seeds}
        for k in KS:
            values, base = (records.pass_at(item, seeds, k) for item in (point, SKEWED))
            row[f"pass@{k}"] = float(values.mean())
            row[f"pass@{k} - sft"] = _estimate(crossed_interval(values - start_U[k]))
            if point != SKEWED:
                row[f"pass@{k} - skewed grpo"] = _estimate(crossed_interval(values - base))
        if beside := beside_line(records, point, [("skewed", "grpo", beta) for beta in LINE]):
            row["pass@32 beside grpo's line"] = _estimate(beside)
        row["families"] = {f"pass@{k}": records.by_family(point, seeds, k) for k in (1, 32)}
        points.append(row)
    sft = {f"pass@{k}": float(start_U[k].mean()) for k in KS}
    return {"sft": sft, "points": points, "claims": judge_rows(records)}


def beside_line(
    records: VariantRecords,
    point: VariantPoint,
    line: Sequence[VariantPoint],
) -> CrossedEstimate | None:
    """pass@32 of a point beside a line through points of ascending β, at the same seeds; None of
    the line's own points, and where the line is not interpolated (`study.chord`).
    """
    seeds = records.seeds(point, *line)
    if point in line or not seeds:
        return None
    nodes = [
        LineNode(algorithm, beta or 0.0, records.place((variant, algorithm, beta), seeds))
        for variant, algorithm, beta in line
    ]
    return distance_to_line(records.place(point, seeds), nodes, steps=True)


def judge_rows(records: VariantRecords) -> list[dict[str, Any]]:
    """The five claims of the design, with p values before and after Holm.

    A claim without a run is corrected for all the same, with p = 1.
    """
    claims: list[dict[str, Any]] = []
    for number, rows, k, threshold in (
        ("1", "balanced", 32, 0.0),
        ("2", "balanced", 1, -MATTERS),
        ("3", "by-rate", 32, 0.0),
        ("3", "by-rate", 1, -MATTERS),
    ):
        point, claim = (rows, "grpo", 0.05), {"claim": number}
        claim["text"] = f"`grpo`, {rows} − skewed rows, pass@{k} > {threshold:g}"
        if seeds := records.seeds(SKEWED, point):
            values = records.pass_at(point, seeds, k) - records.pass_at(SKEWED, seeds, k)
            claim |= _judged(crossed_interval(values), threshold)
        claims.append(claim)
    claim = {"claim": "4", "text": "(`maxrl` − `grpo`), skewed − balanced rows, pass@32 > 0"}
    four = [(rows, rule, 0.05) for rows in ("skewed", "balanced") for rule in ("grpo", "maxrl")]
    if seeds := records.seeds(*four):
        at = [records.pass_at(point, seeds, 32) for point in four]
        claim |= _judged(crossed_interval((at[1] - at[0]) - (at[3] - at[2])), 0.0)
    claims.append(claim)
    for claim, adjusted in zip(
        claims, holm([claim.get("p", 1.0) for claim in claims]), strict=True
    ):
        claim["p_holm"] = adjusted
    return claims


def _judged(result: CrossedEstimate, threshold: float) -> dict[str, Any]:
    return _estimate(result) | {"p": p_value(result, threshold)}


def report_fork(records: VariantRecords, dialect: str) -> dict[str, Any]:
    """D1: levels, and the guide beside the same β without it and beside the line of all β."""
    points, pairs = [], []
    line = sorted(point for point in records.runs if point[1] == "grpo-exact")
    for point in sorted(records.runs, key=str):
        if point[1] == SFT or not (seeds := records.seeds(point)):
            continue
        row: dict[str, Any] = {"algorithm": point[1], "beta": point[2], "seeds": seeds}
        row |= {f"pass@{k}": float(records.pass_at(point, seeds, k).mean()) for k in KS}
        row["forked way"] = float(records.way_share(point, seeds).mean())
        points.append(row)
        twin = (dialect, UNGUIDED.get(point[1], ""), point[2])
        if both := records.seeds(point, twin):
            pair: dict[str, Any] = {"algorithm": point[1], "beta": point[2], "seeds": both}
            for k in KS:
                difference = records.pass_at(point, both, k) - records.pass_at(twin, both, k)
                pair[f"pass@{k}"] = _estimate(crossed_interval(difference))
            shares = records.way_share(point, both) - records.way_share(twin, both)
            pair["forked way"] = _estimate(crossed_interval(shares))
            exact = point[1].endswith("-exact")
            if exact and (beside := beside_line(records, point, line)):
                pair["pass@32 beside grpo-exact's line"] = _estimate(beside)
            pairs.append(pair)
    start = ("", SFT, None)
    sft = {f"pass@{k}": float(_start_values(records, start, k).mean()) for k in KS}
    shares = np.array(records.runs[start][None]["rare"]) / records.num_samples
    sft["forked way"] = float(by_unit(shares[None], records.units).mean())
    return {"sft": sft, "points": points, "pairs": pairs}


def report_starts(by_start: Mapping[str, VariantRecords]) -> dict[str, Any]:
    """D3: pass@32 of `maxrl` minus `grpo` with each SFT model, and what varies between models.

    Args:
        by_start: the records of each SFT model, whose runs have the variant of that name.
    """
    rows = []
    for variant, records in by_start.items():
        grpo, maxrl = ((variant, rule, 0.05) for rule in ("grpo", "maxrl"))
        seeds = records.seeds(grpo, maxrl)
        row: dict[str, Any] = {"model": variant, "seeds": seeds}
        for k in (1, 32):
            one, other = (records.pass_at(point, seeds, k) for point in (maxrl, grpo))
            row |= {f"pass@{k} grpo": float(other.mean()), f"pass@{k} maxrl": float(one.mean())}
            row[f"pass@{k}"] = _estimate(crossed_interval(one - other))
        rows.append(row)
    report: dict[str, Any] = {"models": rows}
    for k in (1, 32):
        means = np.array([row[f"pass@{k}"]["mean"] for row in rows])
        # An SFT model is one draw: Student's t over models.
        report[f"pass@{k}"] = _estimate(crossed_interval(means[:, None]))
        report[f"pass@{k} deviation"] = float(means.std(ddof=1))
    return report


def _start_values(records: VariantRecords, start: tuple, k: int) -> np.ndarray:
    correct = np.array([records.runs[start][None]["correct"]])
    return by_unit(np.asarray(pass_at_k(records.num_samples, correct, k)), records.units)


def _estimate(result: CrossedEstimate) -> dict[str, float]:
    return {"mean": result.mean, "low": result.low, "high": result.high}


def make_report() -> dict[str, Any]:
    """Everything that the committed records say."""
    report: dict[str, Any] = {"rows": report_rows(row_records())}
    for dialect in ("fork", "fork-twin"):
        if (path := RESULTS / f"{dialect}.json").exists():
            report[dialect] = report_fork(VariantRecords(read_json(path)), dialect)
        if (path := RESULTS / f"{dialect}{AGAIN}.json").exists():
            again = report_fork(VariantRecords(read_json(path)), dialect)
            report[f"{dialect}{AGAIN}"] = again
    others = [name for name in OTHER_STARTS if (RESULTS / f"{name}.json").exists()]
    if others:
        by_start = {name: VariantRecords(read_json(RESULTS / f"{name}.json")) for name in others}
        report["sft models"] = report_starts({"skewed": row_records()} | by_start)
    return report


def level_table(rows: Mapping[str, Any]) -> list[str]:
    """The levels of D4 and their differences, as lines of Markdown."""
    lines = [
        "| rows | algorithm | seeds | pass@1 | pass@8 | pass@32 | pass@1 − GRPO on skewed rows "
        "| pass@32 − the same | pass@32 − SFT | pass@32 beside GRPO's line |",
        "|" + "---|" * 10,
    ]
    for row in rows["points"]:
        differences = [row.get(f"pass@{k} - skewed grpo") for k in (1, 32)]
        cells = [row["rows"], f"`{row['algorithm']}`", str(len(row["seeds"]))]
        cells += [f"{row[f'pass@{k}']:.3f}" for k in (1, 8, 32)]
        cells += [_signed(estimate) for estimate in (*differences, row["pass@32 - sft"])]
        cells.append(_signed(row.get("pass@32 beside grpo's line")))
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def fork_table(report: Mapping[str, Any]) -> list[str]:
    """The levels of D1, and the guide beside GRPO, as lines of Markdown."""
    lines = [
        "| free letters in | algorithm | β | seeds | pass@1 | pass@8 | pass@32 | forked way "
        "| pass@1 − GRPO at this β | pass@32 − the same | pass@32 beside GRPO's line |",
        "|" + "---|" * 11,
    ]
    for dialect, where in (
        ("fork", "the rare way"),
        (f"fork{AGAIN}", "the rare way, second model"),
        ("fork-twin", "a wrong way"),
    ):
        if dialect not in report:
            continue
        pairs = {(pair["algorithm"], pair["beta"]): pair for pair in report[dialect]["pairs"]}
        for row in [{"algorithm": SFT, "beta": None, "seeds": []} | report[dialect]["sft"]] + (
            report[dialect]["points"]
        ):
            pair = pairs.get((row["algorithm"], row["beta"]), {})
            beta = "" if row["beta"] is None else f"{row['beta']:g}"
            cells = [where, f"`{row['algorithm']}`", beta, str(len(row["seeds"]) or "")]
            cells += [f"{row[name]:.3f}" for name in ("pass@1", "pass@8", "pass@32", "forked way")]
            beside = "pass@32 beside grpo-exact's line"
            cells += [_signed(pair.get(name)) for name in ("pass@1", "pass@32", beside)]
            lines.append("| " + " | ".join(cells) + " |")
    return lines


def start_table(report: Mapping[str, Any]) -> list[str]:
    """D3: what `maxrl` adds to `grpo` with each SFT model, as lines of Markdown."""
    lines = [
        "| SFT model | seeds | `grpo` pass@1 | pass@32 | `maxrl` − `grpo` pass@1 | pass@32 |",
        "|" + "---|" * 6,
    ]
    for number, row in enumerate(report["models"], 1):
        cells = [str(number), str(len(row["seeds"]))]
        cells += [f"{row[f'pass@{k} grpo']:.3f}" for k in (1, 32)]
        cells += [_signed(row[f"pass@{k}"]) for k in (1, 32)]
        lines.append("| " + " | ".join(cells) + " |")
    totals = [f"{_signed(report[f'pass@{k}'])}" for k in (1, 32)]
    lines.append("| " + " | ".join(["all, over models", "", "", "", *totals]) + " |")
    return lines


def _signed(result: Mapping[str, float] | None) -> str:
    if result is None:
        return ""
    return f"{result['mean']:+.3f} [{result['low']:+.3f}, {result['high']:+.3f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="folder of the runs, to collect first")
    options = parser.parse_args(arguments)
    if options.runs:
        print("collected:", ", ".join(collect(options.runs)))
    report = make_report()
    write_json(RESULTS / "report.json", report)
    draw_forks(report, RESULTS / "fork.png")
    print("\n".join(level_table(report["rows"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
