"""The figures of a frontier, each with its table beside it."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.benchmark.records import SFT
from research.frontier.records import BASELINE
from research.frontier.text import NAMES, conditions
from sage_unsloth.figures import BLACK, BLUE, error_bars, leaves_out_0, line_styles, write_table
from sage_unsloth.study.verdicts import MATTERS

GREY = "#888888"
OF_LEVELS = {name: name for name in ("pass@1", "pass@k", "area")}


def draw(report: Mapping[str, Any], out: Path) -> None:
    """All figures of a report."""
    note = "\n".join(textwrap.wrap(conditions(report), 130))
    _plane(report, out / "frontier.png", note)
    _differences(report, out / "differences.png", note)


def _plane(report: Mapping[str, Any], path: Path, note: str) -> None:
    """pass@1 against pass@k: a line for each method through its strengths, and the SFT model."""
    from matplotlib.figure import Figure

    points, k, rows = report["points"], report["k"], []
    figure = Figure(figsize=(9.5, 6.6), layout="constrained")
    axis = figure.subplots()
    styles = _styles(report)
    for method, result in report["methods"].items():
        style = styles[method]
        x = [points[point]["pass@1"]["mean"] for point in result["points"]]
        y = [points[point]["pass@k"]["mean"] for point in result["points"]]
        across, up = (
            error_bars([points[item][name] for item in result["points"]]) for name in NAMES
        )
        axis.errorbar(
            x, y, xerr=across, yerr=up, fmt="none", ecolor=style["color"], elinewidth=0.7, alpha=0.2
        )
        axis.plot(x, y, label=method, markersize=6, linewidth=1.6, **style)
        for point, *at in zip(result["points"], x, y, strict=True):
            place = points[point]
            rows.append({"method": method, "point": point} | columns(place, OF_LEVELS))
            if place["strength"] is not None:
                axis.annotate(
                    f"{place['strength']:g}",
                    (at[0], at[1]),
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=8,
                    color=style["color"],
                )
    sft, baseline = points[SFT], points[BASELINE]
    rows.append({"method": SFT, "point": SFT} | columns(sft, OF_LEVELS))
    axis.plot([sft["pass@1"]["mean"]], [sft["pass@k"]["mean"]], label="SFT", **sft_style())
    axis.axhline(sft["pass@k"]["mean"], color=GREY, linewidth=0.8, linestyle=":")
    axis.axvline(baseline["pass@1"]["mean"], color=GREY, linewidth=0.8, linestyle=":")
    axis.axvspan(
        baseline["pass@1"]["mean"] - MATTERS, baseline["pass@1"]["mean"], color=GREY, alpha=0.12
    )
    axis.set(xlabel="held-out pass@1", ylabel=f"held-out pass@{k}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(
        note + f"\nnumbers: the strength (β, unless the method names another); dotted: the SFT "
        f"model's pass@{k}, and GRPO's pass@1 with {MATTERS:g} below it\nfaint bars: 95 % over "
        "seeds and problems; most of it is shared by all points, see the differences",
        fontsize=8,
        color="#555555",
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)


def _styles(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A colour for each algorithm; its lines through other strengths than its own are dotted and
    have open markers.
    """
    of = {
        method: report["points"][result["points"][0]]["algorithm"]
        for method, result in report["methods"].items()
    }
    styles = line_styles(dict.fromkeys(of.values()))
    return {
        method: styles[algorithm]
        | ({"linestyle": ":", "markerfacecolor": "white"} if method != algorithm else {})
        for method, algorithm in of.items()
    }


def sft_style() -> dict[str, Any]:
    return {"color": BLACK, "marker": "*", "markersize": 13, "linestyle": "none"}


def columns(result: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Mean and interval of each quantity, by its name in a table.

    Args:
        result: quantity -> `mean`, `low` and `high`.
        names: quantity -> its name.
    """
    return {
        f"{name}{end}": result[quantity][key]
        for quantity, name in names.items()
        for key, end in (("mean", ""), ("low", " low"), ("high", " high"))
    }


def _differences(report: Mapping[str, Any], path: Path, note: str) -> None:
    """Each point's pass@1 minus GRPO's, and its pass@k minus SFT's and GRPO's; the band is what
    counts as no difference.
    """
    from matplotlib.figure import Figure

    k = report["k"]
    names = [point for point in report["points"] if point != SFT]
    panels = {
        "pass@1 − GRPO": ("to_baseline", "pass@1"),
        f"pass@{k} − SFT": ("to_sft", "pass@k"),
        f"pass@{k} − GRPO": ("to_baseline", "pass@k"),
    }
    figure = Figure(figsize=(11, 1.8 + 0.27 * len(names)), layout="constrained")
    axes, rows = figure.subplots(1, 3, sharey=True), []
    for axis, (title, (to, quantity)) in zip(axes, panels.items(), strict=True):
        axis.axvspan(-MATTERS, MATTERS, color=GREY, alpha=0.15, linewidth=0)
        axis.axvline(0, color="#555555", linewidth=0.8)
        for place, point in enumerate(names):
            result = report["points"][point][to][quantity]
            rows.append({"difference": title, "point": point} | dict(result))
            beyond = leaves_out_0(result)
            axis.errorbar(
                [result["mean"]],
                [place],
                xerr=error_bars([result]),
                capsize=3,
                marker="o",
                markersize=5,
                color=BLUE if beyond else BLACK,
                markerfacecolor=None if beyond else "white",
            )
        axis.set_title(title)
        axis.locator_params(axis="x", nbins=5)
        axis.set_yticks(range(len(names)), names)
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(len(names) - 0.5, -0.5)
    figure.supxlabel(
        note + f"\nGRPO: {BASELINE}; blue: the interval leaves out 0; grey band: ±{MATTERS:g}",
        fontsize=8,
        color="#555555",
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)
