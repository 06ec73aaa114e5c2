"""The figure of what a guide costs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_unsloth.figures import line_styles, new_figure, save_figure


def plot_costs(rows: Sequence[Mapping], path: str | Path, note: str) -> Path:
    """Times the first variant's time with quartiles, and peak memory; bars for each size.

    Args:
        rows: `length`, `hidden`, `vocabulary`, `batch`, `variant`, `seconds`, `peak_mib`, and the
            ratio's `median`, `low`, `high`.
        path: of the PNG; the CSV is written beside it.
        note: the conditions, under the figure.
    """
    figure, axes = new_figure(2)
    sizes = list(dict.fromkeys(_size_name(row) for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    width, styles = 0.8 / len(variants), line_styles(variants)
    for number, variant in enumerate(variants):
        chosen = [row for row in rows if row["variant"] == variant]
        places = [sizes.index(_size_name(row)) + number * width - 0.4 for row in chosen]
        style = dict(width=width * 0.9, color=styles[variant]["color"], label=variant, align="edge")
        medians = [row["median"] for row in chosen]
        spread = [
            [row["median"] - row["low"] for row in chosen],
            [row["high"] - row["median"] for row in chosen],
        ]
        axes[0].bar(places, medians, yerr=spread, ecolor="#555555", capsize=2, **style)
        bars = axes[1].bar(places, [row["peak_mib"] or 0 for row in chosen], **style)
        axes[1].bar_label(bars, fmt="{:,.0f}", fontsize=7)
    axes[0].axhline(1, color="#555555", linewidth=0.8)
    axes[0].set(title="time of loss and backward pass", ylabel=f"times that of {variants[0]}")
    axes[1].set(title="peak memory beside model and batch", ylabel="MiB")
    for axis in axes:
        axis.set_xticks(range(len(sizes)), sizes, fontsize=7)
    return save_figure(figure, axes, path, rows, note)


def _size_name(row: Mapping) -> str:
    return f"T {row['length']:,}, H {row['hidden']:,}\nV {row['vocabulary']:,}, B {row['batch']}"
