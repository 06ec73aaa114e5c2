"""The distance of a point to the line through two neighbours, with its interval.

Let A and B be neighbours on a line, w the place between them that has the point's pass@1 x,
x = w a + (1 − w) b, and s = (A − B)/(a − b) the slope of pass@k (capitals) over pass@1. The
distance X − w A − (1 − w) B is a function of means; its first-order expansion is the mean of the
table

    T = X − w A − (1 − w) B − s (x − w a − (1 − w) b)

of seeds and problems, with the estimates of w and s, so `crossed_interval` gives its interval. A
bootstrap over seeds and problems counts the noise of a cell three times (Owen, 2007): its intervals
are too wide.

Two cases have no value. A line bends between its points: GRPO's own point at β .4 lies .02 to .03
above the chord from β .2 to the SFT model, so neighbours may be at most a factor 2 apart. Beyond
the ends of a line there is no value.

Attempts by the start model are free, since a LoRA adapter can be switched off. Of k attempts let
m be the start model's and the others the trained model's. The chance that one of them is correct
follows from the counts, with n samples of the trained model and n' of the start model:

    pass@(k, m) = 1 − C(n' − c', m)/C(n', m) · C(n − c, k − m)/C(n, k − m)

which is unbiased if both factors are independent. Sample i of a problem has the same random numbers
in every model (`sampling.token_streams`), so the start model's samples that count here are those
that the trained model does not have, i >= n. A random one of the k attempts
is correct with probability (m/k) pass@1' + (1 − m/k) pass@1.

Shapes: S seeds, U units, L strengths.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.study.crossed import CrossedEstimate, crossed_interval

LARGEST_STEP = 2.0
"""Largest ratio of neighbouring strengths for interpolation."""


@dataclass(frozen=True)
class Place:
    """pass@1 and pass@k of a point, (S, U) each."""

    first: np.ndarray
    many: np.ndarray


def distance_to_chord(point: Place, item: Place, other: Place) -> CrossedEstimate:
    """pass@k of a point minus that of the chord from `item` to `other` at the point's pass@1.

    Raises:
        ValueError: `item` and `other` have the same mean pass@1.
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


def mixture_pass_at_k(num_samples, num_correct, start_samples, start_correct, k: int, m: int):
    """pass@(k, m), for each problem.

    Args:
        num_samples, num_correct: n and c of the trained model, (…).
        start_samples, start_correct: n' and c' of the start model, (…).
        k: attempts in all.
        m: the start model's, 0 to k.

    Raises:
        ValueError: not 0 <= m <= k, or more attempts than samples.
    """
    if not 0 <= m <= k:
        raise ValueError(f"the start model's attempts must be 0 to k = {k}, got {m}")
    missed = np.ones(np.broadcast(num_correct, start_correct).shape)
    if m:
        missed = missed * (1 - np.asarray(pass_at_k(start_samples, start_correct, m)))
    if k > m:
        missed = missed * (1 - np.asarray(pass_at_k(num_samples, num_correct, k - m)))
    return 1 - missed


def random_attempt(values: Mapping[str, np.ndarray], m: int, k: int) -> np.ndarray:
    """(S, U) pass@1 of a random attempt; `values` has `start` and `trained`."""
    return m / k * values["start"] + (1 - m / k) * values["trained"]
