"""Rows of metrics as a trainer logs them, and the held-out curve in them."""

from collections.abc import Mapping, Sequence
from typing import Any

METRICS = "metrics.jsonl"
PASS_AT_1 = "eval/pass@1"
"""In the rows of steps with an evaluation on held-out problems."""


def numbers(logs: Mapping[str, Any]) -> dict[str, Any]:
    """The logged metrics, with text that a trainer logs for display turned into numbers."""
    result = {}
    for key, value in logs.items():
        try:
            result[key] = float(value)
        except (TypeError, ValueError):
            result[key] = value
    return result


def held_out_curve(rows: Sequence[Mapping[str, Any]], last: int | None = None) -> list[Mapping]:
    """The rows with an evaluation, sorted by step, up to the step `last`."""
    result = [row for row in rows if PASS_AT_1 in row and (last is None or row["step"] <= last)]
    return sorted(result, key=lambda row: row["step"])


def best_evaluation(curve: Sequence[Mapping[str, Any]], metric: str) -> Mapping[str, Any] | None:
    """The row with the highest value of a metric, the first of equal ones; None for no rows."""
    return max(curve, key=lambda row: row[metric], default=None)
