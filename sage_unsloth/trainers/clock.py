"""A guide's time and its random numbers."""

import hashlib
from typing import Any, NamedTuple

import torch


class StepContext(NamedTuple):
    """The time of a micro-batch."""

    step: int  # optimizer steps before it
    max_steps: int
    generator: torch.Generator  # seeded by seed, step, training or not, micro-batch and process


class Clock:
    """Counts the micro-batches of a trainer's optimizer steps.

    A resumed run gets the same values: they depend only on the seed and the micro-batch's place in
    the run.

    Args:
        stream: a name; each gives other random numbers, different from those of the guide.
    """

    def __init__(self, trainer: Any, stream: str = "") -> None:
        self.trainer = trainer
        self.stream = (stream,) if stream else ()
        # Of training (True) and of evaluations, which may come between two micro-batches of a step:
        # the step of the last micro-batch, and its number in that step.
        self._last: dict[bool, tuple[int, int]] = {}

    def restart(self) -> None:
        """Training begins, maybe in an interrupted step, whose micro-batches are counted again."""
        self._last.clear()

    def tick(self) -> StepContext:
        """The time of the next micro-batch."""
        state, args = self.trainer.state, self.trainer.args
        step, training = state.global_step, self.trainer.model.training
        before, number = self._last.get(training, (step, -1))
        micro_batch = number + 1 if before == step else 0
        self._last[training] = step, micro_batch
        process = self.trainer.accelerator.process_index
        key = (args.seed, step, training, micro_batch, process, *self.stream)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return StepContext(step, max(state.max_steps, args.max_steps, 1), generator)
