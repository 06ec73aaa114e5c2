"""pass@k and its uncertainty, as pure functions of how many samples of each problem are correct.

The intervals resample *problems*, not samples: with 40 to 500 problems, the choice of problems is
the largest part of the uncertainty, and more samples per problem do not reduce it.

`scipy.stats.bootstrap` does not serve here: problems and training seeds are crossed, and every k
and both models of a difference must see the same resamples; it also draws others, so that no figure
that is committed could be computed again.

Shapes: P problems, S training seeds of one model, K values of k, R resamples; N values in a row.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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


def powers_of_two(num_samples: int) -> list[int]:
    """The ks of a curve: 1, 2, 4 and so on, and n itself."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return list(dict.fromkeys([*powers, num_samples]))


def pass_at_k_curve(
    num_samples,
    num_correct,
    ks: Iterable[int],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[int, Estimate]:
    """The mean pass@k over problems for every k, with percentile bootstrap intervals (Efron, 1979).

    The problems are resampled and, where there are several training seeds, these too, independently
    of the problems; every k sees the same resamples. The values of a problem carry the noise of its
    n samples, so the interval covers it. With S seeds the share of the variance that is due to them
    comes out (S - 1) / S of its size: three seeds are few.

    Args:
        num_samples: n, (P,) samples per problem, or one number for all; or (S, P).
        num_correct: c, (P,) correct samples; or (S, P), a row for each training seed of one method.
        ks: how many samples are drawn per problem.
        confidence: the share of resampled means between `low` and `high`.
        resamples: how often P problems are drawn with replacement.
        seed: of the drawing; equal seeds and P draw the same problems.

    Raises:
        ValueError: as `pass_at_k`; no problems, or more than two axes; `confidence` not in (0, 1).
    """
    values_KSP, ks = _per_problem(num_samples, num_correct, ks)
    means_KR = resampled_means(values_KSP, resamples, seed, 0)
    return {
        k: Estimate(*_mean_and_interval(values.mean(), means, confidence))
        for k, values, means in zip(ks, values_KSP, means_KR, strict=True)
    }


def pass_at_k_interval(num_samples, num_correct, k: int, **options) -> Estimate:
    """`pass_at_k_curve` at one k."""
    return pass_at_k_curve(num_samples, num_correct, [k], **options)[k]


def difference_curve(
    num_samples_a,
    num_correct_a,
    num_samples_b,
    num_correct_b,
    ks: Iterable[int],
    *,
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[int, Difference]:
    """The mean pass@k of model a minus that of model b on the *same* problems, for every k.

    Both models keep their results on a resampled problem, so what makes a problem hard for both
    cancels. Training seeds are resampled for each model by itself. Arguments as in
    `pass_at_k_curve`, twice; the problems in one order.

    Raises:
        ValueError: as `pass_at_k_curve`; or the models have different numbers of problems.
    """
    values_a_KSP, ks = _per_problem(num_samples_a, num_correct_a, ks)
    values_b_KSP, _ = _per_problem(num_samples_b, num_correct_b, ks)
    if values_a_KSP.shape[2] != values_b_KSP.shape[2]:
        raise ValueError(
            "both models must have the same problems because they are compared one by one; "
            f"got {values_a_KSP.shape[2]} and {values_b_KSP.shape[2]} problems"
        )
    means_KR = resampled_means(values_a_KSP, resamples, seed, 0)
    means_KR -= resampled_means(values_b_KSP, resamples, seed, 1)
    result = {}
    for k, a, b, means in zip(ks, values_a_KSP, values_b_KSP, means_KR, strict=True):
        interval = _mean_and_interval(a.mean() - b.mean(), means, confidence)
        # Differences that cancel leave rounding errors of either sign.
        result[k] = Difference(*interval, share_above_zero=_share_above_zero(means))
    return result


def paired_difference(
    num_samples_a, num_correct_a, num_samples_b, num_correct_b, k: int, **options
) -> Difference:
    """`difference_curve` at one k."""
    counts = (num_samples_a, num_correct_a, num_samples_b, num_correct_b)
    return difference_curve(*counts, [k], **options)[k]


def mean_interval(
    values_P, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Estimate:
    """The mean of one value for each problem, (P,), with the interval of `pass_at_k_curve`.

    Raises:
        ValueError: not (P,) finite values with P >= 1; `confidence` not in (0, 1).
    """
    values_P = _finite_values(values_P)
    means = resampled_means(values_P[None, None], resamples, seed, 0)[0]
    return Estimate(*_mean_and_interval(values_P.mean(), means, confidence))


def mean_difference(
    values_a_P, values_b_P, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Difference:
    """The mean of a − b over the same problems in one order, each (P,), as `difference_curve`.

    Raises:
        ValueError: as `mean_interval`; or the numbers of problems differ.
    """
    values_a_P, values_b_P = _finite_values(values_a_P), _finite_values(values_b_P)
    if values_a_P.shape != values_b_P.shape:
        raise ValueError(
            "both models must have the same problems because they are compared one by one; "
            f"got {values_a_P.size} and {values_b_P.size} values"
        )
    means = resampled_means((values_a_P - values_b_P)[None, None], resamples, seed, 0)[0]
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

    Successive optimizer steps resemble each other, so values resampled one by one would give
    intervals that are too narrow: blocks of neighbours are drawn instead, the last value being a
    neighbour of the first (Politis and Romano, 1992). It is about the steps of this run, and says
    nothing about another run.

    Args:
        values_N: (N,), in order.
        block: neighbours in a block; None takes ⌈N^(1/3)⌉, and 1 is the ordinary bootstrap.
        confidence, resamples, seed: as in `pass_at_k_curve`.

    Returns:
        Of one value no interval, `low` and `high` nan: it says nothing about how values differ.

    Raises:
        ValueError: as `mean_interval`; or not 1 <= block <= N.
    """
    values_N = _finite_values(values_N)
    count = values_N.size
    block = math.ceil(round(count ** (1 / 3), 9)) if block is None else block
    if not 1 <= block <= count:
        raise ValueError(f"block must be between 1 and the {count} values; got {block}")
    if count == 1:
        return Estimate(float(values_N[0]), math.nan, math.nan)
    blocks = -(-count // block)
    starts_RB = np.random.default_rng(seed).integers(count, size=(resamples, blocks))
    places = (starts_RB[:, :, None] + np.arange(block)) % count
    means = values_N[places.reshape(resamples, -1)[:, :count]].mean(axis=1)
    return Estimate(*_mean_and_interval(values_N.mean(), means, confidence))


def mean_and_deviation(values_S) -> tuple[float, float]:
    """Mean and sample standard deviation over S >= 2 training seeds: what papers print as ±.

    It says how much a result moves with the seed on *these* problems, and nothing about other
    problems.
    """
    values_S = np.asarray(values_S, dtype=float)
    if values_S.ndim != 1 or values_S.size < 2:
        raise ValueError(
            f"a deviation needs the values of at least two seeds; got the shape {values_S.shape}"
        )
    return float(values_S.mean()), float(values_S.std(ddof=1))


def solved_only_by(num_correct: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """For each model, which problems it alone solved at least once.

    Args:
        num_correct: model -> correct samples of each problem, (P,).

    Returns:
        model -> (P,) bool.
    """
    solved = {name: np.asarray(counts) > 0 for name, counts in num_correct.items()}
    times = np.sum(list(solved.values()), axis=0)
    return {name: mine & (times == 1) for name, mine in solved.items()}


def _finite_values(values) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 1 or values.size == 0 or not np.isfinite(values).all():
        raise ValueError(
            "an interval needs one finite value for each problem or step, at least one; got the "
            f"shape {values.shape} with {int((~np.isfinite(values)).sum())} that are not finite"
        )
    return values


def _per_problem(num_samples, num_correct, ks: Iterable[int]) -> tuple[np.ndarray, list[int]]:
    """pass@k of every k, seed and problem, (K, S, P), and the list of the ks."""
    ks = list(ks)
    values = [np.asarray(pass_at_k(num_samples, num_correct, k)) for k in ks]
    shape = values[0].shape if values else ()
    if len(shape) not in (1, 2) or 0 in shape:
        raise ValueError(
            "the counts must have one axis of at least one problem, or one of seeds before it, "
            "because problems and seeds are resampled, and there must be a k; got the shape "
            f"{shape} and ks={ks}"
        )
    stacked = np.stack(values)
    return stacked.reshape(len(ks), -1, stacked.shape[-1]), ks


def resampled_means(values_KSP: np.ndarray, resamples: int, seed: int, stream: int) -> np.ndarray:
    """Means over P problems, and S seeds, drawn with replacement; in chunks of bounded memory.

    Args:
        values_KSP: (K, S, P).
        resamples: R.
        seed: of the drawing; with R and P it decides which problems are drawn.
        stream: decides with the seed which training seeds are drawn; each model has its own.

    Returns:
        (K, R).
    """
    if resamples < 1:
        raise ValueError(f"resamples must be >= 1; got {resamples}")
    num_seeds, num_problems = values_KSP.shape[1:]
    problems = np.random.default_rng(seed)
    chunk = max(1, RESAMPLED_AT_ONCE // num_problems)
    means_KSR = np.empty((*values_KSP.shape[:2], resamples))
    for start in range(0, resamples, chunk):
        rows = slice(start, min(start + chunk, resamples))
        drawn_RP = problems.integers(num_problems, size=(rows.stop - start, num_problems))
        for number, values_SP in enumerate(values_KSP):
            for turn, values_P in enumerate(values_SP):
                means_KSR[number, turn, rows] = values_P[drawn_RP].mean(axis=1)
    if num_seeds == 1:
        return means_KSR[:, 0]
    seeds = np.random.default_rng([seed, stream])
    drawn_SR = seeds.integers(num_seeds, size=(num_seeds, resamples))
    return means_KSR[:, drawn_SR, np.arange(resamples)].mean(axis=1)


def _mean_and_interval(mean, means, confidence: float) -> tuple[float, float, float]:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), as .95 is; got {confidence}")
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(mean), float(low), float(high)


def _share_above_zero(means: np.ndarray) -> float:
    """Ties count half, so that two equal models get .5, and a and b exchanged the complement."""
    return float((means > 1e-12).mean() + (np.abs(means) <= 1e-12).mean() / 2)
