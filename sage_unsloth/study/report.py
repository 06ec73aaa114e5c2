"""From the counts of a study to its report: levels, differences, free lines, claims, doses.

Shapes: S seeds, P problems, U units.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sage_unsloth.evaluation.metrics import guess_bound
from sage_unsloth.study.crossed import (
    CrossedEstimate,
    components,
    crossed_interval,
    detectable_difference,
)
from sage_unsloth.study.dose import is_negligible, measure_dose, possible_change
from sage_unsloth.study.free_lines import above_lines, average_nodes, envelope, free_lines
from sage_unsloth.study.points import START, Point, same_method
from sage_unsloth.study.records import Tables, by_unit, family_curves, family_parts, family_weights
from sage_unsloth.study.verdicts import (
    ALPHA,
    MATTERS,
    holm,
    is_informative,
    main_k,
    p_value,
    verdict,
)

LEAST_DOSE = 0.01
"""Nats of Σ log q per completion; a guide that did less was in effect off."""
GUESSING, NO_DOSE, ONE_SEED = "none: guessing", "none: dose near 0", "none: one seed"
EQUAL = "none: every count is equal"
"""Reasons for no verdict."""


def make_report(data: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `report.json`, from those of `records.json`."""
    first = next(iter(data["sets"]))
    sets = {name: _set_report(data, Tables(data, name)) for name in data["sets"]}
    main = Tables(data, first)
    dose = doses(data, main, sets[first]["k"])
    off = {row["point"] for row in dose if row["no_verdict"]}
    for item in sets.values():
        _give_verdicts(item, off, len(main.seeds))
    return {
        "title": data["title"],
        "baseline": data["baseline"],
        "points": data["points"],
        "seeds": main.seeds,
        "settings": data["settings"],
        "environment": data["environment"],
        "sets": sets,
        "dose": dose,
        "claims": _claims(data, main, sets[first]["ks"], off),
        "comparisons": sum(_count(item) for item in sets.values()),
    }


def as_dict(estimate: CrossedEstimate) -> dict[str, float]:
    return {"mean": estimate.mean, "low": estimate.low, "high": estimate.high}


def _level(values_SU: np.ndarray, *, once: bool) -> dict[str, float]:
    """The interval of shares in [0, 1]; `once`: all rows are the same model."""
    values_SU = values_SU[:1] if once else values_SU
    if values_SU.size < 2:
        return dict.fromkeys(("mean", "low", "high"), float(values_SU.mean()))
    result = as_dict(crossed_interval(values_SU))
    return {name: min(1.0, max(0.0, value)) for name, value in result.items()}


def _set_report(data: Mapping[str, Any], tables: Tables) -> dict[str, Any]:
    """The report on one benchmark, without verdicts."""
    ks = _ks(tables)
    values = {(p, k): tables.values(p, k) for p in (START, *tables.points) for k in tables.ks}
    lines = {k: free_lines(tables, k, _strengths(data)) for k in tables.ks if k > 1}
    points: dict[str, Any] = {}
    for point in (START, *tables.points):
        row: dict[str, Any] = {"level": {}, "to_start": {}, "to_baseline": {}, "to_lines": {}}
        for k in tables.ks:
            row["level"][str(k)] = _level(values[point, k], once=point == START)
            for to, other in (("to_start", START), ("to_baseline", tables.baseline)):
                if point not in (START, other):
                    difference = crossed_interval(values[point, k] - values[other, k])
                    row[to][str(k)] = as_dict(difference)
            if k > 1 and point not in (START, tables.baseline):
                row["to_lines"][str(k)] = _beside_lines(tables, point, lines[k], k)
        points[point] = row
    k = main_k(ks)
    return {
        "k": k,
        "ks": ks,
        "num_problems": len(tables.set["problems"]),
        "num_units": len(set(tables.units)),
        "num_samples": {p: tables.correct(p)[0] for p in (START, tables.baseline)},
        "points": points,
        "lines": {name: average_nodes(nodes) for name, nodes in lines.get(k, {}).items()},
        "lines_to_come": sorted(
            {item["kind"] for item in data["variants"]} - set(lines.get(k, {})) if k > 1 else ()
        ),
        "groups": _groups(tables),
        "detectable": _detectable(tables, values, k),
    }


def _ks(tables: Tables) -> dict[str, dict[str, Any]]:
    """For each k: pass@k of the start model and of the baseline, the guess bound, and whether a
    verdict is given.
    """
    rows: dict[str, dict[str, Any]] = {}
    for k in tables.ks:
        start = float(tables.values(START, k).mean())
        row: dict[str, Any] = {START: start, "guess": None, "usable": True}
        row["baseline"] = float(tables.values(tables.baseline, k).mean())
        if "guess" in tables.set:
            bounds_P = guess_bound(np.array(tables.set["guess"], float), k)
            row["guess"] = float(by_unit(bounds_P[None], tables.units).mean())
            row["usable"] = not row["guess"] or is_informative(row["guess"], start)
        rows[str(k)] = row
    return rows


def _strengths(data: Mapping[str, Any]) -> list[tuple[float, str]]:
    """The baseline at each of its strengths: (value, point)."""
    points = trained_points(data)
    line = same_method(points[data["baseline"]], list(points.values()))
    return [(point.settings[0][1], point.name) for point in line if point.settings]


def trained_points(data: Mapping[str, Any]) -> dict[str, Point]:
    trained = {run["point"] for run in data["runs"]}
    return {
        name: Point(item["algorithm"], tuple(item["settings"].items()))
        for name, item in data["points"].items()
        if name in trained
    }


def _beside_lines(tables: Tables, point: str, lines: Mapping, k: int) -> dict[str, Any]:
    """Distances of a point to the upper envelope of the free lines and to each of them."""
    distances = above_lines(tables, point, dict(lines), k)
    highest = envelope(distances)
    if highest is None:
        return {"why": "no free line has this pass@1"}
    each = {name: as_dict(item) for name, item in distances.items()}
    return {"line": highest[0], **as_dict(highest[1]), "each": each}


def _groups(tables: Tables) -> dict[str, Any] | None:
    """Curves of each group of problems, and its share of the change of the mean."""
    if len(set(tables.families)) < 2:
        return None
    weights = family_weights(tables.families, tables.units)
    of_unit = list(dict(zip(tables.units, tables.families, strict=True)).values())
    curves = {
        point: family_curves({k: tables.values(point, k) for k in tables.ks}, of_unit)
        for point in (START, *tables.points)
    }
    parts = {point: family_parts(curves[START], curves[point], weights) for point in tables.points}
    return {"weights": weights, "curves": curves, "parts": parts}


def _detectable(tables: Tables, values: Mapping, k: int) -> dict[str, float] | None:
    """The true difference to the baseline that this design detects with power .8, at 1 and k."""
    sizes = len(tables.seeds), len(set(tables.units))
    others = [point for point in tables.points if point != tables.baseline]
    if min(sizes) < 2 or not others:
        return None
    detectable = {}
    for at in dict.fromkeys((1, k)):
        tables_of = [values[point, at] - values[tables.baseline, at] for point in others]
        each = [detectable_difference(components(table), *sizes) for table in tables_of]
        detectable[str(at)] = max(each)
    return detectable


def doses(data: Mapping[str, Any], tables: Tables, k: int) -> list[dict[str, Any]]:
    """The dose of each guide in training, and how much it could change pass@k."""
    points, rows = trained_points(data), []
    measured = {dose["point"]: dose for dose in data.get("doses", ())}
    for point in points.values():
        dose = measure_dose(tables.runs_at(point.name))
        if dose is None:
            continue
        row: dict[str, Any] = {"point": point.name} | dose
        at_start = measured.get(point.name, {})
        row |= {name: at_start.get(name) for name in ("correct", "wrong")}
        # Branch alone multiplies the pull to the reference, by q >= 1, whatever the token is. Of
        # other guides Σ log q may cancel in the mean, so its spread counts too.
        is_branch = str(data["points"][point.name]["guide"]).startswith("BranchGuide(")
        total = dose.get("log_guide_sum", dose.get("log_guide_sum_at_most", 0.0))
        spread = 0.0 if is_branch else at_start.get("spread", math.inf)
        row["no_verdict"] = max(abs(total), spread) < LEAST_DOSE
        twin = points.get(data["points"][point.name]["twin"])
        if twin is not None:
            line = same_method(twin, list(points.values()))
            difference = tables.values(point.name, k) - tables.values(twin.name, k)
            detectable = None
            if min(difference.shape) > 1:
                detectable = detectable_difference(components(difference), *difference.shape)
            possible = None
            if is_branch and len(line) > 1 and twin.settings[0][0] == "beta":
                many = [float(tables.values(item.name, k).mean()) for item in line]
                strengths = [item.settings[0][1] for item in line]
                possible = possible_change(dose["guide_mean"], line.index(twin), many, strengths)
            row |= {"twin": twin.name, "difference": as_dict(crossed_interval(difference))}
            row |= {"detectable": detectable, "possible": possible}
            row["no_verdict"] = row["no_verdict"] or is_negligible(possible, detectable)
        rows.append(row)
    return rows


def _give_verdicts(item: dict[str, Any], off: set[str], seeds: int) -> None:
    """Adds a verdict to each difference, or the reason for none."""
    for point, row in item["points"].items():
        if point == START:
            continue
        row["verdicts"] = {}
        for to in ("to_start", "to_baseline", "to_lines"):
            for k, result in row[to].items():
                if "mean" not in result:
                    continue
                word = judge_difference(result["low"], result["high"])
                if not item["ks"][k]["usable"]:
                    word = GUESSING
                elif seeds < 2:
                    word = ONE_SEED
                elif point in off and to != "to_start":
                    word = NO_DOSE
                elif result["low"] == result["high"]:
                    word = EQUAL  # nothing was measured of how much a problem could differ
                row["verdicts"][f"{to}@{k}"] = word


def judge_difference(low: float, high: float) -> str:
    """ "higher", "lower", "equal within .03", or "undecided"."""
    if low > 0:
        return "higher"
    if high < 0:
        return "lower"
    same = verdict("no loss", low, high) == "supported" and high < MATTERS
    return f"equal within {MATTERS:g}" if same else "undecided"


def _claims(
    data: Mapping[str, Any], tables: Tables, ks: Mapping[str, Any], off: set[str]
) -> list[dict[str, Any]]:
    """Each registered claim after Holm; one without a value or a verdict has p = 1."""
    rows = []
    known = {START, *tables.points}
    for text, claim in data["claims"].items():
        row: dict[str, Any] = {"claim": text} | dict(claim)
        sides = (claim["better"], claim["worse"])
        why = None
        if not set(sides) <= known:
            why = "not run"
        elif not ks[str(claim["k"])]["usable"]:
            why = GUESSING
        elif len(tables.seeds) < 2:
            why = ONE_SEED
        elif off & set(sides):
            why = NO_DOSE
        row["p"] = 1.0
        if set(sides) <= known:
            a, b = (tables.values(side, claim["k"]) for side in sides)
            estimate = crossed_interval(a - b)
            row |= as_dict(estimate)
            if not estimate.error:
                why = why or EQUAL
            row["p"] = 1.0 if why else p_value(estimate, 0.0)
        rows.append(row | {"why": why})
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row |= {"p_holm": adjusted, "holds": adjusted < ALPHA}
    return rows


def _count(item: Mapping[str, Any]) -> int:
    """Number of differences with an interval in the report on a benchmark."""
    return sum(
        "mean" in result
        for row in item["points"].values()
        for to in ("to_start", "to_baseline", "to_lines")
        for result in row[to].values()
    )
