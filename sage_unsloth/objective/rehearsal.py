"""Rehearsal: a divergence from π_ref on completions that π_ref itself drew, before training.

GRPO's KL penalty is taken on what the policy draws now, so it says nothing of ways that the policy
no longer takes. DPH-RL (arXiv 2509.07430) takes it on stored right completions of π_ref, and has no
other KL term. With u_t = π(y_t | s_t) / π_ref(y_t | s_t) on a stored token:

    forward-kl    u − 1 − log u                    gradient (u − 1) ∇log π
    js            u log u − (u + 1) log((u + 1)/2)  gradient u log(2u/(u + 1)) ∇log π

Both are 0, without a gradient, where π = π_ref. In expectation over π_ref's own completions the
first is KL(π_ref ‖ π), the second twice the Jensen–Shannon divergence; over right ones alone they
are neither, and hold the policy at π_ref where π_ref was right.

As in its code: k3 with policy and reference exchanged is the first, and all tokens of a completion
are taken. Other than there: log u is at most 10 and has no gradient beyond, so a slope can reach
22,025, where theirs bounds the value at 10, which is u about 12.9; a problem is stored as soon as
one completion is right (`solved=1` stores those that π_ref always solves, as the paper does), and
it stays among those that RL trains on.

Shapes: B stored completions, T tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from sage_unsloth.objective.advantage_rules import rule_settings

MAX_LOG_RATIO = 10.0
"""log u is at most this, in nats, and has no gradient above, so that one token cannot overflow."""


def forward_kl(log_ratio: Tensor) -> Tensor:
    """u − 1 − log u of log u."""
    return torch.expm1(log_ratio) - log_ratio


def jensen_shannon(log_ratio: Tensor) -> Tensor:
    """u log u − (u + 1) log((u + 1)/2) of log u."""
    log_mean = torch.nn.functional.softplus(log_ratio) - math.log(2)
    ratio = log_ratio.exp()
    return ratio * log_ratio - (ratio + 1) * log_mean


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "forward-kl": forward_kl,
    "js": jensen_shannon,
}


@dataclass(frozen=True)
class RehearsalRule:
    """What is stored, and how the policy is held to it.

    Attributes:
        divergence: a name of `DIVERGENCES`.
        problems: training problems that are sampled before training, at even distances; all where
            there are fewer.
        samples: completions that π_ref draws of each; the right ones are stored.
        batch: stored completions beside each micro-batch.
        solved: share of a problem's samples that must be right for them to be stored.

    Raises:
        ValueError: an unknown divergence, or a number out of range.
    """

    divergence: str = "forward-kl"
    problems: int = 256
    samples: int = 8
    batch: int = 8
    solved: float = 0.0

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(
                f"rehearsal must be one of {', '.join(DIVERGENCES)}, with settings behind it "
                f"(forward-kl,samples=16); got {self.divergence!r}"
            )
        for name in ("problems", "samples", "batch"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise ValueError(f"{name} of a rehearsal must be a whole number >= 1; got {value}")
            object.__setattr__(self, name, int(value))
        if not 0 <= self.solved <= 1:
            raise ValueError(
                "solved of a rehearsal must be in [0, 1], because it is a share of a problem's "
                f"samples; got {self.solved}"
            )

    def stores(self, num_correct: int) -> bool:
        """Whether a problem of which so many samples are right is stored."""
        return num_correct / self.samples >= self.solved


def rehearsal_rule(text: str) -> RehearsalRule:
    """The rule of `"forward-kl"`, or `"js,samples=16,batch=4"`.

    Raises:
        ValueError: see `RehearsalRule`; a setting that it does not have, or not NAME=VALUE.
    """
    name, *texts = (part.strip() for part in text.split(","))
    known = [field.name for field in fields(RehearsalRule) if field.name != "divergence"]
    return RehearsalRule(name, **rule_settings(texts, known, f"rehearsal={name!r}"))


def rehearsal_loss(logps: Tensor, ref_logps: Tensor, mask: Tensor, divergence: str) -> Tensor:
    """The divergence of stored completions: the mean over each one's tokens, then over all.

    Args:
        logps: log π(y_t | s_t), nats, (B, T), with gradient.
        ref_logps: log π_ref(y_t | s_t), (B, T).
        mask: (B, T), 1 on their tokens.
        divergence: a name of `DIVERGENCES`.

    Returns:
        A number >= 0, nats.
    """
    log_ratio = torch.where(mask.bool(), logps - ref_logps, 0.0).clamp(max=MAX_LOG_RATIO)
    values = DIVERGENCES[divergence](log_ratio) * mask
    return (values.sum(1) / mask.sum(1).clamp(min=1)).mean()
