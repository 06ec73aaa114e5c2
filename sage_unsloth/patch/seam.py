"""Selects the patch point: Unsloth's or TRL's GRPO trainer. Only that seam is imported."""

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.hook import Hook
from sage_unsloth.patch.rollout_batch import Scoring
from sage_unsloth.trainers.finite import Guard
from sage_unsloth.trainers.trainer_names import TRL_TRAINER, ContractError


class Seam(Protocol):
    """The differences between the trainers that `guided_kl` supports."""

    name: str
    """Name of the trainer's library, as recorded in a checkpoint."""
    loss: str
    """The function that every optimizer step must reach."""
    bounds_k3: bool
    """Whether the trainer's own k3 is bounded."""

    @property
    def scoring(self) -> Scoring: ...

    def check(self) -> None:
        """Raises ContractError if the trainer is not as tested; changes nothing."""
        ...

    def cpu_shims(self, trainer: Any) -> AbstractContextManager:
        """Within it, the trainer runs on this machine."""
        ...

    def own_adapters(self, trainer: Any) -> tuple[str, ...]:
        """Frozen adapters that the trainer itself adds to the model."""
        ...

    def install_hook(
        self, trainer: Any, choice: Choice, guard: Guard, of_batch: dict[str, Tensor]
    ) -> AbstractContextManager[Hook]:
        """Within it, the trainer's loss calls the hook."""
        ...


def find_seam(trainer: Any) -> Seam:
    """The seam of a trainer: Unsloth's if Unsloth is imported, else TRL's.

    Raises:
        ContractError: neither, or TRL's own trainer while Unsloth is imported.
    """
    return seam_of_class(type(trainer))


def seam_of_class(trainer_class: type) -> Seam:
    """`find_seam` for a trainer's class."""
    if "unsloth" in sys.modules:
        loading = importlib.import_module("sage_unsloth.trainers.loading")
        seam = importlib.import_module("sage_unsloth.patch.unsloth_seam")
        return seam.UnslothSeam(loading.trainer_module(trainer_class))
    for base in trainer_class.__mro__:
        if (base.__module__, base.__qualname__) == TRL_TRAINER:
            return importlib.import_module("sage_unsloth.patch.trl_seam").TrlSeam(trainer_class)
    raise ContractError(
        "the trainer must be a trl.GRPOTrainer",
        actual=f"{trainer_class.__module__}.{trainer_class.__qualname__}",
        expected=".".join(TRL_TRAINER),
    )


def check_contract(trainer_class: type) -> None:
    """Raises ContractError unless the trainer has all that the patch relies on."""
    seam_of_class(trainer_class).check()
