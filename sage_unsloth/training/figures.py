"""The figure of a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sage_unsloth.figures import line_styles, new_figure, save_figure
from sage_unsloth.training.rows import PASS_AT_1


def plot_training(
    runs: Mapping[str, Sequence[Mapping]], path: str | Path, note: str, window: int = 9
) -> Path:
    """The course of training runs: reward, plain KL, entropy, the guide, and held-out pass@1 where
    there were evaluations, each against the optimizer step.

    Args:
        runs: name -> rows of its `metrics.jsonl`.
        path: of the PNG; the CSV is put beside it.
        note: the conditions, under the figure.
        window: optimizer steps of the centred moving average drawn over the raw values; a run of
            fewer than twice as many is drawn as points, and the note says so.
    """
    panels = {
        "reward": "mean reward",
        "kl/ref_k3": "KL to the reference (k3, nats)",
        "sage/entropy": "mean token entropy (nats)",
        "sage/guide_mean": "mean of the guide q",
    }
    if any(PASS_AT_1 in row for rows in runs.values() for row in rows):
        panels[PASS_AT_1] = "held-out pass@1"
    figure, axes = new_figure(len(panels))
    styles = line_styles(runs, first=1)  # the first is what they started from
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for name, rows in runs.items():
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            if not points:
                continue
            steps, values = zip(*points, strict=True)
            style = styles[name]
            if metric == PASS_AT_1:  # few, and of many completions each
                axis.plot(steps, values, label=name, **style)
                continue
            if len(values) < 2 * window:  # a mean over them would look like a course
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


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Centred, over at most `window` values; shorter at the ends."""
    half = window // 2
    spans = (values[max(0, i - half) : i + half + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]
