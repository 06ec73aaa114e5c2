"""The p value of an interval, and Holm's correction for claims that were named together.

Each of several claims may come out by chance; Holm's correction (1979) bounds the chance that any
of them does.
"""

from collections.abc import Sequence

from scipy.stats import t as student

from sage_unsloth.study.crossed import CrossedEstimate

ALPHA = 0.05


def p_value(result: CrossedEstimate, threshold: float) -> float:
    """Two-sided, of an interval's own t distribution: below .05 where the 95 % interval lies above
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
