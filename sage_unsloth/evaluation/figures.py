"""Figures of an evaluation: pass@k curves and paired differences."""

from collections.abc import Mapping
from pathlib import Path

from sage_unsloth.evaluation.metrics import Difference, Estimate
from sage_unsloth.figures import COLOURS, MARKERS, STYLES, new_figure, save_figure


def plot_pass_at_k(
    panels: Mapping[str, Mapping[str, Mapping[int, Estimate]]], path: str | Path, note: str
) -> Path:
    """pass@k against k, one panel for each set of problems, one curve with a band for each model.

    Args:
        panels: panel title -> model -> k -> estimate with its 95 % interval.
        path: of the PNG; the CSV stands beside it.
        note: the conditions, under the figure.
    """
    figure, axes = new_figure(len(panels))
    rows = []
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        for number, (model, curve) in enumerate(curves.items()):
            ks = sorted(curve)
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(
                ks,
                [curve[k].mean for k in ks],
                label=model,
                color=colour,
                linestyle=STYLES[number % len(STYLES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
            )
            axis.fill_between(
                ks,
                [curve[k].low for k in ks],
                [curve[k].high for k in ks],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
            rows += [{"panel": title, "model": model, "k": k} | vars(curve[k]) for k in ks]
        axis.set(title=title, xlabel="k (samples)", ylabel="pass@k", ylim=(-0.02, 1.02))
        axis.set_xscale("log", base=2)
        ticks = sorted({k for curve in curves.values() for k in curve})
        axis.set_xticks(ticks, [str(k) for k in ticks])
    return save_figure(figure, axes, path, rows, note)


def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[int, Difference]]], path: str | Path, note: str
) -> Path:
    """Paired differences of pass@k against k, one panel for each benchmark, one curve with a band
    for each pair.

    Args:
        panels: benchmark -> "a - b" -> k -> difference with its 95 % interval.
        path: of the PNG; the CSV stands beside it.
        note: the conditions, under the figure.
    """
    figure, axes = new_figure(len(panels))
    rows = []
    for axis, (title, curves) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color="#555555", linewidth=0.8)
        for number, (pair, curve) in enumerate(curves.items(), 1):
            ks = sorted(curve)
            colour = COLOURS[number % len(COLOURS)]
            axis.plot(
                ks,
                [curve[k].mean for k in ks],
                label=pair,
                color=colour,
                linestyle=STYLES[number % len(STYLES)],
                marker=MARKERS[number % len(MARKERS)],
                markersize=4,
            )
            axis.fill_between(
                ks,
                [curve[k].low for k in ks],
                [curve[k].high for k in ks],
                color=colour,
                alpha=0.12,
                linewidth=0,
            )
            rows += [{"panel": title, "pair": pair, "k": k} | vars(curve[k]) for k in ks]
        axis.set(title=title, xlabel="k (samples)", ylabel="difference of pass@k")
        axis.set_xscale("log", base=2)
        ticks = sorted({k for curve in curves.values() for k in curve})
        axis.set_xticks(ticks, [str(k) for k in ticks])
    return save_figure(figure, axes, path, rows, note)
