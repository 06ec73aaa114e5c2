"""The figure of the fork dialects: what a guide that acts does to pass@1 and pass@32."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.figures import error_bars, line_styles, write_table

PANELS = {
    "fork": "free letters in the rare correct method",
    "fork-twin": "free letters in a wrong method",
}
LABELS = {"grpo-exact": "GRPO (exact credit)", "sage-branch-exact": "with Branch"}


def draw_forks(report: Mapping[str, Any], path: Path) -> None:
    """A panel for each dialect: the SFT model, GRPO's line through its β, and Branch at each β.

    Bars are the 95 % intervals of the difference between Branch and GRPO at the same β.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.4), layout="constrained")
    axes = figure.subplots(1, len(PANELS), squeeze=False, sharey=True)[0]
    styles, rows = line_styles(LABELS), []
    for axis, (dialect, title) in zip(axes, PANELS.items(), strict=True):
        item = report[dialect]
        pairs = {(pair["algorithm"], pair["beta"]): pair for pair in item["pairs"]}
        start = item["sft"]["pass@1"], item["sft"]["pass@32"]
        axis.plot(*start, "k*", markersize=13)
        axis.annotate("SFT", start, xytext=(8, -12), textcoords="offset points")
        for algorithm, label in LABELS.items():
            points = [point for point in item["points"] if point["algorithm"] == algorithm]
            points.sort(key=lambda point: point["beta"])
            style = styles[algorithm]
            x, y = ([point[f"pass@{k}"] for point in points] for k in (1, 32))
            axis.plot(x, y, label=label, **style)
            for point in points:
                place = point["pass@1"], point["pass@32"]
                pair = pairs.get((algorithm, point["beta"]))
                row = {"dialect": dialect, "algorithm": algorithm, "beta": point["beta"]}
                row |= {"pass@1": place[0], "pass@32": place[1], "seeds": len(point["seeds"])}
                if pair:
                    ends = [error_bars([pair[f"pass@{k}"]]) for k in (1, 32)]
                    axis.errorbar(
                        *([value] for value in place),
                        xerr=ends[0],
                        yerr=ends[1],
                        color=style["color"],
                        linewidth=1,
                        capsize=2,
                    )
                    for k in (1, 32):
                        row |= {
                            f"pass@{k} − GRPO, {end}": v for end, v in pair[f"pass@{k}"].items()
                        }
                axis.annotate(
                    f"β {point['beta']:g}",
                    place,
                    xytext=(5, 5),
                    textcoords="offset points",
                    color=style["color"],
                    fontsize=9,
                )
                rows.append(row)
        axis.set_title(title)
        axis.set_xlabel("pass@1")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("pass@32")
    axes[0].legend(frameon=False, loc="lower left")
    shown = [
        point for name in PANELS for point in report[name]["points"] if point["algorithm"] in LABELS
    ]
    seeds = sorted({len(point["seeds"]) for point in shown})
    figure.supxlabel(
        f"models of 0.7 M parameters, 50 steps, {' or '.join(map(str, seeds))} training seeds; "
        "bars: 95 % of the difference to GRPO at the same β",
        fontsize=8,
        color="#555555",
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)
