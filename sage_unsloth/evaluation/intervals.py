r"""Confidence intervals of a mean over problems, and of a difference of two such means.

What is uncertain is which problems were asked (and, with several training seeds, which seeds), not
how many samples each got: with 40 to 500 problems the choice of problems is the largest part, and
more samples per problem do not reduce it. Both intervals are in closed form.

The percentile bootstrap over problems, the usual choice, cannot draw what it has not seen: of 30
problems that are all solved it says "1 ± 0", though the next 30 may have one that is not. So each
interval here leaves room for a problem that was not among those asked; how often both cover the
truth is measured by `python -m research.coverage`.

Shapes: P problems, S training seeds of one model. Values are in [0, 1].
"""

from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

# Problems' worth of binomial spread that a mean's dispersion starts from, and of differing fully
# that the size of a difference starts from. The smallest that keep every simulated case of
# `research.coverage` at 93 %; larger ones widen intervals that were right.
PRIOR_DISPERSION = 0.15
PRIOR_SIZE = 0.5


@dataclass(frozen=True)
class Estimate:
    """A mean over problems with its interval, in the unit of the values."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """A mean difference a - b over the same problems.

    Attributes:
        share_above_zero: share of the difference's t distribution above 0; .5 for two equal models,
            and the complement if a and b are exchanged.
    """

    share_above_zero: float


def score_interval(values_SP: np.ndarray, confidence: float = 0.95) -> Estimate:
    r"""The mean of values in [0, 1] over problems, with a score interval.

    Wilson's interval (1927) solves (m − μ)² = q² μ (1 − μ) / P for μ, m the mean of P coin flips
    and q the quantile. Values between 0 and 1 vary less than coin flips, by the dispersion

        ρ = (P² V + c) / (P m (1 − m) + c),   c = `PRIOR_DISPERSION`,

    V the estimated variance of m (`variance_of_mean`; its part from the problems at most that of
    coin flips), and so μ (1 − μ) is multiplied by ρ. Where all values are 0, or all are 1, nothing
    was measured of ρ, and it is 1: the interval is Wilson's. q is Student's t at the degrees of
    freedom of V.

    Args:
        values_SP: (S, P), a row for each training seed.
        confidence: in (0, 1).

    Raises:
        ValueError: `confidence` is not in (0, 1), or a value is not in [0, 1].
    """
    values_SP = np.asarray(values_SP, dtype=float)
    if not ((values_SP >= 0) & (values_SP <= 1)).all():
        raise ValueError(
            f"a score interval needs values in [0, 1], as pass@k is, got {values_SP.min():g} to "
            f"{values_SP.max():g}"
        )
    problems, mean = values_SP.shape[1], float(values_SP.mean())
    flips = mean * (1 - mean)
    of_problems, of_seeds = variance_of_mean(values_SP)
    # One problem says nothing of how problems vary.
    of_problems = min(of_problems, flips / problems) if problems > 1 else flips
    dispersion = problems**2 * (of_problems + of_seeds) + PRIOR_DISPERSION
    dispersion /= problems * flips + PRIOR_DISPERSION
    degrees = _degrees([(of_problems, problems), (of_seeds, len(values_SP))])
    room = student_quantile(_upper(confidence), degrees) ** 2 * dispersion / problems
    middle, half = mean + room / 2, np.sqrt(room * flips + room**2 / 4)
    # Rounding may put the ends past the mean, or past 0 and 1, by one part in 1e16.
    low, high = ((middle + sign * half) / (1 + room) for sign in (-1, 1))
    return Estimate(mean, float(min(max(low, 0), mean)), float(max(min(high, 1), mean)))


def paired_interval(
    values_a_SP: np.ndarray, values_b_SP: np.ndarray, confidence: float = 0.95
) -> Difference:
    r"""The mean of a − b over the same problems, with a t interval that expects one problem more.

    With d_p the difference on problem p, m their mean and D² = Σ_p (d_p − m)²,

        m ± t √((D² + s²) / (P (P − 1)) + V_a + V_b),

    as if one more problem had been asked, with a difference of size s. s is the usual size Σe² /
    Σ|e| of the deviations e_p from the median difference, pulled to 1 by `PRIOR_SIZE` problems:
    s = (N Σe² / Σ|e| + c) / (N + c), with N = (Σ|e|)² / Σe², the number of problems that differ.
    Where no problem differs, s = 1, and the interval is about that of Agresti and Min (2005) for
    paired proportions. V_a and V_b are the variances from the training seeds, which the models do
    not share. The interval ends at −1 and 1.

    Args:
        values_a_SP, values_b_SP: (S, P) of each model, in [0, 1]; S may differ.
        confidence: in (0, 1).

    Raises:
        ValueError: the numbers of problems differ, or `confidence` is not in (0, 1).
    """
    values_a_SP, values_b_SP = (np.asarray(v, dtype=float) for v in (values_a_SP, values_b_SP))
    problems = values_a_SP.shape[1]
    if problems != values_b_SP.shape[1]:
        raise ValueError(
            f"both models must have the same problems, got {problems} and {values_b_SP.shape[1]} "
            "problems"
        )
    differences_P = values_a_SP.mean(axis=0) - values_b_SP.mean(axis=0)
    mean = float(differences_P.mean())
    squares = ((differences_P - mean) ** 2).sum() + _usual_size(differences_P) ** 2
    of_problems = squares / (problems * max(problems - 1, 1))
    parts = [(of_problems, problems)]
    parts += [(variance_of_mean(v)[1], len(v)) for v in (values_a_SP, values_b_SP)]
    error = float(np.sqrt(sum(variance for variance, _ in parts)))
    degrees = _degrees(parts)
    half = student_quantile(_upper(confidence), degrees) * error
    above = float(student.cdf(mean / error, degrees))
    return Difference(mean, max(mean - half, -1.0), min(mean + half, 1.0), above)


def variance_of_mean(values_SP: np.ndarray) -> tuple[float, float]:
    """The variance of the mean that is due to problems, and that due to seeds.

    Problems and seeds are crossed and both sampled, so with the mean squares of the two-way layout
    the first is M_p / (S P), and the second (M_s − M_e) / (S P), at least 0. One seed, or one
    problem, says nothing about others: 0.
    """
    by_seed, by_problem, rest = mean_squares(values_SP)
    return by_problem / values_SP.size, max(by_seed - rest, 0.0) / values_SP.size


def mean_squares(values_SP: np.ndarray) -> tuple[float, float, float]:
    """Of seeds M_s, problems M_p and the rest M_e; 0 for an axis of length 1."""
    seeds, problems = values_SP.shape
    mean = values_SP.mean()
    by_seed, by_problem = values_SP.mean(axis=1) - mean, values_SP.mean(axis=0) - mean
    rest = values_SP - mean - by_seed[:, None] - by_problem
    return (
        problems * float((by_seed**2).sum()) / max(1, seeds - 1),
        seeds * float((by_problem**2).sum()) / max(1, problems - 1),
        float((rest**2).sum()) / max(1, (seeds - 1) * (problems - 1)),
    )


def _usual_size(differences_P: np.ndarray) -> float:
    """The usual size of a non-zero difference; see `paired_interval`."""
    deviations_P = np.abs(differences_P - np.median(differences_P))
    total, squares = deviations_P.sum(), (deviations_P**2).sum()
    if not squares:
        return 1.0
    differing = total**2 / squares
    return float((differing * squares / total + PRIOR_SIZE) / (differing + PRIOR_SIZE))


def _degrees(parts: list[tuple[float, int]]) -> float:
    """Degrees of freedom (Welch, Satterthwaite) of a sum of (variance, number of samples)."""
    total = sum(variance for variance, _ in parts)
    if not total:
        return max(parts[0][1] - 1, 1)
    return total**2 / sum(variance**2 / max(draws - 1, 1) for variance, draws in parts)


def _upper(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), as .95 is, got {confidence}")
    return (1 + confidence) / 2


def student_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t, for any real number of degrees of freedom > 0.

    Raises:
        ValueError: not 0.5 <= probability < 1, or freedom <= 0.
    """
    if not 0.5 <= probability < 1 or not freedom > 0:
        raise ValueError(
            f"probability must be in [.5, 1) and freedom > 0, got {probability} and {freedom}"
        )
    return float(student.ppf(probability, freedom))
