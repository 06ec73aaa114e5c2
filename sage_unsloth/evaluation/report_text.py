"""A report of an evaluation as text for a terminal."""

import math
from collections.abc import Mapping
from typing import Any

from sage_unsloth.evaluation.intervals import Estimate
from sage_unsloth.figures import table_text

MUCH_CUT = 0.1  # share of completions that reached the length limit
READING = (
    "[ ]: 95 % interval over problems (and over training seeds if there are several), paired for "
    "differences"
)


def report_text(result: Mapping[str, Any]) -> str:
    """A table, differences, coverage, and notes on reading them."""
    lines = []
    for benchmark, curves in result["pass_at_k"].items():
        rows = {row["model"]: row for row in result["table"] if row["benchmark"] == benchmark}
        lines += [
            f"{benchmark} ({next(iter(rows.values()))['problems']} problems)",
            table_text([_pass_at_k_row(row, curves[name]) for name, row in rows.items()]),
            "",
            table_text([_completions(row) for row in rows.values()]),
            "",
        ]
        cut = [name for name, row in rows.items() if row["truncated"] > MUCH_CUT]
        if cut:
            lines.append(
                f"More than {MUCH_CUT:.0%} of the completions of {', '.join(cut)} were truncated "
                "at the length limit and count as wrong: raise --max-tokens, in another --out."
            )
        for pair, curve in result["differences"][benchmark].items():
            ks = list(curve)
            parts = [
                f"pass@{k} {interval_text(curve[k], '+')}, "
                f"above 0: {curve[k]['share_above_zero']:.1%}"
                for k in dict.fromkeys((ks[0], ks[-1]))
            ]
            lines.append(f"{pair}: " + "; ".join(parts))
        matches = result["coverage"][benchmark]
        solved = ", ".join(
            f"{name} {count} ({len(matches['only'][name])} alone)"
            for name, count in matches["solved"].items()
        )
        lines.append(f"solved at least once in {matches['samples']} samples: {solved}")
        lines.append("")
    lines += [partial_line(name, part) for name, part in result.get("partial", {}).items()]
    lines.append(
        f"{READING}. above 0: share of the t distribution. ±: standard deviation over parts of "
        "the samples or over training seeds, which says nothing about other problems."
    )
    return "\n".join(lines)


def partial_line(benchmark: str, part: Mapping[str, int]) -> str:
    """The part of a benchmark in a report with `--partial` (`partial.shared_part`)."""
    samples, of = part["samples"], part["of"]
    if part["problems"] < of:
        return (
            f"Partial: {benchmark} with the {samples} samples of {part['problems']} of {of} "
            "problems that all models have; the missing ones may be those that take longest."
        )
    if part["left_out"]:
        return (
            f"Partial: {benchmark} with the first {samples} samples of all {of} problems, which "
            f"all models have; {part['left_out']:,} further completions are left out."
        )
    return f"{benchmark}: nothing is left out; all models have {samples} samples of {of} problems."


def _pass_at_k_row(
    row: Mapping[str, Any], curve: Mapping[str, Mapping[str, float]]
) -> dict[str, str]:
    """pass@k of a model, a row of the first table."""
    deviation = "-"
    if "seed_mean" in row:
        deviation = f"{row['seed_mean']:.3f} ± {row['seed_deviation']:.3f}"
    return {
        "model": row["model"],
        "pass@1": interval_text(curve["1"]),
        "mean ±": deviation,
        "pass@n": interval_text(curve[str(row["samples"])]),
        "n": str(row["samples"]),
    }


def _completions(row: Mapping[str, Any]) -> dict[str, str]:
    """Statistics of a model's completions, a row of the second table."""
    return {
        "model": row["model"],
        "tokens": f"{row['tokens']:g}",
        "cut": f"{row['truncated']:.3f}",
        "no answer": f"{row['unparsable']:.3f}",
    }


def interval_text(
    estimate: Estimate | Mapping[str, Any] | None, sign: str = "", digits: int = 3
) -> str:
    """A mean with its interval, if any, as a table cell; "-" for None."""
    if estimate is None:
        return "-"
    values = estimate if isinstance(estimate, Mapping) else vars(estimate)
    if values["low"] is None or math.isnan(values["low"]):
        return f"{values['mean']:{sign}.{digits}f}"
    mean, low, high = (f"{values[name]:{sign}.{digits}f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"
