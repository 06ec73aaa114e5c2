"""Draws the README's picture: pass@k of three models of the arithmetic frontier, which cross.

python -m research.first_picture
"""

from pathlib import Path
from typing import Any

import numpy as np

from research.benchmark.records import SFT
from research.benchmark.report import level
from research.data import DATA
from research.frontier.records import START, by_unit
from sage_unsloth.evaluation.metrics import pass_at_k, powers_of_two
from sage_unsloth.figures import line_styles, write_table
from sage_unsloth.runs.files import read_json

FOLDER = DATA / "results" / "frontier" / "arithmetic" / "fresh"
PICTURE = FOLDER.parents[1] / "crossing.png"
# (algorithm, setting, strength) of a run -> label, shift of the label in points
LINES = {
    ("sft", "", None): ("SFT, before RL", 5),
    ("grpo", "beta", 0.05): ("GRPO", -11),
    ("maxrl", "rehearsal_coef", 0.3): ("MaxRL + rehearsal", -8),
}


def curves() -> list[dict[str, Any]]:
    """A row for each line and k: the mean over problems and seeds with its 95 % interval."""
    data = read_json(FOLDER / "records.json")
    ((set_name, problems),) = data["sets"].items()
    num_samples, rows = problems["num_samples"], []
    counts: dict[tuple, list[list[int]]] = {point: [] for point in LINES}
    for run in data["runs"]:
        point = (run["algorithm"], run["setting"], run["strength"])
        if point in LINES:
            counts[point].append(run["sets"][set_name]["correct"])
    start = read_json(FOLDER / START)  # SFT, sampled more often than the others
    for point, correct in counts.items():
        samples = num_samples
        if point[0] == SFT:
            samples, correct = start["num_samples"], [start["correct"]]
        for k in powers_of_two(num_samples):
            values_SP = np.asarray(pass_at_k(samples, np.array(correct), k))
            estimate = level(by_unit(values_SP, problems["units"]), once=point[0] == SFT)
            rows.append({"line": LINES[point][0], "k": k, "seeds": len(correct)} | estimate)
    return rows


def draw(path: Path = PICTURE) -> None:
    """The picture, and its table as a CSV."""
    from matplotlib.figure import Figure

    rows = curves()
    figure = Figure(figsize=(6.4, 3.7), layout="constrained")
    axis = figure.subplots()
    styles = line_styles(label for label, _ in LINES.values())
    for label, shift in LINES.values():
        colour = styles[label]["color"]
        line = [row for row in rows if row["line"] == label]
        x, y = [row["k"] for row in line], [row["mean"] for row in line]
        axis.plot(x, y, color=colour, marker="o", markersize=5, linewidth=2.5, clip_on=False)
        low, high = ([row[end] for row in line] for end in ("low", "high"))
        axis.fill_between(x, low, high, color=colour, alpha=0.1, linewidth=0)
        axis.annotate(
            label,
            (x[-1], y[-1]),
            xytext=(8, shift),
            textcoords="offset points",
            color=colour,
            fontsize=12,
            fontweight="bold",
            annotation_clip=False,
        )
    axis.set_xscale("log", base=2)
    ticks = sorted({row["k"] for row in rows})
    axis.set_xticks(ticks, map(str, ticks))
    axis.tick_params(labelsize=12)
    axis.xaxis.label.set_fontsize(12)
    axis.yaxis.label.set_fontsize(12)
    axis.set(xlabel="k, attempts at a problem", ylabel="pass@k", xlim=(0.95, ticks[-1]))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    draw()
