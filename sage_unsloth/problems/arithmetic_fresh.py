"""The arithmetic language drawn anew, for a verdict on problems that nothing was evaluated on.

The domain of `arithmetic` is finite, and its first drawing has no `usual` problem left that was
neither evaluated nor trained on. So everything is drawn again, by the hash of another salt: a test
split without a problem of the first test split, SFT and training splits of the same sizes from
what is left, and a base model of its own, pretrained with another seed on all problems but those of
the new test split (`python -m sage_unsloth.lab.pretrain --problems fresh`).

Of the families whose coverage can be lost the test split has three times as many problems, of which
three make a unit: a unit counts as one problem does in the first test split, with the mean of its
three pass@k. So shares of families, and levels, are comparable, and chance is less.
"""

import functools

from sage_unsloth.problems import arithmetic
from sage_unsloth.problems.subsets import in_units

SALT = "fresh "
UNITS = {"rare": 3, "far": 3}
"""Problems of a unit, where it is not one."""
SPLITS = arithmetic.SPLITS | {
    "test": {name: count * UNITS.get(name, 1) for name, count in arithmetic.SPLITS["test"].items()}
}


@functools.cache
def allocation() -> dict[str, tuple[tuple[int, int], ...]]:
    """(number, factor) of each split, in the sizes of `SPLITS`."""
    evaluated = set(arithmetic.allocation()["test"])
    left = arithmetic.all_pairs(SALT)
    splits = {}
    for split, counts in SPLITS.items():
        allowed = [pair for pair in left if split != "test" or pair not in evaluated]
        taken = {
            pair
            for name, count in counts.items()
            for pair in [one for one in allowed if arithmetic.family(one[0]) == name][:count]
        }
        splits[split] = tuple(pair for pair in left if pair in taken)
        left = [pair for pair in left if pair not in taken]
    return splits


def problems(split: str) -> list[dict]:
    """The rows of `split`, as `arithmetic.problems` has them; those of the test have a `unit` too.

    Raises:
        ValueError: `split` is not one of `test`, `sft`, `train`.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}; got {split!r}")
    pairs = allocation()[split]
    if split == "sft":
        return arithmetic.solved_problems(pairs)
    rows = arithmetic.posed_problems(pairs)
    return rows if split != "test" else in_units(rows, UNITS)


@functools.cache
def pretraining_pairs() -> tuple[tuple[int, int], ...]:
    """All problems but those of the test split."""
    held_out = set(allocation()["test"])
    return tuple(pair for pair in arithmetic.all_pairs(SALT) if pair not in held_out)
