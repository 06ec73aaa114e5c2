"""The figures of the committed benchmark and frontiers, each with its table as a CSV."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import error_bars, line_styles, write_table
from sage_unsloth.study.free_lines import MIXTURE, STRENGTH
from sage_unsloth.study.points import START
from sage_unsloth.study.publish import draw_frontier
from sage_unsloth.study.text import conditions

GREY = "#555555"
CURVES = (START, "grpo", "grpo-no-kl", "grpo-exact", "sage-branch", "sage-branch-exact",
          "sage-token")  # fmt: skip
"""Points of a benchmark that are drawn against k; its report has all."""
CROSSING = {
    START: ("SFT, before RL", 5),
    "grpo beta=0.05": ("GRPO", -11),
    "maxrl rehearsal_coef=0.3": ("MaxRL + rehearsal", -8),
}
"""Points of the README's picture: label, and its shift in points."""


def draw(report: Mapping[str, Any], out: Path) -> None:
    """pass@k against pass@1, and of a benchmark also against k."""
    note = "\n".join(textwrap.wrap(conditions(report), 130))
    draw_frontier(report, out / "frontier.png", note)
    if report["problems"]:  # of a frontier
        return
    panels = {
        name: {
            "SFT" if point == START else point: {
                int(k): Estimate(**level) for k, level in row["level"].items()
            }
            for point, row in item["points"].items()
            if point in CURVES
        }
        for name, item in report["sets"].items()
    }
    plot_pass_at_k(panels, out / "pass_at_k.png", note)


def draw_crossing(report: Mapping[str, Any], path: Path) -> None:
    """The README's picture: pass@k of three models of the arithmetic frontier."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    axis, rows = figure.subplots(), []
    points = next(iter(report["sets"].values()))["points"]
    styles = line_styles(label for label, _ in CROSSING.values())
    for point, (label, shift) in CROSSING.items():
        colour, levels = styles[label]["color"], points[point]["level"]
        x = list(map(int, levels))
        y, low, high = ([row[name] for row in levels.values()] for name in ("mean", "low", "high"))
        rows += [{"line": label, "k": k} | row for k, row in levels.items()]
        axis.plot(x, y, color=colour, marker="o", markersize=5, linewidth=2.5, clip_on=False)
        axis.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
        axis.annotate(
            label,
            (x[-1], y[-1]),
            xytext=(8, shift),
            textcoords="offset points",
            color=colour,
            fontsize=12,
            fontweight="bold",
            annotation_clip=False,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(x, map(str, x))
    axis.tick_params(labelsize=12)
    axis.set_xlabel("k, attempts at a problem", fontsize=12)
    axis.set_ylabel("pass@k", fontsize=12)
    axis.set_xlim(0.95, x[-1])
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=150)


def draw_verdicts(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each report: pass@1 against pass@k of every point at the largest k with a
    verdict, GRPO's line through its β to the SFT model, and the mixtures of both.

    Bars are the 95 % intervals of the difference to the baseline, which is paired.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(reports), 5.2), layout="constrained")
    axes = figure.subplots(1, len(reports), squeeze=False)[0]
    rows: list[dict[str, Any]] = []
    styles = line_styles(dict.fromkeys(p for report in reports for p in report["points"]))
    for axis, report in zip(axes, reports, strict=True):
        rows += _panel(axis, report, styles)
    steps, seeds = reports[0]["settings"]["rlvr"]["max_steps"], len(reports[0]["seeds"])
    figure.supxlabel(
        f"{steps} steps of models of 0.7 M parameters; {seeds} training seeds\n"
        "grey: GRPO's line through its β; dashed: some attempts by SFT, the rest by β 0.05\n"
        "bars: 95 % of the difference to β 0.05; k: the largest that guessing does not reach",
        fontsize=8,
        color=GREY,
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)


def _panel(
    axis: Any, report: Mapping[str, Any], styles: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    item, rows = next(iter(report["sets"].values())), []
    k, points = str(item["k"]), item["points"]
    levels = {
        name: (row["level"]["1"]["mean"], row["level"][k]["mean"]) for name, row in points.items()
    }
    start = levels[START]
    axis.plot(*start, "k*", markersize=13)
    axis.axhline(start[1], color=GREY, linewidth=0.8, linestyle=":")
    axis.annotate("SFT", start, xytext=(8, 6), textcoords="offset points")
    for name, dashes in ((MIXTURE, "--"), (STRENGTH, "-")):
        nodes = [(node["pass@1"], node["pass@k"]) for node in item["lines"][name]]
        axis.plot(*zip(*dict.fromkeys((*nodes, start)), strict=True), color="#bbbbbb", ls=dashes)
    others = sorted((name for name in points if name != START), key=lambda name: levels[name][1])
    for place, name in enumerate(others):
        style: dict[str, Any] = dict(styles[name]) | {"linestyle": "none"}
        to = points[name]["to_baseline"]
        ends = [error_bars([to[at]]) for at in ("1", k)] if to else [None, None]
        x, y = ([value] for value in levels[name])
        axis.errorbar(x, y, xerr=ends[0], yerr=ends[1], capsize=2, elinewidth=1, **style)
        axis.annotate(
            name.replace(" beta=", ", β ").replace(" rehearsal_coef=", ", rehearsal "),
            levels[name],
            xytext=(1.03, (place + 0.5) / len(others)),
            textcoords=("axes fraction", "axes fraction"),
            color=style["color"],
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.5, "alpha": 0.5},
        )
    for name, (first, many) in levels.items():
        row = {"task": report["task"], "point": name, "pass@1": first, f"pass@{k}": many}
        for at, to in (points[name]["to_baseline"] or {}).items():
            if at in ("1", k):
                row |= {f"pass@{at} − GRPO, {end}": value for end, value in to.items()}
        rows.append(row)
    task = report["title"].split(",")[0].replace("embedded ", "").replace(" drawn anew", "")
    axis.set_title(f"{task}, new problems")
    axis.set(xlabel="pass@1", ylabel=f"pass@{k}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return rows
