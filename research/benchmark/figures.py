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
from sage_unsloth.analysis.figures import plot_heat_maps
from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import (
    BLACK,
    BLUE,
    error_bars,
    leaves_out_0,
    line_styles,
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
                color=BLUE if beyond else BLACK,
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
    styles, rows = line_styles(shown), []
    for axis, (column, title) in zip(axes, panels.items(), strict=True):
        for name in shown:
            values = records.series(name, column)
            if values is None:
                continue
            steps = np.arange(1, values.shape[1] + 1)
            mean = np.array(moving_average(list(values.mean(axis=0)), 5))
            spread = values.std(axis=0, ddof=1) if len(values) > 1 else np.zeros(len(steps))
            half = np.array(moving_average(list(spread / len(values) ** 0.5), 5))
            style = styles[name]
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
    styles, rows = line_styles(order), []
    for name in order:
        reward = records.third(name, "reward", 2)
        if reward is None:
            continue
        style = styles[name] | {"linestyle": "none"}
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
