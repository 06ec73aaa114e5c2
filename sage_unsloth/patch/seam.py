"""Which trainer it is, and so where its loss is taken hold of."""

import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.hook import Hook
from sage_unsloth.patch.loading import trainer_module
from sage_unsloth.patch.rollout_batch import Scoring
from sage_unsloth.patch.trl_seam import TrlSeam
from sage_unsloth.patch.unsloth_names import ContractError
from sage_unsloth.patch.unsloth_seam import UnslothSeam

TRL_TRAINER = ("trl.trainer.grpo_trainer", "GRPOTrainer")


class Seam(Protocol):
    """What differs between the trainers that `guided_kl` takes."""

    name: str
    """Of what generates the trainer, as a checkpoint records it."""
    loss: str
    """The function that every optimizer step must reach."""
    bounds_k3: bool
    """Whether the trainer's own k3 is bounded."""
    whole_model: bool
    """Whether each of several processes must hold the whole model."""

    @property
    def scoring(self) -> Scoring: ...

    def prepared(self, trainer: Any) -> AbstractContextManager:
        """Within it, the trainer runs on this machine."""
        ...

    def own_adapters(self, trainer: Any) -> tuple[str, ...]:
        """Frozen adapters that the trainer itself adds to the model, and scores by."""
        ...

    def opened(self, trainer: Any, choice: Choice) -> tuple[Hook, AbstractContextManager]:
        """The hook of this choice, and the context within which the trainer's loss calls it.

        Raises:
            ContractError: the trainer is not what was tested.
        """
        ...


def seam_of(trainer: Any) -> Seam:
    """The seam to a trainer: Unsloth's where Unsloth is imported, else TRL's.

    Raises:
        ContractError: the trainer is neither, or TRL's own beside Unsloth.
    """
    if "unsloth" not in sys.modules:
        for base in type(trainer).__mro__:
            if (base.__module__, base.__qualname__) == TRL_TRAINER:
                return TrlSeam(type(trainer))
        raise ContractError(
            "the trainer must be a trl.GRPOTrainer",
            found=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            expected=".".join(TRL_TRAINER),
        )
    return UnslothSeam(trainer_module(type(trainer)))
