"""Rows of an analysis for `figures.show_table`: numbers as text, with their intervals."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sage_unsloth.analysis.patterns import DYNAMICS, PatternFrequency
from sage_unsloth.evaluation.report_text import interval_text


def no_interval(estimates: Iterable[Mapping[str, Any]], few: str) -> str:
    """Why some of a table's means have no interval; empty if all have one."""
    lacking = any(row["low"] is None or math.isnan(row["low"]) for row in estimates)
    return f"; no interval for {few}, or for equal values" if lacking else ""


def pattern_rows(frequencies: Sequence[PatternFrequency]) -> list[dict[str, str]]:
    """Frequencies with their intervals and counts."""
    return [
        {
            "pattern": row.pattern,
            "model": row.model,
            "frequency": interval_text(row.frequency),
            "solutions": f"{row.shown} of {row.correct}",
            "problems": f"{row.problems_shown} of {row.problems}",
        }
        for row in frequencies
    ]


def phase_rows(phases: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """`patterns.dynamics` with a column for each third."""
    table: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in phases:
        table[row["metric"], row["run"]][row["phase"]] = interval_text(row, digits=4)
    columns = list(dict.fromkeys(row["phase"] for row in phases))
    return [
        {"metric": DYNAMICS[metric], "run": run} | {name: result.get(name, "-") for name in columns}
        for (metric, run), result in sorted(
            table.items(), key=lambda item: list(DYNAMICS).index(item[0][0])
        )
    ]


def perplexity_rows(table: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """`perplexity.perplexity_table` as rows."""
    return [
        {
            "statistic": row["statistic"],
            "model": row["model"],
            "mean over problems": interval_text(row),
            "difference": interval_text(_difference(row), "+"),
            "problems": str(row["problems"]),
            "responses": str(row["responses"]),
        }
        for row in sorted(table, key=lambda row: row["statistic"])
    ]


def _difference(row: Mapping[str, Any]) -> dict[str, float] | None:
    if "difference" not in row:
        return None
    return {
        "mean": row["difference"],
        "low": row["difference_low"],
        "high": row["difference_high"],
    }
