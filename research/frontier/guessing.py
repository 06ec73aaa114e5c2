"""The chance of one blind attempt at a problem of the embedded tasks (`study.guessing`)."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from research.problems import countdown
from sage_unsloth.problems import arithmetic


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
    return None if chance is None else np.array([chance(item) for item in problem_ids])
