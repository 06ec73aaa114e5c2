"""What is done to the advantages before they reach the loss."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.credit import leave_one_out, sequence_credit
from sage_unsloth.objective.signals import TokenSignals, read_only

ShapeAdvantages = Callable[..., Tensor]
"""(signals, advantages) -> advantages, (B,) or (B, T), in units of reward; by name it may ask for
any of `OFFERED`."""
OFFERED = ("old_logps", "generator")
"""log π_old of the tokens, nats, (B, T), None in the first update of a rollout batch; and random
numbers that a resumed run draws again."""


def shaped(
    shape: ShapeAdvantages, signals: TokenSignals, advantages: Tensor, **offered: Any
) -> Tensor:
    """What a user's function makes of the advantages, (B,) or (B, T), without gradient.

    Args:
        shape: the function.
        signals: what it may look at.
        advantages: the trainer's, (B,) or (B, T).
        offered: those of `OFFERED`, which it gets if it has arguments of these names.

    Raises:
        ValueError: the result has another shape, or the function wrote into what it was given.
    """
    asked = {*inspect.signature(shape).parameters} & {*offered}
    given = {name: offered[name] for name in asked}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with read_only(vars(signals) | {"advantages": advantages} | tensors, shape):
        result = shape(signals, advantages, **given)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise ValueError(f"shape_advantages must return a floating tensor; got {result!r:.100}")
    result = result.detach().to(advantages.dtype)
    if result.shape not in (signals.mask.shape, signals.mask.shape[:1]):
        raise ValueError(
            f"shape_advantages must return (B,) or (B, T); got {tuple(result.shape)} for "
            f"{tuple(signals.mask.shape)}"
        )
    if result.dim() == 2:  # outside the mask the signals mean nothing, and 0 · nan is nan
        result = torch.where(signals.mask.bool(), result, 0.0)
    return result


def with_sequence_credit(
    advantages: Tensor,
    signals: TokenSignals,
    groups: Tensor,
    *,
    beta: float,
    log_guide: Tensor | None,
    own_baseline: bool = False,
) -> tuple[Tensor, Tensor]:
    """The advantages under credit="sequence", (B, T), and the credit in them, (B, T).

    Args:
        advantages: TRL's, whose baseline is the mean over all completions of a prompt, (B,) or
            (B, T).
        groups: a number for each completion, equal for those of one prompt, (B,).
        beta: KL coefficient β.
        log_guide: log q_t, (B, T); None is q = 1.
        own_baseline: the advantages are those of a rule with a baseline of its own
            (`group_advantages`), and stay as they are.

    Raises:
        ValueError: a prompt has a single completion in the batch, or the signals no reference.
    """
    ref_logps = signals.require("ref_logps", "credit='sequence'")
    credit = sequence_credit(
        signals.policy_logps, ref_logps, signals.mask, groups, beta=beta, log_guide=log_guide
    )
    if not own_baseline:
        advantages = leave_one_out(advantages, groups)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    return advantages + credit.to(advantages.dtype), credit


def less_kl(
    rewards: Tensor, logps: Tensor, ref_logps: Tensor, completion_mask: Tensor, *, beta: float
) -> Tensor:
    """r − β Σ_t (log π_old(y_t) − log π_ref(y_t)), the KL in the reward (k1, whole completions).

    The log-ratio of a completion is an unbiased estimate of KL(π‖π_ref) over completions, and as a
    reward it credits a token with the KL of those after it: with r − mean of the others as
    advantage, the gradient is that of E[r] − β KL (RLHF's, arXiv 2203.02155; compared with a KL in
    the loss in 2512.21852). Under a rule that divides, β is divided with the reward.

    Args:
        rewards: (B,).
        logps, ref_logps: of the policy that drew and of the reference, nats, (B, T).
        completion_mask: (B, T).
        beta: β.

    Returns:
        (B,), in units of reward.
    """
    difference = torch.where(completion_mask.bool(), logps.float() - ref_logps.float(), 0.0)
    return rewards - beta * difference.sum(1).to(rewards)
