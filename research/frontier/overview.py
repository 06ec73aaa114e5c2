"""The verdicts of several tasks in one figure: what RL gains and loses, and which rule loses less.

    python -m research.frontier.overview

reads every `data/results/frontier/TASK/fresh/report.json`, and writes `verdicts.png` with its table
beside the tasks.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from research.benchmark.records import SFT
from research.data import DATA
from research.frontier.figures import columns, sft_style
from research.frontier.records import BASELINE
from sage_unsloth.figures import error_bars, line_styles, write_table
from sage_unsloth.runs.files import read_json

GREY = "#555555"
FIGURE = "verdicts.png"


def draw_verdicts(reports: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each report: pass@1 against pass@k of the SFT model and of every point, GRPO's
    line through its β to the SFT model, and the mixtures of both. k is the largest with a verdict.

    Bars are the 95 % intervals of the difference to `BASELINE`, which is paired by seeds and
    problems, around each point; the levels' own are wider, and shared by all points.

    Args:
        reports: of `frontier`, on fresh problems.
        path: of the figure; the table has its name with `.csv`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * len(reports), 5.2), layout="constrained")
    axes = figure.subplots(1, len(reports), squeeze=False)[0]
    rows: list[dict[str, Any]] = []
    methods = dict.fromkeys(method for report in reports for method in report["methods"])
    styles = line_styles(methods)
    for axis, report in zip(axes, reports, strict=True):
        rows += _panel(axis, report, styles)
    steps = _each(report["settings"]["rlvr"]["max_steps"] for report in reports)
    seeds = _each(len(report["seeds"]) for report in reports)
    samples = _each(report["num_samples"] for report in reports)
    figure.supxlabel(
        f"{steps} steps of models of 0.7 M parameters; {seeds} training seeds, {samples} samples "
        "of each problem\ngrey: GRPO's line through its β; dashed: some attempts by SFT, the rest "
        "by β 0.05\nbars: 95 % of the difference to β 0.05; k: the largest that guessing does not "
        "reach",
        fontsize=8,
        color=GREY,
    )
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)


def _each(values: Iterable[int]) -> str:
    """The values of the reports, once where they are the same."""
    return " and ".join(dict.fromkeys(map(str, values)))


def _panel(
    axis: Any, report: Mapping[str, Any], styles: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    checks, rows = report["checks"], []
    k, ks, points = checks["k"], checks["ks"], checks["points"]
    levels = {SFT: (ks["1"]["sft"], ks[str(k)]["sft"])}
    levels |= {name: (item["1"]["mean"], item[str(k)]["mean"]) for name, item in points.items()}
    axis.plot(*levels[SFT], **sft_style())
    axis.axhline(levels[SFT][1], color=GREY, linewidth=0.8, linestyle=":")
    axis.annotate("SFT", levels[SFT], xytext=(8, 6), textcoords="offset points")
    mixed = [(row["random"], row["many"]) for row in checks["mixture"]["rows"] if row["k"] == k]
    mixtures = sorted([levels[BASELINE], *mixed, levels[SFT]])
    axis.plot(*zip(*mixtures, strict=True), color="#bbbbbb", linestyle="--")
    method_of = {point: m for m, item in report["methods"].items() for point in item["points"]}
    line = report["methods"][method_of[BASELINE]]["points"]
    axis.plot(*zip(*(levels[name] for name in (*line, SFT)), strict=True), color="#bbbbbb")
    others = sorted(points, key=lambda name: levels[name][1])
    for place, name in enumerate(others):
        style = dict(styles[method_of[name]]) | {"linestyle": "none"}
        x, y = ([value] for value in levels[name])
        ends = [None, None]
        if name != BASELINE:
            ends = [error_bars([points[name][item]["to_baseline"]]) for item in ("1", str(k))]
        axis.errorbar(x, y, xerr=ends[0], yerr=ends[1], capsize=2, elinewidth=1, **style)
        axis.annotate(
            name.replace(" beta=", ", β ").replace(" rehearsal_coef=", ", rehearsal "),
            levels[name],
            xytext=(1.03, (place + 0.5) / len(others)),
            textcoords=("axes fraction", "axes fraction"),
            color=style["color"],
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": style["color"], "linewidth": 0.5, "alpha": 0.5},
        )
    for name, (first, many) in levels.items():
        row = {"task": report["task"], "point": name, "pass@1": first, f"pass@{k}": many}
        if name not in (SFT, BASELINE):
            differences = {item: points[name][item]["to_baseline"] for item in ("1", str(k))}
            row |= columns(
                differences, {difference: f"pass@{difference} − GRPO" for difference in differences}
            )
        rows.append(row)
    task = report["title"].split(",")[0].replace("embedded ", "").replace(" drawn anew", "")
    axis.set_title(f"{task}, new problems")
    axis.set(xlabel="pass@1", ylabel=f"pass@{k}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    return rows


def main() -> None:
    folder = DATA / "results" / "frontier"
    reports = [read_json(path) for path in sorted(folder.glob("*/fresh/report.json"))]
    draw_verdicts(reports, folder / FIGURE)


if __name__ == "__main__":
    main()
