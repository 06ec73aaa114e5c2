"""The interfaces of a guide: any object with these members."""

from collections.abc import Mapping, Set
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sage_unsloth.objective.signals import TokenSignals


@runtime_checkable
class Guide(Protocol):
    """What `guided_kl` accepts.

    Attributes:
        needs: which of `OPTIONAL_SIGNALS` `log_guide` reads.
    """

    @property
    def needs(self) -> Set[str]: ...

    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32, without gradient, 0 where the mask is 0."""
        ...


@runtime_checkable
class CausalGuide(Guide, Protocol):
    """A guide that says whether log q_t depends only on y_1..y_t.

    credit="sequence" requires causal = True, because it credits a token only with later ones. A
    guide without the attribute counts as not causal.

    Attributes:
        causal: True if no token after y_t changes log q_t.
    """

    @property
    def causal(self) -> bool: ...


@runtime_checkable
class SteeredGuide(Guide, Protocol):
    """A guide with a state that changes after each optimizer step and is saved in checkpoints."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Updates the state from the step's metrics (`objective.guide_metrics`)."""
        ...

    def state(self) -> dict[str, float]:
        """The state as numbers; each is logged as `sage/<name>`."""
        ...

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Continues from what `state()` returned, or from the start with None."""
        ...
