"""A method's line in the plane of pass@1 and pass@k, and the area below a curve of pass@k.

Shapes: L strengths of a method in ascending order, S training seeds, P problems, R resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Kept:
    """What a method keeps at a level of pass@1.

    Attributes:
        mean: pass@k where the line has that pass@1; None where it does not reach it.
        low, high: 95 % of the resamples that reach it; None where fewer than `RELIABLE` do.
        difference, difference_low, difference_high: the same, minus the SFT model's pass@k.
        reached: share of the resamples in which the line reaches the level.
    """

    mean: float | None
    low: float | None
    high: float | None
    difference: float | None
    difference_low: float | None
    difference_high: float | None
    reached: float


RELIABLE = 0.5  # share of the resamples that an interval is made from, at least


def kept_at(level, first_L, many_L):
    """pass@k where the line through a method's strengths last has pass@1 of `level` or more.

    The line joins (pass@1, pass@k) of neighbouring strengths. It is followed from the greatest
    strength down to the first pass@1 >= `level`, and interpolated on the way there; so it is the
    greatest strength, between the trained ones too, that still has the level.

    Args:
        level: of pass@1; a number, or (…) for many resamples.
        first_L, many_L: (…, L) pass@1 and pass@k by ascending strength.

    Returns:
        (…) pass@k; nan where no strength has the level.
    """
    first_L, many_L = np.asarray(first_L, float), np.asarray(many_L, float)
    level = np.asarray(level, float)
    reached_L = first_L >= level[..., None]
    count = first_L.shape[-1]
    last = count - 1 - np.argmax(reached_L[..., ::-1], axis=-1)
    after = np.minimum(last + 1, count - 1)

    def at(values, place):
        return np.take_along_axis(values, place[..., None], axis=-1)[..., 0]

    left, right = at(first_L, last), at(first_L, after)
    drop = np.where(left > right, left - right, 1.0)
    share = np.where(after > last, (left - level) / drop, 0.0)
    value = at(many_L, last) + share * (at(many_L, after) - at(many_L, last))
    return np.where(reached_L.any(axis=-1), value, np.nan)


def above_line(first, many, first_L, many_L):
    """pass@k of a point minus that of a method's line at the point's pass@1: whether it lies on the
    same line further back, or above it.

    Where the point's pass@1 is beyond an end of the line, the strength there counts.

    Args:
        first, many: (…) pass@1 and pass@k of the point.
        first_L, many_L: (…, L) of the line, by ascending strength.

    Returns:
        (…) differences.
    """
    highest = np.asarray(first_L, float).max(axis=-1)
    return np.asarray(many, float) - kept_at(np.minimum(first, highest), first_L, many_L)


def resampled(
    tables: Mapping[str, np.ndarray], once: Sequence[str], resamples: int = 2000, seed: int = 0
) -> dict[str, np.ndarray]:
    """Means over seeds and problems that are drawn anew, independently, for all tables at once.

    The bootstrap of two crossed factors (Owen, 2007, the pigeonhole bootstrap): rows and columns of
    (S, P) are drawn with replacement, the same ones for every table, so that differences stay
    paired.

    Args:
        tables: name -> (S, P).
        once: names whose rows are one and the same model: their seeds are not drawn.
        resamples, seed: how often is drawn; equal seeds draw the same.

    Returns:
        name -> (R,).
    """
    generator = np.random.default_rng(seed)
    seeds, problems = next(iter(tables.values())).shape
    weights_RS = generator.multinomial(seeds, np.full(seeds, 1 / seeds), resamples) / seeds
    shares = np.full(problems, 1 / problems)
    weights_RP = generator.multinomial(problems, shares, resamples) / problems
    return {
        name: weights_RP @ table[0]
        if name in once
        else ((weights_RS @ table) * weights_RP).sum(axis=1)
        for name, table in tables.items()
    }


def kept(
    level: float,
    levels_R: np.ndarray,
    line: tuple[np.ndarray, np.ndarray],
    lines_R: tuple[np.ndarray, np.ndarray],
    sft: float,
    sft_R: np.ndarray,
) -> Kept:
    """`kept_at` with its interval.

    Args:
        level, levels_R: of pass@1: the estimate, and that of each resample, (R,).
        line, lines_R: pass@1 and pass@k of the strengths, (L,) each, and (R, L) each.
        sft, sft_R: the SFT model's pass@k.
    """
    value, values_R = float(kept_at(level, *line)), kept_at(levels_R, *lines_R)
    result = np.isfinite(values_R)
    mean = value if np.isfinite(value) else None
    ends: list[float | None] = [None] * 4
    if mean is not None and result.mean() >= RELIABLE:
        ends = [
            float(end)
            for values in (values_R[result], (values_R - sft_R)[result])
            for end in np.quantile(values, (0.025, 0.975))
        ]
    difference = None if mean is None else mean - sft
    return Kept(mean, ends[0], ends[1], difference, ends[2], ends[3], float(result.mean()))


def area(pass_at, ks: Sequence[int]) -> np.ndarray:
    """The mean of pass@k over log k: the area below the curve between the first k and the last,
    by trapezes, over the width.

    Args:
        pass_at: (K, …) pass@k.
        ks: the K values of k, ascending.
    """
    logs, pass_at = np.log(np.asarray(ks, float)), np.asarray(pass_at, float)
    if len(ks) == 1:
        return pass_at[0]
    return np.trapezoid(pass_at, logs, axis=0) / (logs[-1] - logs[0])
