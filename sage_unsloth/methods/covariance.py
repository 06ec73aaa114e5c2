"""Token advantages by their covariance with the log-probability: Clip-Cov and KL-Cov.

To first order a step of the policy gradient lowers the entropy by the covariance of advantage and
log-probability (arXiv 2505.22617), and few tokens carry most of it. For the valid tokens of a
micro-batch, with means over them:

    cov_t = (A_t − mean A)(log π(y_t) − mean log π)

Both rules are functions as `shape` of `guided_kl` takes them, and leave the KL term alone.
"""

import math

import torch
from torch import Tensor

from sage_unsloth.objective.signals import TokenSignals


def covariance(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """cov_t of the module's docstring, (B, T), 0 outside the mask.

    Args:
        logps: log π(y_t | s_t), nats, (B, T).
        advantages: (B,) or (B, T).
        mask: 1 for the tokens of the completion, (B, T).
    """
    valid = mask.bool()
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1).expand_as(logps)
    count = valid.sum().clamp(min=1)
    # nan in a masked position must not reach a product, where 0 · nan is nan.
    centred = [
        values - values.sum() / count
        for values in (torch.where(valid, v.float(), 0.0) for v in (advantages, logps))
    ]
    return torch.where(valid, centred[0] * centred[1], 0.0)


def clip_cov(
    signals: TokenSignals,
    advantages: Tensor,
    *,
    generator: torch.Generator,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> Tensor:
    """Clip-Cov: advantage 0 for tokens drawn at random among those with low < cov_t < high.

    As its code has it, and unlike its equation, which drops the tokens of the highest covariance.
    At least one token of a micro-batch is dropped, if any lies in the band. The code also skips
    tokens that the clip of the importance ratio holds; here they may be drawn.

    Args:
        signals: of the micro-batch.
        advantages: (B,) or (B, T).
        generator: of the draw.
        share: of the valid tokens.
        low, high: the band, in units of advantage times nats.

    Returns:
        (B, T).

    Raises:
        ValueError: `share` is not in (0, 1], or the band is empty by its limits.
    """
    _check_share(share, "clip-cov")
    if not low < high:
        raise ValueError(
            f"low must be below high for token_advantages='clip-cov', got {low} and {high}"
        )
    cov = covariance(signals.policy_logps, advantages, signals.mask)
    band = ((cov > low) & (cov < high) & signals.mask.bool()).flatten().nonzero().squeeze(1)
    # On the generator's device, so that a resumed run on another card drops the same tokens.
    order = torch.randperm(len(band), generator=generator).to(band.device)
    return _place_values(advantages, signals.mask, band[order[: _count(share, signals.mask)]], 0.0)


def kl_cov(
    signals: TokenSignals,
    advantages: Tensor,
    *,
    old_logps: Tensor | None,
    share: float = 2e-3,
    coef: float = 1.0,
) -> Tensor:
    """KL-Cov: the penalty coef · |log π − log π_old| on the share of tokens with the highest cov_t.

    The gradient of −ρ_t A_t + coef · |log ρ_t| is that of −ρ_t (A_t − coef · sign(log ρ_t) / ρ_t),
    so the penalty is a change of the advantage. Its code does not clip ρ: give the trainer a wide
    `epsilon` and `epsilon_high` for that. In the first update of a rollout batch ρ is 1 and nothing
    changes, so it needs several updates a batch. Nor where all advantages are equal.

    Args:
        signals: of the micro-batch.
        advantages: (B,) or (B, T).
        old_logps: log π_old(y_t | s_t), nats, (B, T); None in the first update.
        share: of the valid tokens.
        coef: weight of the penalty.

    Returns:
        (B, T), or the advantages as they are in the first update.

    Raises:
        ValueError: `share` is not in (0, 1], or `coef` is negative.
    """
    _check_share(share, "kl-cov")
    if coef < 0 or not math.isfinite(coef):
        raise ValueError(f"coef must be >= 0 for token_advantages='kl-cov', got {coef}")
    if old_logps is None:
        return advantages
    valid = signals.mask.bool()
    cov = covariance(signals.policy_logps, advantages, signals.mask)
    cov = torch.where(valid, cov, -torch.inf).flatten()
    wide = _wide(advantages, signals.mask)
    count = min(_count(share, signals.mask), int(valid.sum()))
    if bool((wide[valid] == wide[valid][:1]).all()):  # no covariance is above another's
        count = 0
    chosen = cov.topk(count).indices
    log_ratio = torch.where(valid, signals.policy_logps.float() - old_logps.float(), 0.0)
    # exp(−log ρ) undoes the loss's factor ρ: the penalty itself is not weighted by the ratio.
    change = coef * log_ratio.sign() * (-log_ratio).exp()
    return _place_values(wide, signals.mask, chosen, (wide - change).flatten()[chosen])


def _check_share(share: float, name: str) -> None:
    if not 0 < share <= 1:
        raise ValueError(
            f"share must be above 0 and at most 1 for token_advantages={name!r}, got {share}"
        )


def _count(share: float, mask: Tensor) -> int:
    """How many of the valid tokens a share is, one at least."""
    return max(int(share * int(mask.bool().sum())), 1)


def _wide(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B, T) of (B,) or (B, T)."""
    return advantages.unsqueeze(1).expand(mask.shape) if advantages.dim() == 1 else advantages


def _place_values(
    advantages: Tensor, mask: Tensor, places: Tensor, values: float | Tensor
) -> Tensor:
    """The advantages as (B, T), with other values at some places of the flattened tensor."""
    result = _wide(advantages, mask).clone().flatten()
    result[places] = values
    return result.reshape(mask.shape)
