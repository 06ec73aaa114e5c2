"""Bootstrap intervals for unbounded values: of problems, and of successive steps of a run.

pass@k, a share between 0 and 1, has better intervals (`intervals`). If every resample has the same
mean (one value, or equal values), the variation is unknown: `low` and `high` are nan.

Shapes: P problems, R resamples; N values in a row.
"""

import math

import numpy as np

from sage_unsloth.evaluation.intervals import Difference, Estimate

RESAMPLED_AT_ONCE = 1_000_000  # values in memory
ROUNDING = 1e-12  # two means this close are equal


def mean_interval(
    values_P, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """The mean of one value for each problem, (P,), with a percentile bootstrap interval (Efron,
    1979).

    Raises:
        ValueError: not (P,) finite values with P >= 1; `confidence` not in (0, 1).
    """
    values_P = _finite_values(values_P)
    means = resampled_means(values_P, resamples, seed)
    return Estimate(*_mean_and_interval(values_P.mean(), means, confidence))


def mean_difference(
    values_a_P, values_b_P, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """The mean of a − b over the same problems in one order, each (P,).

    Raises:
        ValueError: as `mean_interval`; or the numbers of problems differ.
    """
    values_a_P, values_b_P = _finite_values(values_a_P), _finite_values(values_b_P)
    if values_a_P.shape != values_b_P.shape:
        raise ValueError(
            f"both models must have the same problems, got {values_a_P.size} and {values_b_P.size} "
            "values"
        )
    means = resampled_means(values_a_P - values_b_P, resamples, seed)
    interval = _mean_and_interval((values_a_P - values_b_P).mean(), means, confidence)
    return Difference(*interval, share_above_zero=_share_above_zero(means))


def series_interval(
    values_N,
    *,
    block: int | None = None,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Estimate:
    """The mean of N successive values of one run, by the circular block bootstrap.

    Successive optimizer steps are similar, so resampling single values would give too narrow
    intervals. Blocks of neighbours are resampled instead, in a circle (Politis and Romano, 1992).
    The interval is about the steps of this run, not about another run.

    Args:
        values_N: (N,), in order.
        block: neighbours in a block; None takes ⌈N^(1/3)⌉, and 1 is the ordinary bootstrap.
        confidence: the share of resampled means between `low` and `high`.

    Raises:
        ValueError: as `mean_interval`; or not 1 <= block <= N.
    """
    values_N = _finite_values(values_N)
    count = values_N.size
    block = math.ceil(round(count ** (1 / 3), 9)) if block is None else block
    if not 1 <= block <= count:
        raise ValueError(f"block must be between 1 and the {count} values, got {block}")
    blocks = -(-count // block)
    starts_RB = np.random.default_rng(seed).integers(count, size=(resamples, blocks))
    places = (starts_RB[:, :, None] + np.arange(block)) % count
    means = values_N[places.reshape(resamples, -1)[:, :count]].mean(axis=1)
    return Estimate(*_mean_and_interval(values_N.mean(), means, confidence))


def _finite_values(values) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ValueError(
            "an interval needs a finite value for each problem or step, got the shape "
            f"{values.shape} with {int((~np.isfinite(values)).sum())} that are not finite"
        )
    return values


def resampled_means(values_P: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Means over P problems sampled with replacement, (R,), in chunks of bounded memory."""
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1, got {resamples}")
    generator = np.random.default_rng(seed)
    chunk = max(1, RESAMPLED_AT_ONCE // values_P.size)
    means_R = np.empty(resamples)
    for start in range(0, resamples, chunk):
        rows = slice(start, min(start + chunk, resamples))
        drawn_RP = generator.integers(values_P.size, size=(rows.stop - start, values_P.size))
        means_R[rows] = values_P[drawn_RP].mean(axis=1)
    return means_R


def _mean_and_interval(mean, means, confidence: float) -> tuple[float, float, float]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), as .95 is, got {confidence}")
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    if np.ptp(means) <= ROUNDING:
        low = high = math.nan
    return float(mean), float(low), float(high)


def _share_above_zero(means: np.ndarray) -> float:
    """Ties count half: two equal models get .5, and exchanging a and b gives the complement."""
    return float((means > ROUNDING).mean() + (np.abs(means) <= ROUNDING).mean() / 2)
