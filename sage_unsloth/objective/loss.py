"""The GRPO loss in plain torch: a readable reference for Unsloth's fused loss.

Every path of the patched trainer is tested against it, gradients included.

Shapes: B completions, T completion tokens. Log-probabilities are in nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sage_unsloth.objective.kl import k3, k3_is

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
Penalty = Callable[[Tensor, Tensor], Tensor]
"""(log π, log anchor) → nats, of one shape."""


def grpo_loss(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor | None,
    completion_mask: Tensor,
    advantages: Tensor,
    *,
    old_per_token_logps: Tensor | None = None,
    log_guide: Tensor | None = None,
    beta: float = 0.05,
    epsilon: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "grpo",
    importance_sampling_level: str = "token",
    kl_estimator: str | Penalty = "k3",
    k3_max: float | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
) -> Tensor:
    """The clipped surrogate with a guide-weighted KL penalty, reduced to a scalar.

        ρ_t   = exp(log π(y_t) − log π_old(y_t))  ("sequence": one ρ, of the mean log-ratio)
        ℓ_t   = −min(ρ_t A, clip(ρ_t, 1 − ε, 1 + ε_high) A) + β · penalty_t
        d_t   = log q_t + log π_ref(y_t) − log π(y_t), the argument of the penalty

        grpo     mean over completions of the token mean
        bnpo     Σ ℓ / number of valid tokens
        dr_grpo  Σ ℓ / (B · max_completion_length)
        dapo     Σ ℓ / number of valid tokens

    `dapo` counts the tokens of the whole generation batch, not of one micro-batch: pass
    `num_items_in_batch`. `bnpo` does so too up to Unsloth 2026.10.7; from 2026.10.9 it counts the
    micro-batch's own tokens, so with gradient accumulation the two versions train on different
    losses.

    Args:
        per_token_logps: log π(y_t | s_t), carries the gradient, (B, T).
        ref_per_token_logps: log π_ref(y_t | s_t), (B, T); None only with `beta` 0.
        completion_mask: 1 for the tokens of the completion, (B, T).
        advantages: A, (B,) or (B, T).
        old_per_token_logps: log π_old at sampling time, (B, T); None means on-policy (ρ = 1 with
            its gradient).
        log_guide: log q_t, (B, T); None is q = 1.
        epsilon, epsilon_high: clip range of ρ.
        kl_estimator: "k3", "k3-is" (`k3_is`), or a function such as those of
            `methods.penalties.PENALTIES`.
        k3_max: bound of a token's k3, for "k3" and "k3-is"; None for no bound. Unsloth 2026.10.9
            bounds "k3-is" after its ratio, so a bounded token has no gradient of the ratio.
        max_completion_length: tokens, for `dr_grpo`.
        num_items_in_batch: divisor of `bnpo` and `dapo`; None counts the valid tokens of this
            batch.

    Raises:
        ValueError: an unknown `loss_type`, `kl_estimator` or level, a missing reference, or
            different shapes.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {loss_type!r}")
    if importance_sampling_level not in IMPORTANCE_SAMPLING_LEVELS:
        raise ValueError(
            f"importance_sampling_level must be one of {IMPORTANCE_SAMPLING_LEVELS}, got "
            f"{importance_sampling_level!r}"
        )
    if isinstance(kl_estimator, str) and kl_estimator not in ("k3", "k3-is"):
        raise ValueError(
            f"kl_estimator must be 'k3', 'k3-is' or a function, got {kl_estimator!r} "
            "(sage_unsloth.methods.penalties has others by name)"
        )
    mask = completion_mask.to(per_token_logps.dtype)
    valid = completion_mask.bool()
    # inf or nan in a masked position must not reach a product, where 0 · inf is nan.
    logps = torch.where(valid, per_token_logps, 0.0)
    old = (
        # ρ is 1 in value, but its gradient is that of log π: the first update of a batch is on-
        # policy.
        logps.detach()
        if old_per_token_logps is None
        else torch.where(valid, old_per_token_logps, 0.0)
    )
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)

    log_ratio = logps - old
    if importance_sampling_level == "sequence":
        # GSPO's ratio: one for a completion, with the mean and not the sum in the exponent.
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(
            min=1
        )
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    # PPO's pessimistic bound: the clip holds only where it lowers the objective.
    loss = -torch.minimum(ratio * advantages, clipped * advantages)

    if beta != 0.0:
        if ref_per_token_logps is None:
            raise ValueError(
                f"ref_per_token_logps must be given when beta is not 0, got None with beta={beta}"
            )
        # The whole method is this sum: log q enters the loss nowhere else.
        anchor = ref_per_token_logps if log_guide is None else ref_per_token_logps + log_guide
        anchor = torch.where(valid, anchor, 0.0)
        if callable(kl_estimator):
            penalty = kl_estimator(logps, anchor)
        elif kl_estimator == "k3":
            penalty = k3(logps, anchor, k3_max=k3_max)
        else:
            penalty = k3_is(logps, anchor, ratio, k3_max=k3_max)
        loss = loss + beta * penalty

    if loss_type == "grpo":
        return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    total = (loss * mask).sum()
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError(
                "dr_grpo divides by max_completion_length, which must be given, got None"
            )
        return total / (loss.shape[0] * max_completion_length)
    count = float(mask.sum()) if num_items_in_batch is None else float(num_items_in_batch)
    return total / max(count, 1.0)
