"""The dose of a guide in training, and how much it could have changed.

A guide that changes no token is GRPO, and its difference to GRPO is noise. So the report shows the
dose of each guided point: the share of completion tokens with q ≠ 1, the mean of q, and Σ log q of
a completion. A guide that depends only on the prefix scales the pull towards the reference by q, so
with a mean q̄ it acts about like β q̄; the slope of the twin's line over log β says how much that is.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sage_unsloth.study.verdicts import MATTERS

NEGLIGIBLE = 0.1
"""Share of the detectable difference below which a guide gets no verdict."""


def measure_dose(runs: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Means over seeds and steps of the training series; None of runs without a guide.

    Returns:
        `touched`, `guide_mean`, and `log_guide_sum`: nats a completion, where `log_guide_mean` was
        recorded; else `log_guide_sum_at_most`, mean length times log mean q (Jensen).
    """
    series = [run["training"] for run in runs]
    if not series or any(_missing(item.get("guide_mean")) for item in series):
        return None
    touched = float(np.mean([item["share_touched"] for item in series]))
    guide_mean = float(np.mean([item["guide_mean"] for item in series]))
    result = {"touched": touched, "guide_mean": guide_mean}
    if all(not _missing(item.get("log_guide_mean")) for item in series):
        sums = [np.multiply(item["log_guide_mean"], item["mean_length"]) for item in series]
        return result | {"log_guide_sum": float(np.mean(sums))}
    length = float(np.mean([item["mean_length"] for item in series]))
    return result | {"log_guide_sum_at_most": length * math.log(guide_mean)}


def _missing(values: Sequence[float | None] | None) -> bool:
    return not values or None in values


def possible_change(
    guide_mean: float, place: int, many_L: Sequence[float], strengths_L: Sequence[float]
) -> float | None:
    """What β q̄ instead of β changes of pass@k: the slope of the twin's line over log β from the
    twin to its next strength (of the last: from the one before), times log q̄.

    None where the twin has one strength, or the lower of two is 0.

    Args:
        guide_mean: q̄.
        place: of the twin on its line.
        many_L, strengths_L: the line's pass@k by ascending strength.
    """
    if len(strengths_L) < 2:
        return None
    left = min(place, len(strengths_L) - 2)
    if strengths_L[left] <= 0:
        return None
    rise = many_L[left + 1] - many_L[left]
    return rise / math.log(strengths_L[left + 1] / strengths_L[left]) * math.log(guide_mean)


def is_negligible(change: float | None, detectable: float | None) -> bool:
    """Whether a dose is too small for a verdict.

    Without a detectable difference (one seed, or all cells equal) the threshold is `MATTERS`.
    """
    return change is not None and abs(change) < NEGLIGIBLE * (detectable or MATTERS)
