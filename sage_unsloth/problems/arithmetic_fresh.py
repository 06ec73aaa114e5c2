"""The arithmetic language drawn anew, for a verdict on problems that nothing was evaluated on.

The domain of `arithmetic` is finite, and its first drawing has no `usual` problem left that was
neither evaluated nor trained on. So everything is drawn again, by the hash of another salt: a test
split without a problem of the first test split, SFT and training splits of the same sizes from
what is left, and a base model of its own, pretrained with another seed on all problems but those of
the new test split (`python -m sage_unsloth.lab.pretrain --problems fresh`).
"""

import functools

from sage_unsloth.problems import arithmetic

SALT = "fresh "


@functools.cache
def allocation() -> dict[str, tuple[tuple[int, int], ...]]:
    """(number, factor) of each split, in the sizes of `arithmetic.SPLITS`."""
    evaluated = set(arithmetic.allocation()["test"])
    left = arithmetic.all_pairs(SALT)
    splits = {}
    for split, counts in arithmetic.SPLITS.items():
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
    """The rows of `split`, as `arithmetic.problems` has them.

    Raises:
        ValueError: `split` is not one of `test`, `sft`, `train`.
    """
    if split not in arithmetic.SPLITS:
        raise ValueError(f"split must be one of {', '.join(arithmetic.SPLITS)}; got {split!r}")
    pairs = allocation()[split]
    return arithmetic.solved_problems(pairs) if split == "sft" else arithmetic.posed_problems(pairs)


@functools.cache
def pretraining_pairs() -> tuple[tuple[int, int], ...]:
    """All problems but those of the test split."""
    held_out = set(allocation()["test"])
    return tuple(pair for pair in arithmetic.all_pairs(SALT) if pair not in held_out)
