"""Intervals over S training seeds and P problems at once, and the power of a design.

Every training seed meets every problem, so a table of values (S, P) has two sources of chance at
once: other seeds would have given other rows, other problems other columns. With eight seeds a
bootstrap over seeds is too narrow (it has (S - 1)/S of the variance and no heavier tails), so these
intervals are Student's, from the mean squares of the two-way layout.

Shapes: S seeds, P problems.
"""

import math
from dataclasses import dataclass

import numpy as np

from sage_unsloth.evaluation.intervals import Estimate, mean_squares, student_quantile


@dataclass(frozen=True)
class CrossedEstimate(Estimate):
    """A mean with its interval over seeds and problems, standard error, degrees of freedom."""

    error: float
    freedom: float


@dataclass(frozen=True)
class Components:
    """Variances of one value: of its `seed` (row), its `problem` (column), and the `rest`."""

    seed: float
    problem: float
    rest: float


def crossed_interval(values_SP, *, confidence: float = 0.95) -> CrossedEstimate:
    """The mean of values (S, P), with an interval for other seeds *and* other problems.

    With the mean squares of rows M_s, columns M_p and the rest M_e, the variance of the mean is
    estimated by (M_s + M_p − M_e) / (S P), the unbiased estimator of the two-way random-effects
    layout, but never below what either source gives alone, M_s / (S P) or M_p / (S P). Degrees of
    freedom are Satterthwaite's. One seed leaves problems as the only source, one problem leaves
    seeds.

    For a paired difference, pass the table of differences.

    Raises:
        ValueError: not (S, P) of finite values with at least two of them; `confidence` not in (0,
            1).
    """
    values_SP = _table(values_SP)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be in (0, 1), as .95 is, got {confidence}")
    seeds, problems = values_SP.shape
    rows, columns, rest = mean_squares(values_SP)
    alone = [(m, size - 1) for m, size in ((rows, seeds), (columns, problems)) if size > 1]
    variance, freedom = max(alone)
    both = rows + columns - rest
    if len(alone) == 2 and both > variance:
        variance = both
        freedom = both**2 / (
            rows**2 / (seeds - 1)
            + columns**2 / (problems - 1)
            + rest**2 / ((seeds - 1) * (problems - 1))
        )
    error = math.sqrt(variance / values_SP.size)
    half = student_quantile((1 + confidence) / 2, freedom) * error
    mean = float(values_SP.mean())
    return CrossedEstimate(mean, mean - half, mean + half, error, float(freedom))


def components(values_SP) -> Components:
    """The variance components of a pilot's table (S, P), S and P >= 2; negative ones become 0.

    Raises:
        ValueError: as `crossed_interval`; or a single seed or problem.
    """
    values_SP = _table(values_SP)
    seeds, problems = values_SP.shape
    if min(seeds, problems) < 2:
        raise ValueError(
            f"variances of seeds and of problems need two of each, got the shape {values_SP.shape}"
        )
    rows, columns, rest = mean_squares(values_SP)
    return Components(
        seed=max(0.0, (rows - rest) / problems),
        problem=max(0.0, (columns - rest) / seeds),
        rest=rest,
    )


def detectable_difference(
    result: Components, seeds: int, problems: int, *, power: float = 0.8, confidence: float = 0.95
) -> float:
    """The smallest true difference that a design of S >= 2 seeds and P problems finds.

    Its interval leaves out 0 in a share `power` of all such benchmarks:

        (t_{(1+confidence)/2} + t_{power}) · √(σ_s²/S + σ_p²/P + σ_e²/(S P))

    with S − 1 degrees of freedom: on the safe side, since problems bring more.

    Raises:
        ValueError: fewer seeds or problems.
    """
    if seeds < 2 or problems < 1:
        raise ValueError(f"power needs seeds >= 2 and problems >= 1, got {seeds} and {problems}")
    error = math.sqrt(
        result.seed / seeds + result.problem / problems + result.rest / (seeds * problems)
    )
    quantiles = (student_quantile(p, seeds - 1) for p in ((1 + confidence) / 2, power))
    return sum(quantiles) * error


def _table(values_SP) -> np.ndarray:
    values_SP = np.asarray(values_SP, dtype=float)
    if values_SP.ndim != 2 or values_SP.size < 2 or not np.isfinite(values_SP).all():
        raise ValueError(
            "an interval needs a table (seeds, problems) of at least two finite values, got the "
            f"shape {values_SP.shape} with {int((~np.isfinite(values_SP)).sum())} that are not "
            "finite"
        )
    return values_SP
