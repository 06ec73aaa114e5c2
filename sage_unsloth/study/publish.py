"""Writes `records.json`, `report.json`, `report.md` and the figures of a study."""

import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import error_bars, line_styles, write_table
from sage_unsloth.runs.files import write_json, write_text
from sage_unsloth.study.free_lines import TITLES
from sage_unsloth.study.plan import Plan
from sage_unsloth.study.points import START
from sage_unsloth.study.records import collect, write_records
from sage_unsloth.study.report import make_report
from sage_unsloth.study.text import conditions, report_markdown, summary

GREY = "#888888"


def publish(plan: Plan, show: Callable[[str], object]) -> dict[str, Any]:
    """Collects, reports and plots; returns the report.

    Raises:
        ValueError: the start model or every seed is incomplete.
    """
    data = collect(plan)
    report = make_report(data)
    write_records(plan.out / "records.json", data)
    write_json(plan.out / "report.json", report)
    write_text(plan.out / "report.md", report_markdown(report))
    draw(report, plan.out)
    show(f"\n{summary(report)}\n")
    show(f"Written to {plan.out}: report.md, records.json, report.json, frontier.png, runs/")
    return report


def draw(report: Mapping[str, Any], out: Path) -> None:
    """Plots the frontier of the first benchmark, and pass@k against k of all."""
    note = "\n".join(textwrap.wrap(conditions(report), 130))
    draw_frontier(report, out / "frontier.png", note)
    panels = {
        name: {
            point: {int(k): Estimate(**level) for k, level in row["level"].items()}
            for point, row in item["points"].items()
        }
        for name, item in report["sets"].items()
    }
    plot_pass_at_k(panels, out / "pass_at_k.png", note)


def draw_frontier(report: Mapping[str, Any], path: Path, note: str) -> None:
    """Plots pass@k against pass@1: every point with the interval of its difference to the
    baseline, and the lines that cost no training.
    """
    from matplotlib.figure import Figure

    item = next(iter(report["sets"].values()))
    k, rows = str(item["k"]), []
    figure = Figure(figsize=(9.5, 6.6), layout="constrained")
    axis = figure.subplots()
    for number, (name, nodes) in enumerate(item["lines"].items()):
        x, y = ([node[end] for node in nodes] for end in ("pass@1", "pass@k"))
        dashes = (":", "--", "-.", (0, (1, 3)), "-")[number % 5]
        axis.plot(x, y, color=GREY, linestyle=dashes, marker=".", linewidth=1, label=TITLES[name])
        rows += [{"line": name, "point": node["label"], "pass@1": node["pass@1"],
                  f"pass@{k}": node["pass@k"]} for node in nodes]  # fmt: skip
    styles = line_styles(item["points"])
    for point, row in item["points"].items():
        x, y = row["level"]["1"]["mean"], row["level"][k]["mean"]
        rows.append({"line": "", "point": point, "pass@1": x, f"pass@{k}": y})
        if point == START:
            axis.plot([x], [y], "k*", markersize=13, label=START)
            continue
        bars: dict[str, Any] = {}
        if row["to_baseline"]:
            for end, at in (("xerr", "1"), ("yerr", k)):
                bars[end] = error_bars([row["to_baseline"][at]])
        style: dict[str, Any] = styles[point] | {"linestyle": "none"}
        axis.errorbar([x], [y], **bars, capsize=2, elinewidth=1, label=point, **style)
    axis.set(xlabel="pass@1", ylabel=f"pass@{k}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    figure.supxlabel(
        f"{note}\ngrey: what costs no new method; bars: 95 % of the difference to "
        f"{report['baseline']}",
        fontsize=8,
        color="#555555",
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)
