"""The reports of the committed records: those of a study, and what was written down before."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research.evidence.claims import judge_claims
from research.evidence.records import MORE_SAMPLES, read_study
from research.evidence.registered import REGISTERED, judge_registered
from sage_unsloth.runs.text import markdown_table
from sage_unsloth.study.crossed import CrossedEstimate, crossed_interval
from sage_unsloth.study.free_lines import STRENGTH, above_lines, distance_to_line, free_lines
from sage_unsloth.study.points import START, strengths_of
from sage_unsloth.study.records import Tables
from sage_unsloth.study.report import as_dict, points_of
from sage_unsloth.study.report import make_report as make_study_report
from sage_unsloth.study.text import cell, claim_lines, report_markdown
from sage_unsloth.study.verdicts import MATTERS


def make_report(folder: Path) -> dict[str, Any]:
    """Everything that `report.json` of a folder holds."""
    study = read_study(folder)
    main = next(iter(study["sets"]))
    report = make_study_report(dict(study) | {"sets": {main: study["sets"][main]}})
    tables, item = Tables(study, main), report["sets"][main]
    k = tables.ks[-1]
    every = list(points_of(study).values())
    baseline = next(point for point in every if point.name == tables.baseline)
    line = [(point.settings[0][1], point.name) for point in strengths_of(baseline, every)
            if point.settings]  # fmt: skip
    few = None
    if (folder / MORE_SAMPLES).exists():
        fewer = Tables(read_study(folder, more_samples=False), main)
        few = {str(at): float(fewer.values(START, at).mean()) for at in fewer.ks}
    usable = item["ks"][str(k)]["usable"]
    registered = REGISTERED.get((study["task"], study["problems"]), {})
    return report | {
        "task": study["task"],
        "problems": study["problems"],
        "start_as_published": few,
        "mixtures": _mixtures(tables, line),
        "registered": judge_registered(
            {point: letters for point, letters in registered.items() if point in tables.points},
            lambda point, claim: _estimate(tables, line, point, claim, usable),
        ),
        "paper": [] if study["problems"] else judge_claims(study),
    }


def _estimate(
    tables: Tables, line: Sequence[tuple[float, str]], point: str, claim: str, usable: bool
) -> CrossedEstimate | None:
    """The difference of a registered claim at the largest k, or None where it has no value."""
    k = tables.ks[-1]
    if claim == "a":
        return crossed_interval(tables.values(point, 1) - tables.values(tables.baseline, 1))
    if not usable:
        return None
    if claim == "d":
        return above_lines(tables, point, free_lines(tables, k, line), k).get(STRENGTH)
    other = {"b": START, "c": tables.baseline}[claim]
    return crossed_interval(tables.values(point, k) - tables.values(other, k))


def _mixtures(tables: Tables, line: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
    """m of k attempts by the SFT model: values, minus the baseline and minus its line over β."""
    rows = []
    for k in tables.ks[2:]:
        strengths = free_lines(tables, k, line).get(STRENGTH, [])
        for m in [m for m in tables.ks if m <= k // 2]:
            mixed = tables.mixed(m, k)
            beside = distance_to_line(mixed, strengths, steps=True)
            rows.append(
                {
                    "k": k,
                    "m": m,
                    "random": float(mixed.first.mean()),
                    "many": float(mixed.many.mean()),
                    "to_baseline": as_dict(
                        crossed_interval(mixed.many - tables.values(tables.baseline, k))
                    ),
                    "to_line": None if beside is None else as_dict(beside),
                }
            )
    return rows


def markdown(report: Mapping[str, Any]) -> str:
    """`report.md`: a study's, and the tables of what only these folders have."""
    differences = f"{report['comparisons']} differences have an interval here, each 95 % by itself."
    text = report_markdown(report).replace("\n\n".join(claim_lines(report)), differences)
    parts = [text.strip()]
    if few := report["start_as_published"]:
        levels = ", ".join(f"pass@{k} {value:.3f}" for k, value in few.items())
        parts.append(f"The start model as published, from fewer samples: {levels}.")
    rows = [["k", "of them by the start model", "pass@1, random attempt", "pass@k"]]
    rows[0] += [f"minus `{report['baseline']}`", "minus its line over β"]
    rows += [
        [
            *map(str, (row["k"], row["m"])),
            *(f"{row[name]:.3f}" for name in ("random", "many")),
            *(cell(row[name]) for name in ("to_baseline", "to_line")),
        ]
        for row in report["mixtures"]
    ]
    parts += ["## Some attempts by the start model", markdown_table(rows)]
    if report["registered"]:
        parts += ["## What was registered, after Holm", REGISTERED_TEXT, _registered_table(report)]
    if report["paper"]:
        parts += ["## The paper's claims", PAPER_TEXT, _paper_table(report)]
    return "\n\n".join(parts) + "\n"


REGISTERED_TEXT = (
    f"The claims of the design, at the largest k: (a) pass@1 at most {MATTERS:g} below the "
    "baseline's, (b) pass@k at most that much below the start model's, (c) pass@k above the "
    "baseline's, (d) above the baseline's line over β. p is two-sided; Holm's correction is over "
    "all rows. A claim without a value has p = 1."
)
PAPER_TEXT = (
    f'A gain or loss below {MATTERS:g} counts as none: "supported" is an interval beyond 0 on the '
    'claimed side, "not supported" one that excludes such a difference there, "undecided" the '
    "rest. Of as many intervals as there are rows, one in twenty misses by chance."
)


def _registered_table(report: Mapping[str, Any]) -> str:
    rows = [["point", "claim", "difference", "p", "p after Holm", "holds"]]
    for row in report["registered"]:
        numbers = [f"{row[name]:.4f}" for name in ("p", "p_holm")]
        holds = "yes" if row["holds"] else "no"
        rows.append([row["point"], row["claim"], cell(row), *numbers, holds])
    return markdown_table(rows)


def _paper_table(report: Mapping[str, Any]) -> str:
    rows = [["claim", "in the paper", "here", "difference", "verdict"]]
    for row in report["paper"]:
        where = row["quantity"] + (" out of distribution" if row["set"] == "ood" else "")
        here = f"{where}: {row['value_b']:.3f} → {row['value_a']:.3f}"
        rows.append([row["text"], row["paper"], here, cell(row), row["verdict"]])
    return markdown_table(rows)
