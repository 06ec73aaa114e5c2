r"""A point beside the line between two neighbouring points, with an interval like any other.

Let A and B be neighbours on a line, w the place between them that has the point's pass@1 x,
x = w a + (1 − w) b, and s = (A − B)/(a − b) the slope of pass@k (capitals) over pass@1. The
distance X − w A − (1 − w) B is a function of means; its first-order expansion is the mean of the
table

    T = X − w A − (1 − w) B − s (x − w a − (1 − w) b)

of seeds and problems, at w and s of the estimates. So its interval is `crossed_interval`'s. A
bootstrap that draws seeds and problems counts the noise of a cell three times (Owen, 2007), which
`line.resampled` does: its intervals are too wide.

Two things are refused rather than guessed. A line bends between its points: GRPO's own point at
β .4 lies .02 to .03 above the chord from β .2 to the SFT model. So neighbours may be at most a
factor 2 apart, and beyond the line's end there is no value.

Shapes: S seeds, U units, L strengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sage_unsloth.study.crossed import CrossedEstimate, crossed_interval

LARGEST_STEP = 2.0
"""Ratio of two neighbouring strengths that are still interpolated between."""


@dataclass(frozen=True)
class Place:
    """pass@1 and pass@k of a point, (S, U) each."""

    first: np.ndarray
    many: np.ndarray


def find_neighbours(
    level: float, first_L: Sequence[float], strengths_L: Sequence[float]
) -> tuple[int, int] | str:
    """The neighbours on a line that have `level` between them, or why there are none.

    Of several the greatest strengths count. Strengths ascend.
    """
    pairs = [
        (left, left + 1)
        for left in range(len(first_L) - 1)
        if first_L[left] >= level >= first_L[left + 1]
    ]
    if not pairs:
        return "beyond the line's end"
    left, right = pairs[-1]
    if strengths_L[right] > LARGEST_STEP * strengths_L[left] * (1 + 1e-9):
        return f"between strengths {strengths_L[left]:g} and {strengths_L[right]:g}: too far apart"
    return left, right


def distance_to_chord(point: Place, item: Place, other: Place) -> CrossedEstimate:
    """pass@k of a point minus that of the chord from `one` to `other` at the point's pass@1.

    Raises:
        ValueError: `one` and `other` have the same mean pass@1.
    """
    run = float(item.first.mean() - other.first.mean())
    if not run:
        raise ValueError(
            "a chord needs two different values of pass@1, and both ends have the same"
        )
    weight = float(point.first.mean() - other.first.mean()) / run
    slope = float(item.many.mean() - other.many.mean()) / run
    across = point.first - weight * item.first - (1 - weight) * other.first
    up = point.many - weight * item.many - (1 - weight) * other.many
    return crossed_interval(up - slope * across)
