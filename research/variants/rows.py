"""Training rows in other proportions: the remedy for a loss of coverage that needs no loss.

A family that training seldom shows is forgotten. These lists show it more often, by repetition, so
that everything else of a run stays as it is. G is the number of completions in a group.
"""

from collections.abc import Sequence

import numpy as np

RESOLUTION = 2
"""Repetitions of a row for each unit of its weight: weights are rounded to halves."""


def balance_families(rows: Sequence[dict]) -> list[dict]:
    """The rows, those of each family repeated in turn until all families have the same number."""
    members: dict[str, list[dict]] = {}
    for row in rows:
        members.setdefault(row["family"], []).append(row)
    size = max(map(len, members.values()))
    return [group[i % len(group)] for group in members.values() for i in range(size)]


def inverse_pass_rates(num_samples: int, num_correct_P: Sequence[int], group: int) -> np.ndarray:
    """1/p truncated at order G: w = Σ_{j<G} (1 − p)^j = (1 − (1 − p)^G) / p, from 1 to G.

    It is the weight on ∇p in the gradient of log p as groups of G can have it, which is what
    `maxrl` does in the loss. Each power is estimated without bias, by C(n − c, j) / C(n, j).

    Args:
        num_samples: n, of each problem.
        num_correct_P: c of each problem, (P,).
        group: G.

    Returns:
        (P,).

    Raises:
        ValueError: G exceeds n + 1, so that a power has no estimate.
    """
    if group > num_samples + 1:
        raise ValueError(f"group must be <= num_samples + 1; got {group} and {num_samples}")
    wrong_P = num_samples - np.asarray(num_correct_P, float)
    power_P = np.ones_like(wrong_P)
    weight_P = np.zeros_like(wrong_P)
    for j in range(group):
        weight_P += power_P
        # C(n − c, j + 1) / C(n, j + 1) from the quotient of order j
        power_P = power_P * np.maximum(wrong_P - j, 0) / max(num_samples - j, 1)
    return weight_P


def repeat_rows(rows: Sequence[dict], weight_P: np.ndarray) -> list[dict]:
    """Each row as often as its weight says, at least once, in order."""
    counts = np.maximum(np.rint(RESOLUTION * weight_P), 1).astype(int)
    return [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
