"""A learned guide: a teacher that knows better solutions.

The paper leaves learned guides to the future. Here a frozen teacher (another adapter on the same
base, or another model with the same tokenizer) scores each rollout batch once, without gradient.
With κ = 1 and no clip the anchor q·π_ref is the teacher itself.
"""

import math
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_unsloth.objective.guides import Q_MAX, Q_MIN, check_clip, clip_guide
from sage_unsloth.objective.signals import TokenSignals


@dataclass(frozen=True)
class TeacherGuide:
    """q_t = clip((π_teacher(y_t | s_t) / π_ref(y_t | s_t))^κ, q_min, q_max).

    q_t depends only on the token and its prefix, so Π_t q_t is a guide of Eq. 7, clipped token by
    token.

    Attributes:
        kappa: κ >= 0; 0 leaves the anchor at π_ref.
    """

    kappa: float = 1.0
    q_min: float = Q_MIN
    q_max: float = Q_MAX

    @property
    def needs(self) -> Set[str]:
        return frozenset({"teacher_logps"})

    @property
    def causal(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        if not (math.isfinite(self.kappa) and self.kappa >= 0):
            raise ValueError(
                f"kappa must be finite and >= 0 because it is an exponent, got {self.kappa}"
            )

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32; ValueError without the teacher's log-probabilities."""
        teacher, ref = signals.require("teacher_logps", self), signals.require("ref_logps", self)
        # In float32: the difference of two 16-bit log-probs loses most of its digits.
        log_guide = self.kappa * (teacher.float() - ref.float())
        return clip_guide(log_guide, signals.mask, self.q_min, self.q_max)
