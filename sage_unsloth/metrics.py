"""pass@k and its uncertainty, as pure functions of how many samples of each problem are correct.

The intervals resample *problems*, not samples: with 40 to 500 problems, the choice of problems is
the largest part of the uncertainty, and more samples per problem do not reduce it.
"""

from dataclasses import dataclass

import numpy as np

RESAMPLED_AT_ONCE = 1_000_000  # values in memory


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its bootstrap interval, in the unit of the values."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean difference a - b over the same problems; how often resampled problems favour a."""

    share_above_zero: float


def pass_at_k(num_samples, num_correct, k):
    r"""The chance that k of the samples, drawn without replacement, include a correct one.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - \prod_{j<k} (n - c - j) / (n - j), the unbiased
    estimator of Chen et al. (2021, arXiv:2107.03374). The product is exact to rounding at any n,
    and exactly 0 or 1 where the answer is.

    Args:
        num_samples: n, samples per problem; an integer or an array of them, as are the next two.
        num_correct: c, correct samples among the n.
        k: how many are drawn.

    Returns:
        A float, or a float64 array of the shape to which the three broadcast.

    Raises:
        ValueError: not integers, or not 1 <= k <= n and 0 <= c <= n.
    """
    n, c, k = np.broadcast_arrays(*(np.asarray(value) for value in (num_samples, num_correct, k)))
    for name, value in (("num_samples", n), ("num_correct", c), ("k", k)):
        if not np.issubdtype(value.dtype, np.integer):
            raise ValueError(f"{name} must be integers because they are counts; got {value.dtype}")
    _refuse((k < 1) | (k > n), "k must be between 1 and num_samples", n, c, k)
    _refuse((c < 0) | (c > n), "num_correct must be between 0 and num_samples", n, c, k)
    all_wrong = np.ones(n.shape)
    for j in range(k.max(initial=0)):
        factor = (n - c - j) / np.maximum(n - j, 1)  # after a factor of 0 the product stays 0
        all_wrong = all_wrong * np.where(j < k, factor, 1.0)
    return 1.0 - all_wrong if n.ndim else float(1.0 - all_wrong)


def _refuse(broken: np.ndarray, rule: str, n: np.ndarray, c: np.ndarray, k: np.ndarray) -> None:
    if broken.any():
        first = tuple(np.argwhere(broken)[0])
        raise ValueError(
            f"{rule}; got num_samples={n[first]}, num_correct={c[first]}, k={k[first]}"
        )


def pass_at_k_interval(
    num_samples, num_correct, k: int, *, confidence: float = 0.95, resamples: int = 10_000, seed=0
) -> Estimate:
    """The mean pass@k over problems, with a percentile bootstrap over problems (Efron, 1979).

    Args:
        num_samples: (P,) samples per problem, or one number for all.
        num_correct: (P,) correct samples.
        k: how many samples are drawn per problem.
        confidence: the share of resampled means between `low` and `high`.
        resamples: how often P problems are drawn with replacement.
        seed: of the drawing; equal seeds and P draw the same problems.

    Raises:
        ValueError: as `pass_at_k`; no problems, or more than one axis; `confidence` not in (0, 1).
    """
    values = _per_problem(num_samples, num_correct, k)
    return Estimate(
        *_mean_and_interval(values, _resampled_means(values, resamples, seed), confidence)
    )


def paired_difference(
    num_samples_a,
    num_correct_a,
    num_samples_b,
    num_correct_b,
    k: int,
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed=0,
) -> Difference:
    """The mean of pass@k of model a minus that of model b on the *same* problems, in one order.

    Both models keep their results on a resampled problem, so what makes a problem hard for both
    cancels. Arguments as in `pass_at_k_interval`, twice.

    Raises:
        ValueError: as `pass_at_k_interval`; or the models have different numbers of problems.
    """
    values_a = _per_problem(num_samples_a, num_correct_a, k)
    values_b = _per_problem(num_samples_b, num_correct_b, k)
    if values_a.shape != values_b.shape:
        raise ValueError(
            "both models must have the same problems because they are compared one by one; "
            f"got {values_a.size} and {values_b.size} problems"
        )
    values = values_a - values_b
    means = _resampled_means(values, resamples, seed)
    interval = _mean_and_interval(values, means, confidence)
    return Difference(*interval, share_above_zero=float((means > 0).mean()))


def _per_problem(num_samples, num_correct, k: int) -> np.ndarray:
    values = np.asarray(pass_at_k(num_samples, num_correct, k))
    if values.ndim != 1 or values.size == 0:
        raise ValueError(
            "the counts must have one axis of at least one problem, because problems are "
            f"resampled; got the shape {values.shape}"
        )
    return values


def _resampled_means(values_P: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """(resamples,) means of P values drawn with replacement, drawn in chunks of bounded memory."""
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1; got {resamples}")
    generator = np.random.default_rng(seed)
    chunk = max(1, RESAMPLED_AT_ONCE // values_P.size)
    return np.concatenate(
        [
            values_P[generator.integers(values_P.size, size=(rows, values_P.size))].mean(axis=1)
            for start in range(0, resamples, chunk)
            for rows in [min(chunk, resamples - start)]
        ]
    )


def _mean_and_interval(values, means, confidence: float) -> tuple[float, float, float]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), as .95 is; got {confidence}")
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(values.mean()), float(low), float(high)
