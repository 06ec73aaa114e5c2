"""Figures of a benchmark's report, each with its table beside it. An algorithm has one colour,
style and marker in all of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from research.benchmark.design import BASELINE, SFT
from research.benchmark.records import Records
from research.benchmark.text import conditions
from sage_unsloth.analysis.figures import model_style
from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import (
    COLOURS,
    error_bars,
    leaves_out_0,
    new_figure,
    save_figure,
    write_table,
)
from sage_unsloth.study.verdicts import MATTERS
from sage_unsloth.training.figures import moving_average

SHOWN = (SFT, "grpo", "grpo-no-kl", "grpo-exact", "sage-branch", "sage-branch-exact", "sage-token")
"""In the figures with curves, as many as there are colours; the tables have all."""


def draw(report: Mapping[str, Any], records: Records, out: Path) -> None:
    """All figures of a report."""
    note = _wrap(conditions(report))
    shown = [name for name in SHOWN if name in records.algorithms]
    _pass_at_k(report, shown, out / "pass_at_k.png", note)
    if len(report["algorithms"]) > 2:
        _differences(report, out / "differences.png", note)
        _reward_and_test(records, shown, out / "reward_and_test.png", note)
    _training(records, shown, out / "training.png", note)
    if report["grid"] is not None:
        _grid(report, out / "grid.png", note)


def _wrap(text: str, width: int = 150) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _pass_at_k(report: Mapping[str, Any], shown: Sequence[str], path: Path, note: str) -> None:
    """pass@k against k: all held-out problems, each family, and each set out of distribution."""
    panels = {}
    for name, groups in report["pass_at_k"].items():
        for group, table in groups.items():
            title = "held-out problems" if name == "test" else name
            if group != "all":
                if name != "test":
                    continue
                title = f"family: {group}"
            panels[title] = {
                algorithm: {int(k): Estimate(**result) for k, result in table[algorithm].items()}
                for algorithm in shown
            }
    plot_pass_at_k(panels, path, note)


def _differences(report: Mapping[str, Any], path: Path, note: str) -> None:
    """Every algorithm minus grpo with its interval, one panel for each k; the band is what counts
    as no difference.
    """
    from matplotlib.figure import Figure

    table = report["differences"]["test"]["all"]
    pairs = [pair for pair in table if pair.endswith(f" - {BASELINE}")]
    ks = list(table[pairs[0]])
    figure = Figure(figsize=(3.0 * len(ks) + 1.5, 1.6 + 0.3 * len(pairs)), layout="constrained")
    axes = figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]
    rows = []
    for axis, k in zip(axes, ks, strict=True):
        axis.axvspan(-MATTERS, MATTERS, color="#888888", alpha=0.15, linewidth=0)
        axis.axvline(0, color="#555555", linewidth=0.8)
        for place, pair in enumerate(pairs):
            result = table[pair][k]
            beyond = leaves_out_0(result)
            axis.errorbar(
                [result["mean"]],
                [place],
                xerr=error_bars([result]),
                capsize=3,
                marker="o",
                markersize=5,
                color=COLOURS[2] if beyond else COLOURS[0],
                markerfacecolor=None if beyond else "white",
            )
            rows.append({"pair": pair, "k": k} | result)
        axis.set(title=f"pass@{k}", xlabel=f"difference to {BASELINE}")
        axis.set_yticks(range(len(pairs)), [pair.removesuffix(f" - {BASELINE}") for pair in pairs])
        axis.grid(axis="x", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylim(len(pairs) - 0.5, -0.5)
    figure.supxlabel(
        note
        + f"\nblue: the interval leaves out 0; grey band: ±{MATTERS:g}, no difference that matters",
        fontsize=8,
        color="#555555",
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)


def _training(records: Records, shown: Sequence[str], path: Path, note: str) -> None:
    """Reward, entropy, plain KL and gradient norm, mean over seeds with the standard error of that
    mean.
    """
    panels = {
        "reward": "reward",
        "entropy": "token entropy (nats)",
        "kl": "KL to the reference (k3, nats)",
        "grad_norm": "gradient norm",
    }
    figure, axes = new_figure(len(panels))
    rows = []
    for axis, (column, title) in zip(axes, panels.items(), strict=True):
        for name in shown:
            values = records.series(name, column)
            if values is None:
                continue
            steps = np.arange(1, values.shape[1] + 1)
            mean = np.array(moving_average(list(values.mean(axis=0)), 5))
            spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
            half = np.array(moving_average(list(spread / len(values) ** 0.5), 5))
            style = model_style(name, shown)
            axis.plot(
                steps,
                mean,
                label=name,
                color=style["color"],
                linestyle=style["linestyle"],
                zorder=style["zorder"],
            )
            axis.fill_between(
                steps, mean - half, mean + half, color=style["color"], alpha=0.12, linewidth=0
            )
            rows += [
                {
                    "series": column,
                    "algorithm": name,
                    "step": int(step),
                    "mean": float(m),
                    "standard_error": float(h),
                }
                for step, m, h in zip(steps, mean, half, strict=True)
            ]
        axis.set(title=title, xlabel="optimizer step")
    save_figure(
        figure,
        axes,
        path,
        rows,
        note + "\nmean over seeds ± its standard error, moving average over 5 steps",
    )


def _reward_and_test(records: Records, shown: Sequence[str], path: Path, note: str) -> None:
    """Training reward of the last third beside held-out pass@1 and pass@n, a point for each
    algorithm (Fig. 2).
    """
    figure, axes = new_figure(2)
    ks = records.ks("test")
    order = [*shown, *(name for name in records.algorithms if name not in shown)]
    rows = []
    for number, name in enumerate(order):
        reward = records.third(name, "reward", 2)
        if reward is None:
            continue
        style = model_style(name, order) | {"linestyle": "none"}
        if number >= len(COLOURS):  # a colour's second turn
            style["markerfacecolor"] = "white"
        for axis, k in zip(axes, (ks[0], ks[-1]), strict=True):
            test = records.pass_at_k(records.of(name), "test", k).mean(axis=1)
            (x, dx), (y, dy) = _mean_and_error(reward[:, 0]), _mean_and_error(test)
            axis.errorbar(
                [x], [y], xerr=[dx], yerr=[dy], capsize=2, linewidth=0.8, label=name, **style
            )
            axis.set(xlabel="training reward, last third", ylabel=f"held-out pass@{k}")
            rows.append(
                {
                    "algorithm": name,
                    "k": k,
                    "reward": x,
                    "reward_error": dx,
                    "pass_at_k": y,
                    "error": dy,
                }
            )
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.supxlabel(
        note
        + "\nbars: standard error over seeds, on these problems; differences with intervals are "
        "in the other figure",
        fontsize=8,
        color="#555555",
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)


def _mean_and_error(values_S: np.ndarray) -> tuple[float, float]:
    error = values_S.std(ddof=1) / len(values_S) ** 0.5 if len(values_S) > 1 else 0.0
    return float(values_S.mean()), float(error)


def _grid(report: Mapping[str, Any], path: Path, note: str) -> None:
    grid = report["grid"]
    titles = [f"pass@{k}" for k in grid["ks"]]
    panels = {
        title: {(row["threshold"], row["ratio"]): Estimate(**row[title]) for row in grid["cells"]}
        for title in titles
    }
    floors = {title: f"{len(grid['seeds'])} seeds a cell" for title in titles}
    plot_heat_maps(
        panels, floors, dict.fromkeys(titles, 0.0), path, note + "\nbold: the interval leaves out 0"
    )


def plot_heat_maps(
    panels: Mapping[str, Mapping[tuple[float, float], Estimate]],
    floors: Mapping[str, str],
    noise: Mapping[str, float | None],
    path: str | Path,
    note: str,
) -> Path:
    """Heat maps over threshold and ratio; each cell shows its value and its interval.

    Args:
        panels: title -> (threshold, ratio) -> difference to plain GRPO with its 95 % interval.
        floors: title -> what plain GRPO itself reaches and how much it varies, under the title.
        noise: title -> the difference above which a cell is bold; None makes none bold.
        path: of the PNG; the CSV is beside it.
        note: the conditions, under the figure.
    """
    from matplotlib.figure import Figure

    thresholds = sorted({threshold for cells in panels.values() for threshold, _ in cells})
    ratios = sorted({ratio for cells in panels.values() for _, ratio in cells})
    size = (1.5 + 1.75 * len(ratios), 1.9 + 0.95 * len(thresholds))
    figure = Figure(figsize=(max(4.6, size[0]) * len(panels), size[1]), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    rows = []
    for axis, (title, cells) in zip(axes, panels.items(), strict=True):
        values = np.array(
            [[cells[t, r].mean if (t, r) in cells else np.nan for r in ratios] for t in thresholds]
        )
        limit = max(0.01, np.nanmax(np.abs(values)))
        image = axis.imshow(
            values, cmap="PuOr", vmin=-limit, vmax=limit, aspect="auto", origin="lower"
        )
        for (threshold, ratio), cell in cells.items():
            place = (ratios.index(ratio), thresholds.index(threshold))
            dark = abs(cell.mean) > 0.65 * limit
            _write_cell(axis, place, cell, noise[title], "white" if dark else "black")
            rows.append({"panel": title, "threshold": threshold, "ratio": ratio} | vars(cell))
        axis.set_xticks(range(len(ratios)), [f"{ratio:g}" for ratio in ratios])
        axis.set_yticks(range(len(thresholds)), [f"{threshold:g}" for threshold in thresholds])
        axis.set(xlabel="ratio (per nat)", ylabel="threshold (nats)")
        axis.set_title(f"{title}\n{floors[title]}", fontsize=10)
        figure.colorbar(image, ax=axis, label="difference to plain GRPO")
    path = Path(path)
    write_table(path.with_suffix(".csv"), rows)
    figure.supxlabel(note, fontsize=8, color="#555555")
    figure.savefig(path, dpi=130)
    return path


def _write_cell(
    axis: Any, place: tuple[int, int], cell: Estimate, noise: float | None, colour: str
) -> None:
    """A value with its interval; bold where it exceeds the noise and its interval is beyond 0."""
    beyond = noise is not None and abs(cell.mean) > noise and leaves_out_0(vars(cell))
    axis.text(
        *place,
        f"{cell.mean:+.3f}\n[{cell.low:+.3f}, {cell.high:+.3f}]",
        ha="center",
        va="center",
        fontsize=9,
        color=colour,
        weight="bold" if beyond else "normal",
    )
