"""Keeps the order of the training rows when a run resumes after its first pass.

TRL shuffles each pass by a generator of the sampler, which no checkpoint holds, and transformers
starts in a checkpoint's pass without walking through earlier ones. So a resumed run would use the
order of the first pass. Here the order of a pass depends only on the seed and the number of the
pass; in a run that is not resumed it equals TRL's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import listening
from sage_unsloth.trainers.trainer_names import ContractError

SAMPLER_ATTRIBUTES = ("shuffle", "generator", "num_samples")


@contextmanager
def keep_row_order(trainer: Any) -> Iterator[None]:
    """Within this context, each pass of training uses its own order of rows.

    Raises:
        ContractError: the trainer's sampler differs from the tested ones.
    """

    def make(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sampler = proceed(*args, **kwargs)
        missing = [name for name in SAMPLER_ATTRIBUTES if not hasattr(sampler, name)]
        if missing and getattr(sampler, "shuffle", True):
            raise ContractError(
                f"{names.SAMPLER} must return a sampler whose order can be kept",
                actual=f"{type(sampler).__name__} without {', '.join(missing)}",
                expected=SAMPLER_ATTRIBUTES,
            )
        return _PassByPass(sampler, trainer) if sampler.shuffle else sampler

    with listening(trainer, "order", **{names.SAMPLER: make}):
        yield


class _PassByPass(torch.utils.data.Sampler):
    """A sampler whose generator is advanced to the current pass before each pass."""

    def __init__(self, sampler: Any, trainer: Any) -> None:
        self.sampler, self.trainer = sampler, trainer
        self.generator = sampler.generator  # accelerate keeps it alike in several processes
        self.first = sampler.generator.get_state()

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        # Whole when a pass is over, and restored with a checkpoint.
        passes = int(self.trainer.state.epoch or 0)
        self.generator.set_state(self.first)
        for _ in range(passes):
            torch.randperm(self.sampler.num_samples, generator=self.generator)
        return iter(self.sampler)
