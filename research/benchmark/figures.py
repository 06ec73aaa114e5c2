"""Figures of a benchmark's report, each with its table beside it. An algorithm has one colour,
style and marker in all of them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from research.benchmark.records import BASELINE, SFT
from research.benchmark.text import conditions
from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import (
    BLACK,
    BLUE,
    error_bars,
    leaves_out_0,
    write_table,
)
from sage_unsloth.study.verdicts import MATTERS

SHOWN = (SFT, "grpo", "grpo-no-kl", "grpo-exact", "sage-branch", "sage-branch-exact", "sage-token")
"""In the figures with curves, as many as there are colours; the tables have all."""


def draw(report: Mapping[str, Any], out: Path) -> None:
    """All figures of a report."""
    note = _wrap(conditions(report))
    shown = [name for name in SHOWN if name in report["algorithms"]]
    _pass_at_k(report, shown, out / "pass_at_k.png", note)
    if len(report["algorithms"]) > 2:
        _differences(report, out / "differences.png", note)


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
