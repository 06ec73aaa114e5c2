"""Training rows in other proportions: prevents a loss of coverage without changing the loss.

Rows that training rarely shows are forgotten. These lists repeat them, so that everything else of a
run stays the same. G is the number of completions in a group.
"""

import contextlib
from collections.abc import Sequence

import numpy as np

RESOLUTION = 2
"""Repetitions per unit of weight: weights are rounded to halves."""
PASS_RATE = "pass_rate"
"""Column with shares of correct samples."""


def weighted_rows(rows: Sequence[dict], column: str, group: int) -> list[dict]:
    """The rows, repeated so that rare ones are trained on as often as others.

    Args:
        rows: each with `column`.
        column: `pass_rate`, the share of correct samples of a problem, repeats a row by its inverse
            (`inverse_pass_rates`); other columns get the same number of rows for each value
            (`balance_rows`).
        group: G.

    Raises:
        ValueError: a row without the column, or a pass rate that is not in [0, 1].
    """
    missing = next((i for i, row in enumerate(rows) if row.get(column) is None), None)
    if missing is not None:
        raise ValueError(
            f"every training row must have the column of balance_by, {column!r}, but row "
            f"{missing} has {', '.join(rows[missing])}. Read it from your data: --columns "
            f"{column}={column}"
        )
    if column != PASS_RATE:
        return balance_rows(rows, column)
    misses_P = 1 - np.array([_share(row[column]) for row in rows])
    return repeat_rows(rows, np.sum([misses_P**j for j in range(group)], axis=0))


def balance_rows(rows: Sequence[dict], column: str) -> list[dict]:
    """The rows, repeated in turn until each value of a column has the same number."""
    members: dict[str, list[dict]] = {}
    for row in rows:
        members.setdefault(str(row[column]), []).append(row)
    size = max(map(len, members.values()))
    return [group[i % len(group)] for group in members.values() for i in range(size)]


def inverse_pass_rates(num_samples: int, num_correct_P: Sequence[int], group: int) -> np.ndarray:
    """1/p truncated at order G: w = Σ_{j<G} (1 − p)^j = (1 − (1 − p)^G) / p, from 1 to G, (P,).

    It is the weight of ∇p in the gradient of log p that groups of G allow, as `maxrl` has it in the
    loss. Each power has the unbiased estimate C(n − c, j) / C(n, j).

    Args:
        num_samples: n, of each problem.
        num_correct_P: c of each problem, (P,).
        group: G.

    Raises:
        ValueError: G exceeds n + 1, so that a power has no estimate.
    """
    if group > num_samples + 1:
        raise ValueError(f"group must be <= num_samples + 1, got {group} and {num_samples}")
    wrong_P = num_samples - np.asarray(num_correct_P, float)
    power_P = np.ones_like(wrong_P)
    weight_P = np.zeros_like(wrong_P)
    for j in range(group):
        weight_P += power_P
        # C(n − c, j + 1) / C(n, j + 1) from the quotient of order j
        power_P = power_P * np.maximum(wrong_P - j, 0) / max(num_samples - j, 1)
    return weight_P


def repeat_rows(rows: Sequence[dict], weight_P: np.ndarray) -> list[dict]:
    """Each row as often as its weight, at least once, in order."""
    counts = np.maximum(np.rint(RESOLUTION * weight_P), 1).astype(int)
    return [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]


def _share(value: object) -> float:
    """A share as a number; of a CSV file it is text."""
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        with contextlib.suppress(ValueError):
            if 0 <= float(value) <= 1:
                return float(value)
    raise ValueError(f"pass_rate must be a share in [0, 1], got {value!r}")
