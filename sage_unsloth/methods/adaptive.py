"""A guide with an adaptive strength, as adaptive KL controllers adapt β (Ziegler et al. 2019, arXiv
1909.08593, section 2.2).

The effect of a fixed guide fades: entropy falls in training, and with it the share of tokens above
Branch's threshold. Here log q is multiplied by a strength κ that moves after each optimizer step so
that a measured mean stays at its target:

    e = clip(1 − measured/target, −0.2, 0.2)
    κ ← clip(κ · (1 + gain · e), min_strength, max_strength)

κ is part of each checkpoint, so a resumed run continues with the same values.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sage_unsloth.objective.guides import Q_MAX, Q_MIN, RandomGuide, check_clip, clip_guide
from sage_unsloth.objective.protocols import CausalGuide, Guide, SteeredGuide
from sage_unsloth.objective.signals import TokenSignals

ERROR_MAX = 0.2
TARGET_METRICS = {"log_guide": "sage/log_guide_mean", "entropy": "sage/entropy"}
"""Quantity that can be kept at its target -> its metric."""


@dataclass
class AdaptiveGuide:
    """log q_t = clip(κ · log q_t of `guide`, log q_min, log q_max), with κ adapted to a target.

    "log_guide" keeps the mean log q_t per token constant, so that the guide acts as strongly at the
    end of a run as at its start. "entropy" keeps the policy's mean entropy constant. This assumes
    that a stronger guide raises entropy, as Branch does; otherwise κ runs into its bounds. If the
    guide changes no token at all, no κ helps; lower its threshold instead.

    Attributes:
        guide: the guide whose log q is scaled.
        target: value of the mean to keep, nats per token; positive.
        keeps: "log_guide" or "entropy".
        gain: share of the error by which κ moves in one step; 0.1 as in the reference.
        min_strength, max_strength: bounds of κ; 0 < min <= 1 <= max, as κ starts at 1.
        q_min, q_max: q_t is clipped to [q_min, q_max] after scaling.
        strength: the current κ: state, not a setting, so it is neither compared nor printed.

    Raises:
        TypeError: `guide` is not a guide, or has a state itself.
        ValueError: a setting out of range, or a guide whose mean log q is negative with
            keeps="log_guide".
    """

    guide: Guide
    target: float
    keeps: str = "log_guide"
    gain: float = 0.1
    min_strength: float = 0.1
    max_strength: float = 10.0
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    strength: float = field(default=1.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        if not isinstance(self.guide, Guide) or isinstance(self.guide, SteeredGuide):
            raise TypeError(f"guide must not be an AdaptiveGuide itself, got {self.guide!r}")
        # Clipping makes E[log q] of Random and of a teacher negative, and more so the stronger they
        # are: the loop would push the wrong way.
        below_one = isinstance(self.guide, RandomGuide) or "teacher_logps" in self.guide.needs
        if self.keeps == "log_guide" and below_one:
            raise ValueError(
                "keeps='log_guide' needs a guide whose mean log q grows with its strength, but "
                f"that of {type(self.guide).__name__} is below 0. Set keeps='entropy'"
            )
        if self.keeps not in TARGET_METRICS:
            raise ValueError(
                f"keeps must be one of {', '.join(TARGET_METRICS)}, got {self.keeps!r}"
            )
        if not (math.isfinite(self.target) and self.target > 0):
            raise ValueError(
                "target must be finite and > 0 because the error is relative to it, got "
                f"{self.target}"
            )
        if not 0 < self.gain <= 1:
            raise ValueError(f"gain must be in (0, 1], got {self.gain}")
        if not 0 < self.min_strength <= 1 <= self.max_strength < math.inf:
            raise ValueError(
                "min_strength and max_strength must be finite with 0 < min <= 1 <= max (the "
                f"strength begins at 1), got {self.min_strength} and {self.max_strength}"
            )

    @property
    def needs(self) -> Set[str]:
        return self.guide.needs | ({"entropies"} if self.keeps == "entropy" else set())

    @property
    def causal(self) -> bool:
        return isinstance(self.guide, CausalGuide) and self.guide.causal

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32, with the current strength."""
        log_guide = self.guide.log_guide(
            signals, step=step, max_steps=max_steps, generator=generator
        )
        # κ · log q is q^κ, clipped again because q^κ can leave the bounds.
        return clip_guide(self.strength * log_guide, signals.mask, self.q_min, self.q_max)

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Moves κ by the step's metrics (`objective.guide_metrics`)."""
        error = 1 - metrics[TARGET_METRICS[self.keeps]] / self.target
        # One bad batch must not move the strength far: entropies jump when lengths do.
        error = min(max(error, -ERROR_MAX), ERROR_MAX)
        # Relative steps, so that the strength cannot change its sign.
        moved = self.strength * (1 + self.gain * error)
        self.strength = min(max(moved, self.min_strength), self.max_strength)

    def state(self) -> dict[str, float]:
        """The strength; logged as `sage/strength`."""
        return {"strength": self.strength}

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Continues from `state`, or starts at 1 with None."""
        self.strength = 1.0 if state is None else float(state["strength"])
