"""Verdicts from intervals: of one claim, of several together, and where none is given.

Any of several claims may hold by chance; Holm's correction (1979) bounds the probability that at
least one of them does.

With one of twelve workings right, k blind attempts solve 1 − (1 − 1/12)^k of the problems: .50 at
k = 8 and .94 at k = 32. A model that answers more widely is then "better" at k = 32 without being
able to do more. No verdict is given at such a k.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import t as student

from sage_unsloth.study.crossed import CrossedEstimate

MATTERS = 0.03
"""Smaller differences of pass@k count as none: about the largest gain in SAGE's tables."""


def verdict(kind: str, low: float, high: float, matters: float = MATTERS) -> str:
    """The verdict on a claim about a − b, from its interval.

    gain      supported: low > 0.             not supported: high < matters, no gain that matters.
    loss      supported: high < 0.            not supported: low > −matters.
    no loss   supported: low > −matters.      not supported: high < 0.
    """
    if kind == "loss":
        return verdict("gain", -high, -low, matters)
    if kind == "no loss":
        return "supported" if low > -matters else "not supported" if high < 0 else "undecided"
    if low > 0:
        return "supported"
    return "not supported" if high < matters else "undecided"


# --- several claims ---

ALPHA = 0.05


def p_value(result: CrossedEstimate, threshold: float) -> float:
    """Two-sided p of the interval's t distribution: below .05 if the 95 % interval is above
    `threshold`.
    """
    if not result.error:
        return 0.0 if result.mean > threshold else 1.0
    return min(1.0, 2 * float(student.sf((result.mean - threshold) / result.error, result.freedom)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values in the same order: the i-th smallest of n times n − i + 1, not decreasing,
    at most 1.
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = largest
    return adjusted


# --- guessing ---

MAX_GUESS_SHARE = 0.8
"""Share of the start model's pass@k from which guessing explains too much for a verdict."""


def says_something(bound: float, start: float) -> bool:
    """Whether a verdict at this k says more than guessing does.

    Args:
        bound: mean pass@k of blind attempts.
        start: the start model's mean pass@k.
    """
    return bound < MAX_GUESS_SHARE * start


def main_k(rows: Mapping[str, Mapping[str, Any]]) -> int:
    """The largest k at which a verdict `says_something`; the smallest k if there is none."""
    usable = [int(k) for k, row in rows.items() if row["usable"]]
    return max(usable, default=min(map(int, rows)))
