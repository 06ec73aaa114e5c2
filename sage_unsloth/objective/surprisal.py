"""The surprisal of each token on the scale of its own completion: w_t in [0, 1] of Eq. 10."""

import torch
from torch import Tensor

NORMS = ("minmax", "rank", "zscore", "causal")


def normalised_surprisal(logps: Tensor, mask: Tensor, norm: str = "minmax") -> Tensor:
    """w_t ∈ [0, 1], (B, T) float32: −log π(y_t | s_t) on the scale of its completion; 0 outside the
    mask.
    """
    valid = mask.bool()
    surprisal = torch.where(valid, -logps.detach().float(), torch.nan)
    if norm == "minmax":
        # Quantiles and not the extremes, which keep one very rare token from pressing all others to
        # 0.
        low, high = _row_quantiles(surprisal, (0.05, 0.95))
        weight = (surprisal.clamp(low, high) - low) / (high - low)
        # A constant row is 0 / 0.
        weight = torch.where(high > low, weight, 0.0)
    elif norm == "rank":
        # argsort twice gives ranks; padding sorts last, so it takes no rank of a token.
        order = torch.where(valid, surprisal, torch.inf).argsort(dim=-1, stable=True)
        rank = order.argsort(dim=-1).float()
        weight = rank / (valid.sum(-1, keepdim=True) - 1).clamp(min=1)
    elif norm == "zscore":
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        mean = surprisal.nansum(-1, keepdim=True) / count
        deviation = (((surprisal - mean) ** 2).nansum(-1, keepdim=True) / count).sqrt()
        # The mean of equal numbers can be off by a rounding; what is left then is not a deviation.
        constant = deviation <= 1e-6 * mean.abs()
        weight = torch.sigmoid(torch.where(constant, 0.0, (surprisal - mean) / deviation))
    elif norm == "causal":
        weight = _running_level(surprisal)
    else:
        raise ValueError(f"norm must be one of {NORMS}, got {norm!r}")
    return torch.where(valid, weight, 0.0)


def _running_level(values: Tensor, block: int = 128) -> Tensor:
    """(#{i <= t: v_i < v_t} + ½ #{i <= t: v_i = v_t}) / #{i <= t}, (B, T), ignoring nan.

    B·block·T comparisons at a time.
    """
    count = (~values.isnan()).cumsum(-1).clamp(min=1)
    levels = []
    # Blocks, since (B, T, T) comparisons of a 4,096-token completion would be gigabytes.
    for first in range(0, values.shape[1], block):
        here = values[:, first : first + block]
        past = values[:, : first + block].unsqueeze(1)
        known = torch.ones(here.shape[1], past.shape[2], dtype=torch.bool, device=values.device)
        known = known.tril(diagonal=first)
        less = ((past < here.unsqueeze(2)) & known).sum(-1)
        equal = ((past == here.unsqueeze(2)) & known).sum(-1)
        levels.append((less + 0.5 * equal) / count[:, first : first + block])
    return torch.cat(levels, dim=1) if levels else torch.zeros_like(values)


def _row_quantiles(values: Tensor, quantiles: tuple[float, ...]) -> list[Tensor]:
    """Quantiles of each row's numbers, (B, 1) each, linear; nan is ignored, and nan for an empty
    row.
    """
    points = torch.tensor(quantiles, dtype=values.dtype, device=values.device)
    return list(torch.nanquantile(values, points, dim=-1, keepdim=True))
