"""The embedded languages drawn anew, for a verdict on problems that nothing was evaluated on.

Their domains are finite, and the first drawing of arithmetic has no `usual` problem left that was
neither evaluated nor trained on. So everything is drawn again, by the hash of another salt: a test
split without a problem of the first test split, SFT and training splits of the same sizes from
what is left, and a base model of its own, pretrained with another seed on all problems but those of
the new test split (`python -m research.pretrain --problems fresh`, or `countdown-fresh`).

Of the families whose coverage can be lost the test split has three times as many problems, of which
three make a unit: a unit counts as one problem does in the first test split, with the mean of its
three pass@k. So shares of families, and levels, are comparable, and chance is less.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Generic, TypeVar

from research.problems import countdown
from research.problems.subsets import allot, in_units, with_units
from sage_unsloth.problems import arithmetic

Problem = TypeVar("Problem", bound=Hashable)

SALT = "fresh "
PROBLEMS_OF_A_UNIT = 3


class Fresh(Generic[Problem]):
    """A language drawn anew.

    Args:
        language: the module, with `SPLITS`, `solved_problems` for SFT and `posed_problems`.
        every: all problems, in the order of a salt.
        evaluated: the problems of the first test split.
        family: of a problem.
        in_threes: the families with units of three problems in the test.
    """

    def __init__(
        self,
        language: ModuleType,
        every: Callable[[str], Sequence[Problem]],
        evaluated: Callable[[], Sequence[Problem]],
        family: Callable[[Problem], str | None],
        in_threes: Sequence[str],
    ) -> None:
        self.language, self.family = language, family
        self._every, self._evaluated = every, evaluated
        self._units = dict.fromkeys(in_threes, PROBLEMS_OF_A_UNIT)

    @functools.cached_property
    def allocation(self) -> dict[str, tuple[Problem, ...]]:
        """The problems of each split: `test`, `sft`, `train`."""
        every, evaluated = self._every(SALT), set(self._evaluated())
        unseen = [problem for problem in every if problem not in evaluated]
        sources = {"test": unseen, "sft": every, "train": every}
        return allot(every, with_units(self.language.SPLITS, self._units), sources, self.family)

    def problems(self, split: str) -> list[dict]:
        """The rows of `split`, as the language's own `problems`; those of the test have a `unit`.

        Raises:
            ValueError: there is no such split.
        """
        if split not in self.allocation:
            raise ValueError(f"split must be one of {', '.join(self.allocation)}, got {split!r}")
        if split == "sft":
            return self.language.solved_problems(self.allocation[split])
        rows = self.language.posed_problems(self.allocation[split])
        return in_units(rows, self._units) if split == "test" else rows

    @functools.cached_property  # each document of the pretraining asks for them
    def pretraining_problems(self) -> tuple[Problem, ...]:
        """All problems but those of the test split."""
        held_out = set(self.allocation["test"])
        return tuple(problem for problem in self._every(SALT) if problem not in held_out)


ARITHMETIC = Fresh(
    arithmetic,
    arithmetic.all_pairs,
    lambda: arithmetic.allocation()["test"],
    lambda pair: arithmetic.family(pair[0]),
    ("rare", "far"),
)
COUNTDOWN = Fresh(
    countdown, countdown.all_problems, countdown.held_out, countdown.family, ("other", "rare")
)
