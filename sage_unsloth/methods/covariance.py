"""Token advantages by their covariance with the log-probability: Clip-Cov and KL-Cov.

To first order a policy gradient step lowers the entropy by the covariance of advantage and
log-probability (arXiv 2505.22617), and few tokens carry most of it. For the valid tokens of a
micro-batch, with means over them:

    cov_t = (A_t − mean A)(log π(y_t) − mean log π)

Both rules are functions for `shape` of `guided_kl` and do not change the KL term.
"""

import math

import torch
from torch import Tensor

from sage_unsloth.objective.signals import TokenSignals


def covariance(logps: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """cov_t, (B, T), 0 outside the mask.

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
    """Clip-Cov: advantage 0 for randomly chosen tokens with low < cov_t < high.

    This follows the paper's code; its equation drops the tokens of the highest covariance. At least
    one token of a micro-batch is dropped if any lies in the band. The code also skips tokens at the
    clip of the importance ratio; here they may be chosen.

    Args:
        advantages: (B,) or (B, T).
        share: of the valid tokens.
        low, high: the band, in units of advantage times nats.

    Returns:
        (B, T).

    Raises:
        ValueError: `share` is not in (0, 1], or low >= high.
    """
    _check_share(share, "clip-cov")
    if not low < high:
        raise ValueError(
            f"low must be below high for token_advantages='clip-cov', got {low} and {high}"
        )
    cov = covariance(signals.policy_logps, advantages, signals.mask)
    band = ((cov > low) & (cov < high) & signals.mask.bool()).flatten().nonzero().squeeze(1)
    # On the generator's device, so that a resumed run on another GPU drops the same tokens.
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
    so the penalty is a change of the advantage. The paper's code does not clip ρ: give the trainer
    a wide `epsilon` and `epsilon_high` for that. In the first update of a rollout batch ρ is 1 and
    nothing changes, so several updates a batch are needed. Equal advantages do not change either.

    Args:
        advantages: (B,) or (B, T).
        old_logps: log π_old(y_t | s_t), nats, (B, T); None if the trainer did not score it.
        share: of the valid tokens.

    Returns:
        (B, T), or the unchanged advantages without `old_logps`.

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
    """Number of valid tokens in a share, at least one."""
    return max(int(share * int(mask.bool().sum())), 1)


def _wide(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B,) or (B, T) as (B, T)."""
    return advantages.unsqueeze(1).expand(mask.shape) if advantages.dim() == 1 else advantages


def _place_values(
    advantages: Tensor, mask: Tensor, places: Tensor, values: float | Tensor
) -> Tensor:
    """The advantages as (B, T), with other values at places of the flattened tensor."""
    result = _wide(advantages, mask).clone().flatten()
    result[places] = values
    return result.reshape(mask.shape)
