"""Figures of an analysis, each with its table as a CSV.

Patterns, dynamics, perplexity, one completion, and heat maps over threshold and ratio. A model has
the same colour, line style and marker in every figure if the models have the same order.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sage_unsloth.analysis.patterns import DYNAMICS, PatternFrequency
from sage_unsloth.analysis.token_page import TokenTrace
from sage_unsloth.evaluation.figures import draw_curve, mark_ks
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import (
    BLUE,
    ORANGE,
    error_bars,
    line_styles,
    new_figure,
    save_figure,
    write_table,
)
from sage_unsloth.training.figures import moving_average

TOKENS_DRAWN = 64  # of a completion; more labels would run into each other


def plot_patterns(frequencies: Sequence[PatternFrequency], path: str | Path, note: str) -> Path:
    """Eq. 13 of each model with its interval, and the counts behind it."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in frequencies))
    patterns = list(dict.fromkeys(row.pattern for row in frequencies))
    height = 1.1 + 0.34 * len(frequencies) + 0.25 * len(patterns)
    figure = Figure(figsize=(10, height), layout="constrained")
    axis = figure.subplots()
    styles, rows = line_styles(models), []
    for row in frequencies:
        place = patterns.index(row.pattern) * (len(models) + 1) + models.index(row.model)
        style: dict[str, Any] = styles[row.model] | {"linestyle": "none"}
        label = row.model if row.pattern == patterns[0] else None
        estimate = row.frequency or Estimate(float("nan"), float("nan"), float("nan"))
        width = error_bars([vars(estimate)])
        axis.errorbar(
            [estimate.mean], [place], xerr=width, label=label, capsize=3, markersize=6, **style
        )
        solutions = f"{row.shown} of {row.correct} solutions"
        problems = f"{row.problems_shown} of {row.problems} problems"
        axis.text(1.03, place, f"{solutions}, {problems}", va="center", fontsize=8)
        counts = ("shown", "correct", "problems_shown", "problems")
        rows.append(
            {"pattern": row.pattern, "model": row.model}
            | vars(estimate)
            | {name: getattr(row, name) for name in counts}
        )
    ticks = [(len(models) + 1) * i + (len(models) - 1) / 2 for i in range(len(patterns))]
    axis.set_yticks(ticks, patterns, parse_math=False)
    axis.set(xlim=(-0.03, 1.75), ylim=(max(ticks) + len(models) / 2 + 0.3, -0.8))
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", ".25", ".5", ".75", "1"])
    axis.set_xlabel(
        "share of a problem's correct solutions, mean over problems (Eq. 13)", loc="left"
    )
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines["bottom"].set_bounds(0, 1)
    return save_figure(figure, [axis], path, rows, note)


def plot_dynamics(
    runs: Mapping[str, Sequence[Mapping]],
    curves: Mapping[str, Mapping[int, Estimate]],
    path: str | Path,
    note: str,
    *,
    models: Sequence[str] | None = None,
    window: int = 9,
) -> Path:
    """Metrics of training against the optimizer step, and held-out pass@k next to the reward.

    The metrics are those of `patterns.DYNAMICS` without the guide's mean.

    Args:
        runs: name -> rows of its `metrics.jsonl`.
        curves: model -> k -> held-out pass@k, of evaluated models.
        path: of the PNG; the CSV holds the metrics.
        models: the order for colours; None takes the curves' models, then the runs.
        window: optimizer steps of the centred moving average over the raw values.
    """
    models = list(models or dict.fromkeys([*curves, *runs]))
    shown = [
        m
        for m in DYNAMICS
        if m != "sage/guide_mean" and any(m in row for rows in runs.values() for row in rows)
    ]
    figure, axes = new_figure(len(shown) + bool(curves))
    axes = list(axes)
    figure.set_size_inches(10, 3 * -(-len(axes) // 2))
    legend = axes
    if curves:
        # Reward and pass@k side by side; the legend is made from the axes that have every model.
        legend = [axes.pop(1)]
        _draw_held_out(legend[0], curves, models)
    for axis, metric in zip(axes, shown, strict=True):
        _draw_metric(axis, metric, runs, models, window)
    table = [{"run": name} | dict(row) for name, rows in runs.items() for row in rows]
    # Eight panels of thin lines: a finer picture would be half a megabyte.
    return save_figure(figure, legend, path, table, note, dpi=90)


def _draw_held_out(
    axis: Any, curves: Mapping[str, Mapping[int, Estimate]], models: Sequence[str]
) -> None:
    styles = line_styles(models)
    for model, curve in curves.items():
        draw_curve(axis, model, curve, styles[model] | {"markersize": 4})
    axis.set(title="held-out pass@k after training", xlabel="k (samples)", ylim=(-0.02, 1.02))
    mark_ks(axis, curves)


def _draw_metric(
    axis: Any,
    metric: str,
    runs: Mapping[str, Sequence[Mapping]],
    models: Sequence[str],
    window: int,
) -> None:
    """Each step thin, their moving average thick; runs without the metric are skipped."""
    styles = line_styles(models)
    for name, rows in runs.items():
        points = [(row["step"], row[metric]) for row in rows if metric in row]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        style = styles[name] | {"marker": ""}
        axis.plot(steps, values, color=style["color"], alpha=0.25, linewidth=0.8)
        axis.plot(steps, moving_average(values, window), label=name, **style)
    axis.set(title=DYNAMICS[metric], xlabel="optimizer step")
    axis.margins(y=0.08)
    axis.ticklabel_format(axis="y", useOffset=False)


def plot_perplexity(
    values: Mapping[str, Mapping[str, Sequence[float]]],
    problems: Mapping[str, str],
    path: str | Path,
    note: str,
) -> Path:
    """The share of responses with a perplexity of at least x: a panel for each problem.

    The right end is the tail.

    Args:
        values: model -> problem -> perplexities (`perplexity.perplexities`).
        problems: id -> title of its panel.
        path: of the PNG; the CSV is written next to it.
    """
    figure, axes = new_figure(len(problems))
    styles, rows = line_styles(values), []
    for axis, (problem, title) in zip(axes, problems.items(), strict=True):
        for model, result in values.items():
            ordered = np.sort(result.get(problem, []))
            shares = 1 - np.arange(len(ordered)) / max(1, len(ordered))
            style = styles[model] | {"marker": ""}
            axis.step(ordered, shares, where="pre", label=model, **style)
            rows += [
                {"problem": problem, "model": model, "perplexity": p, "share_at_least": s}
                for p, s in zip(ordered.tolist(), shares.tolist(), strict=True)
            ]
        drawn = [p for result in values.values() for p in result.get(problem, [])]
        _scale_perplexities(axis, *((min(drawn), max(drawn)) if drawn else (1.0, 2.0)))
        axis.set(ylabel="share of responses at or above", ylim=(-0.02, 1.02))
        axis.set_xlabel("perplexity under the baseline (log scale)")
        axis.set_title(title, parse_math=False)
    return save_figure(figure, axes, path, rows, note)


def _scale_perplexities(axis: Any, low: float, high: float) -> None:
    """A logarithmic axis with readable ticks, even if it spans less than a decade."""
    from matplotlib import ticker

    axis.set_xscale("log")
    if high / low > 8:
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    else:
        ticks = [tick for tick in ticker.MaxNLocator(7).tick_values(low, high) if tick > 0]
        axis.xaxis.set_major_locator(ticker.FixedLocator(ticks))
        axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlim(low / (high / low) ** 0.03 * 0.999, high * (high / low) ** 0.03 * 1.001)
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:.4g}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())


def plot_trace(
    trace: TokenTrace, path: str | Path, note: str, threshold: float | None = None
) -> Path:
    """Entropy and log-guide of the first `TOKENS_DRAWN` tokens of one completion.

    Args:
        path: of the PNG; the CSV holds all tokens.
        threshold: of a Branch guide, drawn in the entropy; nats.
    """
    from matplotlib.figure import Figure

    count = min(len(trace.tokens), TOKENS_DRAWN)
    figure = Figure(figsize=(max(6.0, 1.2 + 0.19 * count), 4.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    places = np.arange(count)
    above.bar(places, trace.entropies[:count], color=ORANGE, edgecolor="#333333", linewidth=0.4)
    if threshold is not None:
        above.axhline(threshold, color="#333333", linestyle="--", linewidth=1)
        above.annotate(
            f"threshold {threshold:g}",
            (count - 0.5, threshold),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=8,
        )
        above.set_ylim(0, max(threshold * 1.25, 1.1 * max(trace.entropies[:count])))
    above.set_ylabel("entropy (nats)")
    below.bar(places, trace.log_guides[:count], color=BLUE, edgecolor="#333333", linewidth=0.4)
    below.axhline(0, color="#333333", linewidth=0.8)
    limit = 1.15 * max(map(abs, trace.log_guides)) or 0.1
    below.set_ylim(-limit if min(trace.log_guides) < 0 else 0, limit)
    below.set_ylabel("log q (nats)")
    labels = [_label(token) for token in trace.tokens[:count]]
    below.set_xticks(places, labels, rotation=90, fontsize=8, family="monospace", parse_math=False)
    below.set_xlim(-0.8, count - 0.2)
    for axis in (above, below):
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    whole = "" if count == len(trace.tokens) else f" (first {count} of {len(trace.tokens)} tokens)"
    above.set_title(trace.title + whole, fontsize=10, parse_math=False)
    figure.supxlabel(note, fontsize=8, color="#555555")
    path = Path(path)
    columns = (trace.tokens, trace.entropies, trace.log_guides, trace.policy_logps, trace.ref_logps)
    names = ("token", "entropy", "log_guide", "policy_logp", "ref_logp")
    write_table(
        path.with_suffix(".csv"),
        [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
    )
    figure.savefig(path, dpi=130)
    return path


def _label(token: str) -> str:
    """A token as the label of a tick: visible, on one line, short."""
    text = token.replace("\n", "↵").replace("\t", "→").replace(" ", "␣") or "∅"
    text = "".join(char if char.isprintable() else "\ufffd" for char in text)
    return text if len(text) <= 20 else text[:19] + "…"
