"""A frontier's report as text: `report.md`, and a table of the documentation."""

from collections.abc import Mapping, Sequence
from typing import Any

from research.benchmark.records import SFT
from research.benchmark.report_tables import FIGURES, cell, markdown_table
from research.frontier.checks_text import check_parts, pilot_parts
from research.frontier.records import BASELINE
from sage_unsloth.study.crossed import Components, detectable_difference
from sage_unsloth.study.verdicts import MATTERS

NAMES = ("pass@1", "pass@k")


def conditions(report: Mapping[str, Any]) -> str:
    """One sentence that says what the numbers are of."""
    seeds, environment = report["seeds"], report["environment"]
    packages, settings = environment["packages"], report["settings"]["rlvr"]
    return (
        f"{report['title']}, {report['problems']} problems; {len(seeds)} training "
        f"seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))}) of each point from one SFT "
        f"model, {settings['max_steps']} steps of {settings['prompts_per_step']} x "
        f"{settings['num_generations']} completions, learning rate "
        f"{settings['learning_rate']:g}; {_problems(report)}, "
        f"{report['num_samples']} samples each at "
        f"T = {report['settings']['sampling']['temperature']:g}; unsloth {packages['unsloth']}, "
        f"torch {packages['torch']}, {environment['date'][:10]}"
    )


def _problems(report: Mapping[str, Any]) -> str:
    problems, units = report["num_problems"], report["num_units"]
    text = f"{problems} held-out problems"
    return text if units == problems else f"{text} in {units} units that count alike"


def brackets(report: Mapping[str, Any]) -> str:
    """What the brackets are of."""
    seeds = "training seeds and problems at once" if len(report["seeds"]) > 1 else "problems alone"
    return (
        f"[ ]: 95 % over {seeds}; differences are paired by both. The SFT model was trained once, "
        "so its interval is over problems alone, and differences to it hold for this SFT model."
    )


def points_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows: every point's levels, and its differences to the baseline and to SFT."""
    k = report["k"]
    header = ["point", "pass@1", f"pass@{k}", "area", "reward, last third", "KL, last third"]
    header += ["pass@1 − GRPO", f"pass@{k} − SFT", f"pass@{k} − GRPO"]
    rows = [header]
    for point, result in report["points"].items():
        row = [point, *(cell(result[name]) for name in ("pass@1", "pass@k", "area"))]
        row += [_mean(result["reward"]), _mean(result["kl"])]
        if point == SFT:
            row += [""] * 3
        else:
            first, many = (
                "" if point == BASELINE else cell(result["to_baseline"][name], sign=True)
                for name in NAMES
            )
            row += [first, cell(result["to_sft"]["pass@k"], sign=True), many]
        rows.append(row)
    return rows


def _mean(result: Mapping[str, float] | None) -> str:
    return "–" if result is None else f"{result['mean']:.3f}".replace("0.", ".", 1)


def families_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows: pass@1 and pass@k of each family of problems, `.05; .64`."""
    families = list(report["points"][SFT]["families"])
    if not families:
        return []
    return [["pass@1; pass@" + str(report["k"]), *families]] + [
        [
            point,
            *(
                "; ".join(f"{result['families'][family][name]:.2f}" for name in NAMES)
                for family in families
            ),
        ]
        for point, result in report["points"].items()
    ]


def verdicts_table(report: Mapping[str, Any], points: Sequence[str]) -> list[list[str]]:
    """Header and rows: what the intervals of some points say."""
    names = list(report["points"][BASELINE]["verdicts"])
    return [["point", *names]] + [
        [point, *(report["points"][point]["verdicts"][name] for name in names)] for point in points
    ]


def methods_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows: the pass@k that each method's line keeps, at GRPO's pass@1 and near it."""
    k = report["k"]
    header = ["method", f"pass@{k} at GRPO's pass@1", "minus SFT's", "reached"]
    header += [f"pass@{k} at {MATTERS:g} less", "minus SFT's", "reached"]
    rows = [header]
    for method, result in report["methods"].items():
        row = [method]
        for name in ("at", "near"):
            selected = result[name]
            row += [
                _kept(selected, "mean", "low", "high"),
                _kept(selected, "difference", "difference_low", "difference_high", sign=True),
                f"{selected['reached']:.0%}",
            ]
        rows.append(row)
    return rows


def _kept(result: Mapping[str, Any], mean: str, low: str, high: str, sign: bool = False) -> str:
    if result[mean] is None:
        return "not reached"
    if result[low] is None:
        return f"{result[mean]:+.3f}" if sign else f"{result[mean]:.3f}"
    return cell({"mean": result[mean], "low": result[low], "high": result[high]}, sign)


def guides_table(report: Mapping[str, Any]) -> list[list[str]]:
    """Header and rows: every guided point minus the same without the guide."""
    if not report["guides"]:
        return []
    quantities = {"pass@1": "pass@1", "pass@k": f"pass@{report['k']}", "area": "area"}
    return [["guide", "minus", *quantities.values()]] + [
        [row["point"], row["twin"], *(cell(row[name], sign=True) for name in quantities)]
        for row in report["guides"]
    ]


def power_lines(report: Mapping[str, Any], seeds: int, problems: int) -> list[str]:
    """The true differences that a design finds 4 times in 5, by a report's variances.

    `seeds` >= 2.
    """
    k = report["k"]
    titles = {"pass@1": "pass@1", "pass@k": f"pass@{k}"}
    return [
        f"{pair}: "
        + ", ".join(
            f"{titles[name]} {detectable_difference(Components(**result), seeds, problems):.3f}"
            for name, result in by_name.items()
        )
        for pair, by_name in report["components"].items()
    ]


def markdown(report: Mapping[str, Any]) -> str:
    """`report.md`."""
    k = report["k"]
    parts = [
        f"# Frontier: {report['title']}, {report['problems']} problems",
        f"{conditions(report)}.",
        brackets(report),
        "![frontier](frontier.png)",
        "## Points",
        f"GRPO is `{BASELINE}`; area: the mean of pass@k over log k, from 1 to {k}.",
        markdown_table(points_table(report)),
        f"{FIGURES}: `differences.png`.",
        *_verdicts(report),
        *_families(report),
        "## What a method keeps",
        _how_kept(report),
        markdown_table(methods_table(report)),
        *check_parts(report),
    ]
    if guides := guides_table(report):
        parts += [
            "## Guides, each against the same settings without it",
            markdown_table(guides),
        ]
    if report["components"]:
        lines = power_lines(report, len(report["seeds"]), report["num_units"])
        parts += [
            "## Power",
            "A true difference that this design finds 4 times in 5, by the variances that it "
            "measured:",
            "\n".join(f"- {line}" for line in lines),
        ]
    return "\n\n".join(parts) + "\n"


def _verdicts(report: Mapping[str, Any]) -> list[str]:
    if report["problems"] == "pilot":
        rows = [[method, point] for method, point in report["chosen"].items()]
        return [
            "## Chosen for the verdict",
            f"The highest pass@{report['k']} among a method's points whose pass@1 is at least "
            f"GRPO's minus {MATTERS:g}; where there is none, the highest pass@1.",
            markdown_table([["method", "point"], *rows]),
        ]
    points = [point for point in report["points"] if point != SFT]
    return [
        "## Verdicts",
        f'"supported": the interval shows it; a loss below {MATTERS:g} counts as none. "not '
        'supported": the interval excludes it. "undecided": neither. None is given at a k that '
        "guessing reaches, nor on a guide that did nearly nothing; see below.",
        markdown_table(verdicts_table(report, points)),
    ]


def _families(report: Mapping[str, Any]) -> list[str]:
    families = families_table(report)
    return ["Families of problems, means:", markdown_table(families)] if families else []


def _how_kept(report: Mapping[str, Any]) -> str:
    return (
        f"A line joins a method's strengths; pass@{report['k']} is read where it last has GRPO's "
        f"pass@1, or {MATTERS:g} less. [ ]: 95 % of 2,000 resamples of seeds and problems, of "
        "those that reach that pass@1, whose share is beside it."
    )


# --- the short report, for `docs/tables/` ---------------------------------------------------------


def section(report: Mapping[str, Any], folder: str) -> str:
    """A frontier in a page: its points, what is kept, guides, verdicts.

    Args:
        report: of the frontier.
        folder: where its figures and tables are, from the page.
    """
    points = points_table(report)
    short = [[*row[:4], row[5], *row[6:]] for row in points]
    guides = guides_table(report)
    return "\n\n".join(
        [
            f"**{report['problems'].capitalize()}:** {conditions(report)}. {brackets(report)}",
            f"![frontier]({folder}/frontier.png)",
            markdown_table(short),
            *_families(report),
            *_verdicts(report)[1:],
            _how_kept(report),
            markdown_table(methods_table(report)),
            *(check_parts if report["problems"] == "fresh" else pilot_parts)(report),
            *(["Each guide minus the same without it:", markdown_table(guides)] if guides else []),
            f"All of it: [report]({folder}/report.md); every count: "
            f"[records.json]({folder}/records.json).",
        ]
    )
