"""Figures, each drawn from a table that is saved beside it: a PNG for looking, a CSV for anything else.

Colours are Okabe and Ito's, told apart by colour-blind readers; line styles differ too.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_unsloth.metrics import Difference, Estimate
from sage_unsloth.untrusted import printable

COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9")
STYLES = (":", "--", "-", "-.", "-", "--", "-.")
MARKERS = ("x", "s", "o", "^", "D", "v", "P")


def write_table(path: str | Path, rows: Sequence[Mapping]) -> Path:
    """A CSV of the rows; columns in order of first appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path = Path(path)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


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
            axis.plot(ks, [curve[k].mean for k in ks], label=model, color=colour, linestyle=STYLES[number % len(STYLES)],
                      marker=MARKERS[number % len(MARKERS)], markersize=4)  # fmt: skip
            axis.fill_between(ks, [curve[k].low for k in ks], [curve[k].high for k in ks], color=colour, alpha=0.12,
                              linewidth=0)  # fmt: skip
            rows += [{"panel": title, "model": model, "k": k} | vars(curve[k]) for k in ks]
        axis.set(title=title, xlabel="k (samples)", ylabel="pass@k", ylim=(-0.02, 1.02))
        axis.set_xscale("log", base=2)
        ticks = sorted({k for curve in curves.values() for k in curve})
        axis.set_xticks(ticks, [str(k) for k in ticks])
    return save_figure(figure, axes, path, rows, note)


def plot_differences(
    panels: Mapping[str, Mapping[str, Mapping[int, Difference]]], path: str | Path, note: str
) -> Path:
    """Paired differences of pass@k against k, one panel for each benchmark, one curve with a band for each pair.

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
            axis.plot(ks, [curve[k].mean for k in ks], label=pair, color=colour, linestyle=STYLES[number % len(STYLES)],
                      marker=MARKERS[number % len(MARKERS)], markersize=4)  # fmt: skip
            axis.fill_between(ks, [curve[k].low for k in ks], [curve[k].high for k in ks], color=colour, alpha=0.12,
                              linewidth=0)  # fmt: skip
            rows += [{"panel": title, "pair": pair, "k": k} | vars(curve[k]) for k in ks]
        axis.set(title=title, xlabel="k (samples)", ylabel="difference of pass@k")
        axis.set_xscale("log", base=2)
        ticks = sorted({k for curve in curves.values() for k in curve})
        axis.set_xticks(ticks, [str(k) for k in ticks])
    return save_figure(figure, axes, path, rows, note)


def plot_training(
    runs: Mapping[str, Sequence[Mapping]], path: str | Path, note: str, window: int = 9
) -> Path:
    """The course of training runs: reward, plain KL, entropy, and the guide, each against the optimizer step.

    Args:
        runs: name -> rows of its `metrics.jsonl`.
        path: of the PNG; the CSV stands beside it.
        note: the conditions, under the figure.
        window: optimizer steps of the centred moving average drawn over the raw values.
    """
    panels = {
        "reward": "mean reward",
        "kl/ref_k3": "KL to the reference (k3, nats)",
        "sage/entropy": "mean token entropy (nats)",
        "sage/guide_mean": "mean of the guide q",
    }
    figure, axes = new_figure(len(panels))
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for number, (name, rows) in enumerate(runs.items()):
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            # The same colour and style as in the pass@k figure, whose first curve is SFT.
            style = {
                "color": COLOURS[(number + 1) % len(COLOURS)],
                "linestyle": STYLES[(number + 1) % len(STYLES)],
            }
            axis.plot(steps, values, color=style["color"], alpha=0.2, linewidth=0.8)
            axis.plot(steps, moving_average(values, window), label=name, **style)
        axis.set(title=title, xlabel="optimizer step")
    table = [{"run": name} | dict(row) for name, rows in runs.items() for row in rows]
    return save_figure(figure, axes, path, table, note)


def plot_costs(rows: Sequence[Mapping], path: str | Path, note: str) -> Path:
    """Seconds, with quartiles of the ratio to the first row's loss, and peak memory; a group of bars for each size.

    Args:
        rows: `length`, `hidden`, `vocabulary`, `batch`, `variant`, `seconds`, `peak_mib`, and the ratio's `median`, `low`, `high`.
        path: of the PNG; the CSV stands beside it.
        note: the conditions, under the figure.
    """
    figure, axes = new_figure(2)
    sizes = list(dict.fromkeys(_size_name(row) for row in rows))
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    width = 0.8 / len(variants)
    for number, variant in enumerate(variants):
        chosen = [row for row in rows if row["variant"] == variant]
        places = [sizes.index(_size_name(row)) + number * width - 0.4 for row in chosen]
        style = dict(width=width * 0.9, color=COLOURS[number % len(COLOURS)], label=variant, align="edge")  # fmt: skip
        medians = [row["median"] for row in chosen]
        spread = [[row["median"] - row["low"] for row in chosen], [row["high"] - row["median"] for row in chosen]]  # fmt: skip
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


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Centred, over at most `window` values; shorter at the ends."""
    half = window // 2
    spans = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def new_figure(panels: int):
    """A figure of `panels` axes, two in a row, and the axes that are used."""
    from matplotlib.figure import Figure

    rows = -(-panels // 2)
    figure = Figure(figsize=(10, 3.6 * rows), layout="constrained")
    grid = figure.subplots(rows, min(panels, 2), squeeze=False).flatten()
    for axis in grid:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid[panels:]:
        axis.set_axis_off()
    return figure, grid[:panels]


def save_figure(
    figure, axes, path: str | Path, rows: Sequence[Mapping], note: str, dpi: int = 130
) -> Path:
    """The PNG, with the legend of its first axes above and the note below, and `rows` as a CSV beside it."""
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.supxlabel(note, fontsize=8, color="#555555")
    path = Path(path)
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=dpi)
    return path


def show_table(rows: Sequence[Mapping]) -> None:
    """Print rows of one shape as a plain table."""
    header = list(rows[0])
    table = [header, *([printable(str(row[key])) for key in header] for row in rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
