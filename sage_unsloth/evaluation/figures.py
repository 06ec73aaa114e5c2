"""Figures of an evaluation: pass@k curves and paired differences."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.evaluation.intervals import Difference, Estimate
from sage_unsloth.figures import line_styles, new_figure, save_figure


def plot_pass_at_k(
    panels: Mapping[str, Mapping[str, Mapping[int, Estimate]]], path: str | Path, note: str
) -> Path:
    """pass@k against k: a panel for each set of problems, a curve with its band for each model.

    Args:
        panels: panel title -> model -> k -> estimate with its 95 % interval.
        path: of the PNG; the CSV is beside it.
        note: the conditions, under the figure.
    """
    figure, axes = new_figure(len(panels))
    rows = []
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        styles = line_styles(curves)
        for model, curve in curves.items():
            draw_curve(axis, model, curve, styles[model] | {"markersize": 4})
            rows += [
                {"panel": title, "model": model, "k": k} | vars(curve[k]) for k in sorted(curve)
            ]
        axis.set(title=title, xlabel="k (samples)", ylabel="pass@k", ylim=(-0.02, 1.02))
        mark_ks(axis, curves)
    return save_figure(figure, axes, path, rows, note)


def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[int, Difference]]], path: str | Path, note: str
) -> Path:
    """Paired differences of pass@k against k: a panel for each benchmark, a curve for each pair.

    Args:
        panels: benchmark -> "a - b" -> k -> difference with its 95 % interval.
        path: of the PNG; the CSV is beside it.
        note: the conditions, under the figure.
    """
    figure, axes = new_figure(len(panels))
    rows = []
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color="#555555", linewidth=0.8)
        styles = line_styles(curves, first=1)  # the first is what the others are compared with
        for pair, curve in curves.items():
            draw_curve(axis, pair, curve, styles[pair] | {"markersize": 4})
            rows += [{"panel": title, "pair": pair, "k": k} | vars(curve[k]) for k in sorted(curve)]
        axis.set(title=title, xlabel="k (samples)", ylabel="difference of pass@k")
        mark_ks(axis, curves)
    return save_figure(figure, axes, path, rows, note)


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
