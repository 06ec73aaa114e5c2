"""Figures of an evaluation: pass@k curves and paired differences."""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.intervals import Difference, Estimate
from sage_unsloth.figures import line_styles, new_figure, save_figure

ESTIMATE_KEYS = ("mean", "low", "high")


def plot_pass_at_k(
    panels: Mapping[str, Mapping[str, Mapping[int, Estimate]]], path: str | Path, note: str
) -> Path:
    """pass@k against k: a panel for each set of problems, a curve with its band for each model.

    Args:
        panels: panel title -> model -> k -> estimate with its 95 % interval.
        path: of the PNG; the CSV is written next to it.
    """
    figure, axes = new_figure(len(panels))
    rows = []
    models = dict.fromkeys(model for curves in panels.values() for model in curves)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        draw_pass_at_k(axis, curves, models)
        axis.set_title(title)
        rows += [
            {"panel": title, "model": model, "k": k} | vars(curve[k])
            for model, curve in curves.items()
            for k in sorted(curve)
        ]
    return save_figure(figure, axes, path, rows, note)


def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[int, Difference]]], path: str | Path, note: str
) -> Path:
    """Paired differences of pass@k against k: a panel per benchmark, a curve per pair.

    Args:
        panels: benchmark -> "a - b" -> k -> difference with its 95 % interval.
        path: of the PNG; the CSV is written next to it.
    """
    figure, axes = new_figure(len(panels))
    rows = []
    pairs = dict.fromkeys(pair for curves in panels.values() for pair in curves)
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        draw_differences(axis, curves, pairs)
        axis.set_title(title)
        rows += [
            {"panel": title, "pair": pair, "k": k} | vars(curve[k])
            for pair, curve in curves.items()
            for k in sorted(curve)
        ]
    return save_figure(figure, axes, path, rows, note)


def draw_pass_at_k(
    axis: Any, curves: Mapping[str, Mapping[int, Estimate]], models: Iterable[str] | None = None
) -> None:
    """Curves into a panel; `models` are those of all panels, which share their looks."""
    styles = line_styles(models or curves)
    for model, curve in curves.items():
        draw_curve(axis, model, curve, styles[model] | {"markersize": 4})
    axis.set(xlabel="k (samples)", ylabel="pass@k", ylim=(-0.02, 1.02))
    mark_ks(axis, curves)


def draw_differences(
    axis: Any, curves: Mapping[str, Mapping[int, Estimate]], pairs: Iterable[str] | None = None
) -> None:
    """Curves into a panel; `pairs` are those of all panels, which share their looks."""
    axis.axhline(0, color="#555555", linewidth=0.8)
    styles = line_styles(pairs or curves, first=1)  # the first is what the others are compared with
    for pair, curve in curves.items():
        draw_curve(axis, pair, curve, styles[pair] | {"markersize": 4})
    axis.set(xlabel="k (samples)", ylabel="difference of pass@k")
    mark_ks(axis, curves)


def svg(
    draw: Callable[[Any, Mapping[str, Mapping[int, Estimate]]], None],
    curves: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> str:
    """The drawing as an `svg` element without ids, from curves in the form of `report.json`."""
    import matplotlib

    figure, (axis,) = new_figure(1)
    figure.set_size_inches(5, 3.4)
    draw(axis, {name: _estimates(curve) for name, curve in curves.items()})
    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sage_unsloth"}):
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=empty)
    return re.sub(r"<style.*?</style>", "", text.getvalue()[text.getvalue().index("<svg") :])


def _estimates(curve: Mapping[str, Mapping[str, Any]]) -> dict[int, Estimate]:
    """A curve of `report.json`, which has text keys and null for missing bounds."""
    return {
        int(k): Estimate(*(math.nan if item[p] is None else item[p] for p in ESTIMATE_KEYS))
        for k, item in curve.items()
    }


def draw_curve(
    axis: Any, label: str, curve: Mapping[int, Estimate], style: Mapping[str, Any]
) -> None:
    """Means against k, with the 95 % interval as a band."""
    ks = sorted(curve)
    axis.plot(ks, [curve[k].mean for k in ks], label=label, **style)
    low, high = [curve[k].low for k in ks], [curve[k].high for k in ks]
    axis.fill_between(ks, low, high, color=style["color"], alpha=0.12, linewidth=0)


def mark_ks(axis: Any, curves: Mapping[str, Mapping[int, Estimate]]) -> None:
    """A logarithmic axis of k with a tick at each k that a curve has."""
    axis.set_xscale("log", base=2)
    ticks = sorted({k for curve in curves.values() for k in curve})
    axis.set_xticks(ticks, [str(k) for k in ticks])
