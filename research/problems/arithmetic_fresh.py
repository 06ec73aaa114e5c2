"""The arithmetic language drawn anew, for a verdict on problems that nothing was evaluated on.

The domain of `arithmetic` is finite, and its first drawing has no `usual` problem left that was
neither evaluated nor trained on. So everything is drawn again, by the hash of another salt: a test
split without a problem of the first test split, SFT and training splits of the same sizes from
what is left, and a base model of its own, pretrained with another seed on all problems but those of
the new test split (`python -m research.pretrain --problems fresh`).

Of the families whose coverage can be lost the test split has three times as many problems, of which
three make a unit: a unit counts as one problem does in the first test split, with the mean of its
three pass@k. So shares of families, and levels, are comparable, and chance is less.
"""

import functools

from research.problems.subsets import allot, drawn_anew, with_units
from sage_unsloth.problems import arithmetic

SALT = "fresh "
UNITS = {"rare": 3, "far": 3}
"""Problems of a unit, where it is not one."""
SPLITS = with_units(arithmetic.SPLITS, UNITS)


@functools.cache
def allocation() -> dict[str, tuple[tuple[int, int], ...]]:
    """(number, factor) of each split, in the sizes of `SPLITS`."""
    every = arithmetic.all_pairs(SALT)
    evaluated = set(arithmetic.allocation()["test"])
    unseen = [pair for pair in every if pair not in evaluated]
    sources = {"test": unseen, "sft": every, "train": every}
    return allot(every, SPLITS, sources, lambda pair: arithmetic.family(pair[0]))


def problems(split: str) -> list[dict]:
    """The rows of `split`, as `arithmetic.problems` has them; those of the test have a `unit` too.

    Raises:
        ValueError: `split` is not one of `test`, `sft`, `train`.
    """
    return drawn_anew(arithmetic, split, allocation(), UNITS)


@functools.cache
def pretraining_pairs() -> tuple[tuple[int, int], ...]:
    """All problems but those of the test split."""
    held_out = set(allocation()["test"])
    return tuple(pair for pair in arithmetic.all_pairs(SALT) if pair not in held_out)
