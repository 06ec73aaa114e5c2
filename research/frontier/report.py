"""From the counts of a frontier to its report: points, lines, what is kept, guides beside twins.

Shapes: S seeds, P problems, R resamples, L strengths.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from research.benchmark.records import SFT
from research.benchmark.report import interval, level
from research.frontier.checks import make_checks
from research.frontier.line import above_line, kept, resampled
from research.frontier.records import BASELINE, FrontierRecords, as_study
from sage_unsloth.study.crossed import components
from sage_unsloth.study.verdicts import MATTERS, verdict

LEVELS = {"at": 0.0, "near": MATTERS}
"""How much less than the baseline's pass@1 counts as having it."""
NO_DOSE, GUESSING = "none: dose near 0", "none: guessing"
"""What stands where no verdict is given."""


def make_report(data: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Everything that `report.json` holds, from what `records.json` holds.

    Args:
        data: what `records.json` holds.
        start: what `start_model.json` holds, where the SFT model was sampled again.
    """
    records = FrontierRecords(data)
    values = {point: records.values(point) for point in records.algorithms}
    points = {point: _point(records, values, point) for point in records.algorithms}
    drawn = _drawn(values)
    for point, result in _above(records, values, drawn).items():
        points[point]["to_line"] = result
    checks = make_checks(data, start)
    _withdraw_verdicts(points, checks, records.k)
    return {
        "task": data["task"],
        "title": data["title"],
        "problems": data["problems"],
        "seeds": records.seeds,
        "k": records.k,
        "num_problems": len(data["sets"][records.set]["problems"]),
        "num_units": len(set(records.units)),
        "num_samples": records.num_samples,
        "settings": data["settings"],
        "environment": data["environment"],
        "points": points,
        "methods": _methods(records, values, drawn),
        "chosen": _chosen(records, values),
        "guides": _guides(data, values),
        "components": _components(values, len(records.seeds)),
        "checks": checks,
    }


def _withdraw_verdicts(points: Mapping[str, Any], checks: Mapping[str, Any], k: int) -> None:
    """No verdict at a k that guessing reaches, and none on a guide that did nearly nothing."""
    off = {row["point"] for row in checks["dose"] if row["no_verdict"]}
    for point, result in points.items():
        for name in result.get("verdicts", {}):
            if point in off:
                result["verdicts"][name] = NO_DOSE
            elif "pass@k" in name and not checks["ks"][str(k)]["usable"]:
                result["verdicts"][name] = GUESSING


def _point(records: FrontierRecords, values: Mapping, point: str) -> dict[str, Any]:
    """Levels of a point, and its differences to `BASELINE` and to SFT with what they say."""
    once = point == SFT
    result: dict[str, Any] = dict(records.points[point])
    result |= {name: level(table, once) for name, table in values[point].items()}
    result["families"] = records.families(point)
    for column in ("reward", "kl", "entropy"):
        third = records.third(point, column, 2)
        result[column] = None if third is None else interval(third)
    if once:
        return result
    result["to_baseline"] = {
        name: interval(table - values[BASELINE][name]) for name, table in values[point].items()
    }
    result["to_sft"] = {
        name: interval(table - values[SFT][name]) for name, table in values[point].items()
    }
    result["verdicts"] = {
        "has GRPO's pass@1": _said("no loss", result["to_baseline"]["pass@1"]),
        "keeps SFT's pass@k": _said("no loss", result["to_sft"]["pass@k"]),
        "more pass@k than GRPO": _said("gain", result["to_baseline"]["pass@k"]),
    }
    return result


def _said(kind: str, result: Mapping[str, float]) -> str:
    return verdict(kind, result["low"], result["high"])


def _drawn(values: Mapping) -> dict[str, np.ndarray]:
    """Means of each point over seeds and problems that are drawn anew, (R,), by point and
    quantity.
    """
    tables = {
        f"{point} {name}": table[name]
        for point, table in values.items()
        for name in ("pass@1", "pass@k")
    }
    return resampled(tables, [name for name in tables if name.startswith(f"{SFT} ")])


def _above(
    records: FrontierRecords, values: Mapping, drawn: Mapping[str, np.ndarray]
) -> dict[str, dict[str, float]]:
    """Each point's `above_line` to GRPO's line, with 95 % of the resamples.

    The line ends in the SFT model, from which a large enough β does not move.
    """
    line = next(points for points in records.methods().values() if BASELINE in points)
    line = [*line, SFT]

    def above(of: Callable[[str, str], Any]) -> Any:
        ends = [np.stack([of(item, name) for item in line], -1) for name in ("pass@1", "pass@k")]
        return above_line(of(point, "pass@1"), of(point, "pass@k"), *ends)

    result = {}
    for point in values:
        if point not in line:
            many = above(lambda item, name: drawn[f"{item} {name}"])
            low, high = np.quantile(many, (0.025, 0.975))
            mean = above(lambda item, name: values[item][name].mean())
            result[point] = {"mean": float(mean), "low": float(low), "high": float(high)}
    return result


def _methods(
    records: FrontierRecords, values: Mapping, drawn: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Each method's points, and the pass@k that its line keeps at the levels of `LEVELS`."""

    def mean(point: str, name: str) -> float:
        return float(values[point][name].mean())

    result = {}
    for method, points in records.methods().items():
        first, many = (
            np.array([mean(point, name) for point in points]) for name in ("pass@1", "pass@k")
        )
        first_R, many_R = (
            np.stack([drawn[f"{point} {name}"] for point in points], axis=-1)
            for name in ("pass@1", "pass@k")
        )
        result[method] = {"points": points} | {
            name: asdict(
                kept(
                    mean(BASELINE, "pass@1") - less,
                    drawn[f"{BASELINE} pass@1"] - less,
                    (first, many),
                    (first_R, many_R),
                    mean(SFT, "pass@k"),
                    drawn[f"{SFT} pass@k"],
                )
            )
            for name, less in LEVELS.items()
        }
    return result


def _chosen(records: FrontierRecords, values: Mapping) -> dict[str, str]:
    """The point of each method for a verdict on other problems: the highest pass@k where pass@1 is
    at least the baseline's minus `MATTERS`; where it is nowhere, the highest pass@1.
    """
    floor = values[BASELINE]["pass@1"].mean() - MATTERS
    result = {}
    for method, points in records.methods().items():
        enough = [point for point in points if values[point]["pass@1"].mean() >= floor]
        name = "pass@k" if enough else "pass@1"
        result[method] = max(enough or points, key=lambda point: values[point][name].mean())
    return result


def _guides(data: Mapping[str, Any], values: Mapping) -> list[dict[str, Any]]:
    """Each point with a guide minus its twin: the same settings and strength without the guide."""
    twins = {point: item["twin"] for point, item in as_study(data)["points"].items()}
    return [
        {"point": point, "twin": twin}
        | {
            quantity: interval(values[point][quantity] - values[twin][quantity])
            for quantity in ("pass@1", "pass@k", "area")
        }
        for point, twin in twins.items()
        if twin is not None
    ]


def _components(values: Mapping, seeds: int) -> dict[str, Any]:
    """Variance components of the differences to `BASELINE`; {} for a single seed."""
    if seeds < 2:
        return {}
    return {
        f"{point} - {BASELINE}": {
            name: asdict(components(table[name] - values[BASELINE][name]))
            for name in ("pass@1", "pass@k")
        }
        for point, table in values.items()
        if point not in (SFT, BASELINE) and table["pass@1"].shape[1] > 1
    }
