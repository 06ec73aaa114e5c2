"""What somebody solves who never looks at the problem: from which k on pass@k says nothing.

Of countdown's twelve workings one or two reach the target, so k blind attempts solve
1 − (1 − 1/12)^k of the problems: .50 at k = 8 and .94 at k = 32. A model that answers more widely
is then "better" at k = 32 without being able to do more. A frontier gives no verdict at such a k.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from research.problems import countdown
from sage_unsloth.problems import arithmetic

LARGEST_SHARE = 0.8
"""Of the start model's pass@k: from there on guessing explains too much of it for a verdict."""


def blind_arithmetic(problem_id: str) -> float:
    """The chance of answering with the product of another problem, drawn at random."""
    pair = problem_id.removeprefix("arithmetic-").removesuffix("-swapped")
    number, factor = map(int, pair.split("x"))
    products = _products()
    return products[number * factor] / products.total()


@functools.cache
def _products() -> Counter[int]:
    """Product -> how many problems of the arithmetic language have it."""
    return Counter(number * factor for number, factor in arithmetic.all_pairs())


def blind_countdown(problem_id: str) -> float:
    """The chance that a working with these numbers, drawn at random, reaches the target."""
    numbers, target = problem_id.removeprefix("countdown-").split("->")
    by_way = countdown.workings(tuple(map(int, numbers.split(","))))
    values = [value for made in by_way.values() for _, value in made]
    return values.count(int(target)) / len(values)


BLIND: dict[str, Callable[[str], float]] = {
    "arithmetic": blind_arithmetic,
    "countdown": blind_countdown,
}
"""Task -> the chance of one blind attempt at a problem, by its id."""


def blind_chances(task: str, problem_ids: Sequence[str]) -> np.ndarray | None:
    """(P,) chances of one blind attempt; None for a task of which none are known."""
    chance = BLIND.get(task.removesuffix("-fresh"))
    return None if chance is None else np.array([chance(one) for one in problem_ids])


def guess_bounds(chances_P: np.ndarray, ks: Sequence[int]) -> dict[int, np.ndarray]:
    """k -> (P,) the chance that k blind attempts include a correct one, 1 − (1 − p)^k."""
    return {k: 1 - (1 - chances_P) ** k for k in ks}


def says_something(bound: float, start: float) -> bool:
    """Whether a verdict at this k is about more than guessing.

    Args:
        bound: mean pass@k of blind attempts.
        start: the start model's mean pass@k.
    """
    return bound < LARGEST_SHARE * start


def main_k(rows: Mapping[str, Mapping[str, Any]]) -> int:
    """The largest k that `says_something`; of none the smallest k."""
    usable = [int(k) for k, row in rows.items() if row["usable"]]
    return max(usable, default=min(map(int, rows)))
