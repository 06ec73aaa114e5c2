"""A decaying cosine with warm restarts, as a pure function of the optimizer step."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CosineSchedule:
    """A decaying cosine with warm restarts, as a pure function of the optimizer step.

        L = max(1, ⌊max_steps / periods⌋),  c = min(⌊step / L⌋, periods − 1)
        v = lower + (upper · decay^c − lower) · ½ (1 + cos(π · (step mod L) / L))

    Attributes:
        upper: value at step 0.
        lower: value at the end of each period.
        decay: factor on `upper` from one period to the next.
    """

    upper: float
    lower: float
    periods: int = 8
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.upper) and math.isfinite(self.lower) and self.lower >= 0):
            raise ValueError(
                "upper and lower must be finite and lower must be >= 0 because they scale "
                f"probabilities and noise, got upper={self.upper}, lower={self.lower}"
            )
        if self.upper < self.lower:
            raise ValueError(f"upper must be >= lower, got upper={self.upper}, lower={self.lower}")
        if self.periods < 1:
            raise ValueError(f"periods must be >= 1, got {self.periods}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1], got {self.decay}")

    def value(self, step: int, max_steps: int) -> float:
        """The value at `step` of `max_steps`; ValueError for `step` < 0 or `max_steps` < 1."""
        if step < 0 or max_steps < 1:
            raise ValueError(
                f"step must be >= 0 and max_steps >= 1, got step={step}, max_steps={max_steps}"
            )
        length = max(1, max_steps // self.periods)
        # Steps that the division leaves over start the cosine once more, at the last period's
        # height.
        cycle = min(step // length, self.periods - 1)
        fall = 0.5 * (1 + math.cos(math.pi * (step % length) / length))
        return self.lower + (self.upper * self.decay**cycle - self.lower) * fall
