"""What a guide is: any object with these members, of any class."""

from collections.abc import Mapping, Set
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from sage_unsloth.objective.signals import TokenSignals


@runtime_checkable
class Guide(Protocol):
    """What `guided_kl` accepts: any object with these two members is a guide.

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
    """A guide that says whether log q_t depends on y_1..y_t alone.

    credit="sequence" takes no other, because it pays a token only for those after it. A guide
    without the attribute counts as one that reads later tokens.

    Attributes:
        causal: True if no token after y_t changes log q_t.
    """

    @property
    def causal(self) -> bool: ...


@runtime_checkable
class SteeredGuide(Guide, Protocol):
    """A guide with a state of its own, which is moved after each optimizer step and kept in each
    checkpoint.
    """

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Learn from the metrics of `sage_unsloth.objective.guide_metrics`, pooled over the step's
        micro-batches and processes.
        """
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, as numbers; each is logged as `sage/<name>`."""
        ...

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Continue from what `state()` returned, or from the beginning with None."""
        ...
