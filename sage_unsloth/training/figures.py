"""The figure of a training run."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.figures import line_styles, new_figure, save_figure

AT_K = re.compile(r"eval/pass@(\d+)")
GUESS = "blind attempts"


def plot_training(
    runs: Mapping[str, Sequence[Mapping]], path: str | Path, note: str, window: int = 9
) -> Path:
    """Draws reward, KL, entropy, the guide and held-out pass@k of runs against the optimizer step.

    Args:
        runs: name -> rows of its `metrics.jsonl`.
        path: of the PNG; the CSV is written next to it.
        window: optimizer steps of the centred moving average over the raw values. A run with fewer
            than twice as many is drawn as points, and the note says so.
    """
    panels = {
        "reward": "mean reward",
        "kl/ref_k3": "KL to the reference (k3, nats)",
        "sage/entropy": "mean token entropy (nats)",
        "sage/guide_mean": "mean of the guide q",
    }
    every_row = [row for rows in runs.values() for row in rows]
    curves = next(iter(held_out_panels(every_row).values()), {})
    panels |= {metric: f"held-out {label}" for label, metric in curves.items() if label != GUESS}
    figure, axes = new_figure(len(panels))
    styles = line_styles(runs, first=1)  # the first is what they started from
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for name, rows in runs.items():
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            style = styles[name]
            # Evaluations are few, and each is a mean of many completions: no smoothing.
            if metric in curves.values():
                plot_evaluations(axis, rows, metric, label=name, **style)
                continue
            # A moving average over so few points would look like a trend.
            if len(values) < 2 * window:
                axis.plot(steps, values, label=name, **style | {"linestyle": ""})
                continue
            axis.plot(steps, values, color=style["color"], alpha=0.2, linewidth=0.8)
            axis.plot(steps, moving_average(values, window), label=name, **style | {"marker": ""})
        axis.set(title=title, xlabel="optimizer step")
    longest = max((len(rows) for rows in runs.values()), default=0)
    few = f"points: each step; {longest} are too few to show a trend"
    many = f"thin: each step, thick: moving average over {window}"
    note += f"; {few if longest < 2 * window else many}"
    table = [{"run": name} | dict(row) for name, rows in runs.items() for row in rows]
    return save_figure(figure, axes, path, table, note)


def held_out_panels(rows: Sequence[Mapping]) -> dict[str, dict[str, str]]:
    """Title of a panel -> label of a curve -> its metric, for the evaluations in these rows.

    pass@1, pass@N and the value of blind attempts at N; a second panel has pass@N by family.
    """
    names = {name for row in rows for name in row if str(name).startswith("eval/pass@")}
    ks = sorted(int(match[1]) for name in names if (match := AT_K.fullmatch(name)))
    if not ks:
        return {}
    last = f"eval/pass@{ks[-1]}"
    curves = {f"pass@{k}": f"eval/pass@{k}" for k in dict.fromkeys((ks[0], ks[-1]))}
    if any(f"eval/guess@{ks[-1]}" in row for row in rows):
        curves[GUESS] = f"eval/guess@{ks[-1]}"
    families = {name.removeprefix(f"{last}/"): name for name in sorted(names) if f"{last}/" in name}
    title = f"held-out {last.removeprefix('eval/')} by family"
    return {"held-out pass@k": curves} | ({title: families} if families else {})


def plot_evaluations(axis: Any, rows: Sequence[Mapping], metric: str, **style: Any) -> None:
    """A metric of the evaluations, with its interval as a band if logged."""
    rows = [row for row in rows if metric in row]
    steps = [row["step"] for row in rows]
    axis.plot(steps, [row[metric] for row in rows], **style)
    bounds = [[row.get(metric + end) for row in rows] for end in ("_low", "_high")]
    if rows and None not in bounds[0]:
        axis.fill_between(steps, *bounds, color=style["color"], alpha=0.15, linewidth=0)


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Centred, over at most `window` values; shorter at the ends."""
    # Shorter spans at the ends, rather than padding that would bend the curve.
    half = window // 2
    spans = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]
