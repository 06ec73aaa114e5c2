"""The countdown language drawn anew, for a verdict on problems that nothing was evaluated on.

As `arithmetic_fresh`: drawn by the hash of another salt, the test split has no problem that the
first drawing held out, SFT and training splits of the same sizes come from what is left, and a base
model of its own is pretrained with another seed on all problems but those of the new test split
(`python -m research.pretrain --problems countdown-fresh`).

Of the families whose coverage can be lost the test split has three times as many problems, of which
three make a unit.
"""

import functools

from research.problems import countdown
from research.problems.subsets import allot, drawn_anew, with_units

SALT = "fresh "
UNITS = {"other": 3, "rare": 3}
"""Problems of a unit, where it is not one."""
SPLITS = with_units(countdown.SPLITS, UNITS)


@functools.cache
def allocation() -> dict[str, tuple[countdown.Problem, ...]]:
    """The problems of each split, in the sizes of `SPLITS`."""
    every = countdown.all_problems(SALT)
    seen = set(countdown.held_out())
    unseen = [item for item in every if item not in seen]
    sources = {"test": unseen, "sft": every, "train": every}
    return allot(every, SPLITS, sources, countdown.family)


def problems(split: str) -> list[dict]:
    """The rows of `split`, as `countdown.problems` has them; those of the test have a `unit` too.

    Raises:
        ValueError: `split` is not one of `test`, `sft`, `train`.
    """
    return drawn_anew(countdown, split, allocation(), UNITS)


@functools.cache
def pretraining_problems() -> tuple[countdown.Problem, ...]:
    """All problems but those of the test split."""
    held_out = set(allocation()["test"])
    return tuple(problem for problem in countdown.all_problems(SALT) if problem not in held_out)
