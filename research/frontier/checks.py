"""What a frontier's report must say beside its differences, all from the same counts.

    ks          pass@k at several k, beside what blind guessing solves; which k gets a verdict
    start       the SFT model from more samples, where `start_model.json` lies beside the records
    mixture     some attempts by the SFT model: the line that costs nothing, and who is above it
    line        who is above GRPO's line, interpolated only where it is known
    dose        how much each guide did, and what that could change
    families    whose gain and whose loss it is
    registered  the claims that were written down before, after Holm

Levels, differences, guessing, doses and families are those of a study's report on the same counts.

Shapes: S seeds, P problems, U units.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from research.benchmark.records import SFT
from research.frontier.records import BASELINE, as_study
from research.frontier.registered import REGISTERED, judge_registered
from sage_unsloth.objective.guides import Q_MAX
from sage_unsloth.study.chord import Place, distance_to_chord, find_neighbours
from sage_unsloth.study.crossed import CrossedEstimate, crossed_interval
from sage_unsloth.study.dose import possible_change
from sage_unsloth.study.free_lines import MIXTURE
from sage_unsloth.study.points import START, strengths_of
from sage_unsloth.study.records import Tables
from sage_unsloth.study.report import as_dict, doses, make_report, points_of


def make_checks(data: Mapping[str, Any], start: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `report.json` holds as `checks`.

    Args:
        data: what `records.json` holds.
        start: what `start_model.json` holds, if there is one.
    """
    study = as_study(data, start)
    name = next(iter(study["sets"]))
    tables, item = Tables(study, name), make_report(study)["sets"][name]
    k = tables.ks[-1]  # of the published differences
    points = {point: row for point, row in item["points"].items() if point != START}
    every = list(points_of(study).values())
    line = strengths_of(points_of(study)[BASELINE], every)
    names = [point.name for point in line]
    strengths = [*(point.settings[0][1] for point in line), float("inf")]

    def beside(place: Place, at: int) -> CrossedEstimate | str:
        """A place beside GRPO's line at k, or why there is no value."""
        first_L = [float(tables.values(point, 1).mean()) for point in (*names, START)]
        ends = find_neighbours(float(place.first.mean()), first_L, strengths)
        if isinstance(ends, str):
            return ends
        return distance_to_chord(place, *(tables.place(names[end], at) for end in ends))

    groups = item["groups"]
    written = REGISTERED.get((str(data["task"]), str(data["problems"])), {})
    claims = {point: letters for point, letters in written.items() if point in points}

    def estimate(point: str, claim: str) -> CrossedEstimate | None:
        if claim == "a":
            return crossed_interval(tables.values(point, 1) - tables.values(BASELINE, 1))
        if not item["ks"][str(k)]["usable"]:
            return None
        if claim == "d":
            result = beside(tables.place(point, k), k)
            return result if isinstance(result, CrossedEstimate) else None
        other = {"b": START, "c": BASELINE}[claim]
        return crossed_interval(tables.values(point, k) - tables.values(other, k))

    return {
        "k": item["k"],
        "ks": {
            at: {"sft": row[START], "grpo": row["baseline"]}
            | {name: row[name] for name in ("guess", "usable")}
            for at, row in item["ks"].items()
        },
        "start": _start(data, start, tables),
        "points": {
            point: {
                at: {"mean": level["mean"], "to_sft": row["to_start"][at]}
                | ({"to_baseline": row["to_baseline"][at]} if row["to_baseline"] else {})
                for at, level in row["level"].items()
            }
            for point, row in points.items()
        },
        "line": {
            point: _refused_or_values(
                {str(at): beside(tables.place(point, at), at) for at in tables.ks[1:]}
            )
            for point in points
            if point not in names
        },
        "mixture": {
            "rows": _mixtures(tables, beside),
            "beside": {
                point: {
                    at: result["each"][MIXTURE]
                    for at, result in row["to_lines"].items()
                    if MIXTURE in result.get("each", ())
                }
                for point, row in points.items()
                if point != BASELINE
            },
        },
        "dose": [
            _at_clip(row, study, tables, k) for row in doses(study, tables, k) if "twin" in row
        ],
        "families": groups
        and {
            "weights": groups["weights"],
            "curves": {SFT: groups["curves"][START], BASELINE: groups["curves"][BASELINE]},
            "parts": groups["parts"][BASELINE],
        },
        "registered": judge_registered(claims, estimate),
    }


def _refused_or_values(result: Mapping[str, CrossedEstimate | str]) -> dict[str, Any]:
    """k -> distance with interval; or `why` there is none."""
    refused = next((item for item in result.values() if isinstance(item, str)), None)
    if refused is not None:
        return {"why": refused}
    return {k: as_dict(item) for k, item in result.items() if isinstance(item, CrossedEstimate)}


def _start(
    data: Mapping[str, Any], start: Mapping[str, Any] | None, many: Tables
) -> dict[str, Any] | None:
    """The SFT model's pass@k from its few and its many samples."""
    if start is None:
        return None
    few = Tables(as_study(data), many.name)
    levels = {
        title: {str(k): float(tables.values(START, k).mean()) for k in many.ks}
        for title, tables in (("few", few), ("many", many))
    }
    return {name: start[name] for name in ("num_samples", "repeats", "problems")} | levels


def _mixtures(tables: Tables, beside: Any) -> list[dict[str, Any]]:
    """The mixtures' own values, and their distance to GRPO's line."""
    rows = []
    for k in tables.ks[1:]:
        for m in [m for m in tables.ks if m <= k // 2]:
            mixed = tables.mixed(m, k)
            line = beside(mixed, k)
            difference = crossed_interval(mixed.many - tables.values(BASELINE, k))
            row = {"k": k, "m": m, "random": float(mixed.first.mean())}
            row |= {"many": float(mixed.many.mean()), "to_baseline": as_dict(difference)}
            rows.append(
                row | {"to_line": as_dict(line) if isinstance(line, CrossedEstimate) else None}
            )
    return rows


def _at_clip(
    row: Mapping[str, Any], study: Mapping[str, Any], tables: Tables, k: int
) -> dict[str, Any]:
    """A dose, and what the largest q everywhere could change."""
    if row["possible"] is None:
        return dict(row)
    points = points_of(study)
    line: Sequence[Any] = strengths_of(points[row["twin"]], list(points.values()))
    many = [float(tables.values(point.name, k).mean()) for point in line]
    strengths = [point.settings[0][1] for point in line]
    place = line.index(points[row["twin"]])
    return dict(row) | {"possible_at_clip": possible_change(Q_MAX, place, many, strengths)}
