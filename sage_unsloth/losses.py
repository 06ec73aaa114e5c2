"""The GRPO loss in plain torch: what Unsloth's fused loss computes, on whole (B, T) tensors, to read and to test against.

Nothing here runs in training. Every path of the patched trainer is compared with these functions, gradients included.
Unsloth also clamps each token's k3 at `UNSLOTH_K3_MAX`, where the paper's and TRL's loss has no bound: a token beyond it
still counts in the loss, without a gradient. `k3_max` reproduces that.

Shapes: B completions, T completion tokens. Log-probabilities are in nats.
"""

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
UNSLOTH_K3_MAX = 10.0


def k3(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """The k3 estimator of the KL to an anchor f, per token: exp(d) − d − 1 with d = log f(y_t) − log π(y_t).

    For a normalised anchor its mean over y_t ~ π is KL(π‖f). For f = q·π_ref it is the *generalised* KL,
    E_π[log π/f] + Σ_v f(v) − 1, which is not comparable with a plain run's KL; so both are logged.

    Args:
        per_token_logps: log π(y_t | s_t), any shape.
        anchor_logps: log f(y_t | s_t), the same shape.
    """
    if per_token_logps.shape != anchor_logps.shape:
        raise ValueError(
            "per_token_logps and anchor_logps must have one shape; "
            f"got {tuple(per_token_logps.shape)} and {tuple(anchor_logps.shape)}"
        )
    d = anchor_logps - per_token_logps
    return torch.expm1(d) - d


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
    use_bias_correction_kl: bool = False,
    k3_max: float | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
) -> Tensor:
    """The clipped surrogate with a guide-weighted KL penalty, reduced to a scalar.

        ρ_t   = exp(log π(y_t) − log π_old(y_t))            "sequence": one ρ from the mean log-ratio of the completion
        ℓ_t   = −min(ρ_t A, clip(ρ_t, 1 − ε, 1 + ε_high) A) + β · k3_t [· ρ_t]
        k3_t  = exp(d_t) − d_t − 1,  d_t = log q_t + log π_ref(y_t) − log π(y_t)

        grpo     mean over completions of the token mean
        bnpo     Σ ℓ / number of valid tokens
        dr_grpo  Σ ℓ / (B · max_completion_length)
        dapo     Σ ℓ / number of valid tokens

    `dapo` counts the tokens of the whole generation batch, not of one micro-batch: pass `num_items_in_batch`. `bnpo` is the
    same there up to Unsloth 2026.10.7; from 2026.10.9 it counts the micro-batch's own tokens, so that with gradient
    accumulation the two versions train on different losses.

    Args:
        per_token_logps: log π(y_t | s_t), carries the gradient, (B, T).
        ref_per_token_logps: log π_ref(y_t | s_t), (B, T); None only with `beta` 0.
        completion_mask: 1 for the tokens of the completion, (B, T).
        advantages: A, (B,) or (B, T).
        old_per_token_logps: log π_old at sampling time, (B, T); None means on-policy (ρ = 1 with its gradient kept).
        log_guide: log q_t, (B, T); None is q = 1.
        beta: KL coefficient β.
        epsilon, epsilon_high: clip range of ρ.
        use_bias_correction_kl: multiply k3 by ρ, which turns its expected gradient into that of the reverse KL.
        k3_max: upper bound of a token's k3, before that factor; None for no bound.
        max_completion_length: tokens, for `dr_grpo`.
        num_items_in_batch: valid tokens that `bnpo` and `dapo` divide by; None counts those of this batch.

    Raises:
        ValueError: an unknown `loss_type` or level, a missing reference, or shapes that differ.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}; got {loss_type!r}")
    if importance_sampling_level not in IMPORTANCE_SAMPLING_LEVELS:
        raise ValueError(
            f"importance_sampling_level must be one of {IMPORTANCE_SAMPLING_LEVELS}; "
            f"got {importance_sampling_level!r}"
        )
    mask = completion_mask.to(per_token_logps.dtype)
    valid = completion_mask.bool()
    # inf or nan in a masked position must not reach a product, where 0 · inf is nan.
    logps = torch.where(valid, per_token_logps, 0.0)
    old = (
        logps.detach()
        if old_per_token_logps is None
        else torch.where(valid, old_per_token_logps, 0.0)
    )
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)

    log_ratio = logps - old
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(
            min=1
        )
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)

    if beta != 0.0:
        if ref_per_token_logps is None:
            raise ValueError(
                f"ref_per_token_logps is needed because beta is not 0; got None with beta={beta}"
            )
        anchor = ref_per_token_logps if log_guide is None else ref_per_token_logps + log_guide
        kl = k3(logps, torch.where(valid, anchor, 0.0))
        if k3_max is not None:
            kl = kl.clamp(max=k3_max)
        loss = loss + beta * (kl * ratio if use_bias_correction_kl else kl)

    if loss_type == "grpo":
        return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    total = (loss * mask).sum()
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("dr_grpo divides by max_completion_length; got None")
        return total / (loss.shape[0] * max_completion_length)
    count = float(mask.sum()) if num_items_in_batch is None else float(num_items_in_batch)
    return total / max(count, 1.0)
