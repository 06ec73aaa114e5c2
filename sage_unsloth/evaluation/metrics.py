"""pass@k and its uncertainty, as pure functions of the number of correct samples.

Shapes: P problems, S training seeds of one model, K values of k.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sage_unsloth.evaluation.intervals import (
    Difference,
    Estimate,
    paired_interval,
    score_interval,
)


def pass_at_k(num_samples, num_correct, k):
    r"""The chance that k of the samples, chosen without replacement, include a correct one.

    pass@k = 1 - C(n - c, k) / C(n, k) = 1 - \prod_{j<k} (n - c - j) / (n - j), the unbiased
    estimator of Chen et al. (2021, arXiv:2107.03374). The product is exact to rounding at any n,
    and exactly 0 or 1 if the value is.

    Args:
        num_samples: n, samples per problem; an integer or an array, as are the next two.
        num_correct: c, correct samples among the n.
        k: number of chosen samples.

    Returns:
        A float, or a float64 array of the broadcast shape.

    Raises:
        ValueError: not integers, or not 1 <= k <= n and 0 <= c <= n.
    """
    n, c, k = np.broadcast_arrays(*(np.asarray(value) for value in (num_samples, num_correct, k)))
    for name, value in (("num_samples", n), ("num_correct", c), ("k", k)):
        if not np.issubdtype(value.dtype, np.integer):
            raise ValueError(f"{name} must be integers because they are counts, got {value.dtype}")
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
            f"{rule}, got num_samples={n[first]}, num_correct={c[first]}, k={k[first]}"
        )


def guess_bound(chances_P: np.ndarray, k: int) -> np.ndarray:
    """(P,) the chance that k blind attempts include a correct one, 1 − (1 − p)^k."""
    return 1 - (1 - chances_P) ** k


def powers_of_two(num_samples: int) -> list[int]:
    """The ks of a curve: 1, 2, 4 and so on, and n itself."""
    powers = [2**i for i in range(num_samples.bit_length())]
    return list(dict.fromkeys([*powers, num_samples]))


def pass_at_k_curve(
    num_samples, num_correct, ks: Iterable[int], *, confidence: float = 0.95
) -> dict[int, Estimate]:
    """The mean pass@k over problems for every k, each with its `intervals.score_interval`.

    The interval covers the noise of the n samples of each problem. With one training seed it says
    nothing about another seed.

    Args:
        num_samples: n, (P,) samples per problem, or one number for all; or (S, P).
        num_correct: c, (P,) correct samples; or (S, P), a row for each training seed of one method.

    Raises:
        ValueError: as `pass_at_k`; no problems, or more than two axes; `confidence` not in (0, 1).
    """
    values_KSP, ks = _per_problem(num_samples, num_correct, ks)
    return {
        k: score_interval(values_SP, confidence)
        for k, values_SP in zip(ks, values_KSP, strict=True)
    }


def pass_at_k_interval(num_samples, num_correct, k: int, *, confidence: float = 0.95) -> Estimate:
    """`pass_at_k_curve` at one k."""
    return pass_at_k_curve(num_samples, num_correct, [k], confidence=confidence)[k]


def difference_curve(
    num_samples_a,
    num_correct_a,
    num_samples_b,
    num_correct_b,
    ks: Iterable[int],
    *,
    confidence: float = 0.95,
) -> dict[int, Difference]:
    """The mean pass@k of model a minus that of model b on the *same* problems, for every k.

    The common difficulty of a problem cancels (`intervals.paired_interval`). Arguments as in
    `pass_at_k_curve`, twice; the problems in one order.

    Raises:
        ValueError: as `pass_at_k_curve`; or different numbers of problems.
    """
    values_a_KSP, ks = _per_problem(num_samples_a, num_correct_a, ks)
    values_b_KSP, _ = _per_problem(num_samples_b, num_correct_b, ks)
    return {
        k: paired_interval(a_SP, b_SP, confidence)
        for k, a_SP, b_SP in zip(ks, values_a_KSP, values_b_KSP, strict=True)
    }


def paired_difference(
    num_samples_a,
    num_correct_a,
    num_samples_b,
    num_correct_b,
    k: int,
    *,
    confidence: float = 0.95,
) -> Difference:
    """`difference_curve` at one k."""
    counts = (num_samples_a, num_correct_a, num_samples_b, num_correct_b)
    return difference_curve(*counts, [k], confidence=confidence)[k]


def mean_and_deviation(values_S) -> tuple[float, float]:
    """Mean and sample standard deviation over S >= 2 training seeds: the ± of papers.

    It shows the variation between seeds on *these* problems, not on others.
    """
    values_S = np.asarray(values_S, dtype=float)
    if values_S.ndim != 1 or values_S.size < 2:
        raise ValueError(
            f"a deviation needs the values of at least two seeds, got the shape {values_S.shape}"
        )
    return float(values_S.mean()), float(values_S.std(ddof=1))


def unique_solutions(num_correct: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """model -> (P,) bool: problems that only this model solved at least once.

    Args:
        num_correct: model -> correct samples of each problem, (P,).
    """
    solved = {name: np.asarray(counts) > 0 for name, counts in num_correct.items()}
    times = np.sum(list(solved.values()), axis=0)
    return {name: mine & (times == 1) for name, mine in solved.items()}


def _per_problem(num_samples, num_correct, ks: Iterable[int]) -> tuple[np.ndarray, list[int]]:
    """pass@k of every k, seed and problem, (K, S, P), and the ks."""
    ks = list(ks)
    values = [np.asarray(pass_at_k(num_samples, num_correct, k)) for k in ks]
    shape = values[0].shape if values else ()
    if len(shape) not in (1, 2) or 0 in shape:
        raise ValueError(
            "the counts must have the shape (problems,) or (seeds, problems), and there must be a "
            f"k, got the shape {shape} and ks={ks}"
        )
    stacked = np.stack(values)
    return stacked.reshape(len(ks), -1, stacked.shape[-1]), ks
