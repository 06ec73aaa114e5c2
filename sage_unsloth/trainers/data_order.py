"""The order of the training rows, which a run keeps where it is resumed behind its first pass.

TRL shuffles each pass over the rows by a generator that the sampler has for itself, and that no
checkpoint holds; transformers begins in the pass that a checkpoint is in without walking through
those before it. So a resumed run would take that pass in the order of the first. Here the order of
a pass depends on the seed and on the number of the pass alone; in a run that is not resumed it is
what TRL draws.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import listening
from sage_unsloth.trainers.trainer_names import ContractError

NEEDED = ("shuffle", "generator", "num_samples")


@contextmanager
def order_kept(trainer: Any) -> Iterator[None]:
    """Within this context, each pass of the trainer's training draws the rows in its own order.

    Args:
        trainer: Unsloth's or TRL's GRPO trainer.

    Raises:
        ContractError: its sampler is not what was tested.
    """

    def make(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        sampler = proceed(*args, **kwargs)
        missing = [name for name in NEEDED if not hasattr(sampler, name)]
        if missing and getattr(sampler, "shuffle", True):
            raise ContractError(
                f"{names.SAMPLER} must return a sampler whose order can be kept",
                actual=f"{type(sampler).__name__} without {', '.join(missing)}",
                expected=NEEDED,
            )
        return _PassByPass(sampler, trainer) if sampler.shuffle else sampler

    with listening(trainer, "order", **{names.SAMPLER: make}):
        yield


class _PassByPass(torch.utils.data.Sampler):
    """A sampler whose generator is brought to the pass that training is in before each pass."""

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
