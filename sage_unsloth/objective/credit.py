"""Sequence credit: what the tokens after y_t add to its advantage under Eq. 6."""

import torch
from torch import Tensor

from sage_unsloth.objective.kl import UNSLOTH_K3_MAX, k3

CREDITS = ("token", "sequence")
REVERSE_KL_ESTIMATORS = ("k3-is", "k2")
"""Those whose expected gradient is the reverse KL's, which `credit="sequence"` completes."""


def sequence_credit(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    groups: Tensor,
    *,
    beta: float,
    log_guide: Tensor | None = None,
) -> Tensor:
    """What the tokens after y_t add to its advantage, so that the update follows Eq. 6.

    The gradient of E_π[r − β Σ_t log(π/(q·π_ref))] with q held constant gives y_t the return r and,
    with −β, the sum of the later log-ratios; a per-token penalty with the reverse KL's gradient
    holds the states fixed and gives it only its own. This is the rest, for completion i of a
    prompt:

        c_t = log q_t − k3(π_ref(y_t)/π(y_t))                          what y_t earns
        R_t = β Σ_{t' > t} c_t',    N_t = number of tokens after y_t
        result = (R_t − mean_j R_t) − β m (N_t − mean_j N_t)

    with means over the prompt's other completions j (R_t and N_t are 0 where j has ended) and m
    their mean log q per token. k3 to π_ref itself stands for log(π/π_ref): the same expectation,
    less variance. The term with m takes away what a completion would earn by length alone: Π_t q_t
    of Branch grows with every branch point, so that Eq. 4 prefers long completions. The optimum is
    π_ref · Π_t (q_t/e^m) · exp(r/β) instead, which is Eq. 4 among completions of one length. All
    means leave completion i itself out, so none biases its gradient.

    Args:
        per_token_logps: log π(y_t | s_t), (B, T); used without its gradient.
        ref_per_token_logps: log π_ref(y_t | s_t), (B, T).
        completion_mask: 1 for the tokens of the completion, (B, T).
        groups: a number for each completion, equal for those of one prompt, (B,).
        beta: KL coefficient β.
        log_guide: log q_t, (B, T); None is q = 1.

    Returns:
        (B, T) in units of reward, without gradient, 0 outside the mask; to be added to
        `leave_one_out(advantages)`.

    Raises:
        ValueError: a prompt has a single completion, so that there is nothing to compare it with.
    """
    with torch.no_grad(), torch.autocast(per_token_logps.device.type, enabled=False):
        return _sequence_credit(
            per_token_logps, ref_per_token_logps, completion_mask, groups, beta, log_guide
        )


def _sequence_credit(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    groups: Tensor,
    beta: float,
    log_guide: Tensor | None,
) -> Tensor:
    """In float32 at least: under autocast the sums over completions would be products of 16
    bits.
    """
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    per_token_logps, ref_per_token_logps = per_token_logps.to(dtype), ref_per_token_logps.to(dtype)
    valid = completion_mask.bool()
    kl = k3(per_token_logps, ref_per_token_logps, k3_max=UNSLOTH_K3_MAX)
    others = _others(groups).to(kl.dtype)
    weights = others / others.sum(-1, keepdim=True)
    earned = torch.where(valid, -kl, 0.0)
    if log_guide is None:
        later = _sum_of_later(earned)
        result = later - weights @ later
    else:
        log_guide = torch.where(valid, log_guide.to(kl.dtype), 0.0)
        tokens = valid.sum(-1, dtype=kl.dtype)
        mean = (others @ log_guide.sum(-1)) / (others @ tokens).clamp(min=1)
        later, count = _sum_of_later(earned + log_guide), _sum_of_later(valid.to(kl.dtype))
        result = later - weights @ later - mean.unsqueeze(1) * (count - weights @ count)
    return torch.where(valid, beta * result, 0.0)


def _sum_of_later(values: Tensor) -> Tensor:
    """Σ_{t' > t} values_t', (B, T)."""
    return values.flip(-1).cumsum(-1).flip(-1) - values


def leave_one_out(advantages: Tensor, groups: Tensor) -> Tensor:
    """A · n/(n − 1): TRL's A = r − mean over all n completions becomes r − mean over the n − 1
    others, (B,) or (B, T).

    With the completion's own reward in its baseline the policy gradient is (n − 1)/n of what it
    should be, and reward and KL would be weighed otherwise than in Eq. 6.
    """
    others = _others(groups).sum(-1).to(advantages.dtype)
    factor = (others + 1) / others
    return advantages * (factor if advantages.dim() == 1 else factor.unsqueeze(1))


def _others(groups: Tensor) -> Tensor:
    """Whether completions i and j are different ones of the same prompt, (B, B) bool."""
    others = groups.unsqueeze(0) == groups.unsqueeze(1)
    others.fill_diagonal_(False)
    if not others.any(-1).all():
        raise ValueError(
            "credit='sequence' compares a completion with others of its prompt, so a micro-batch "
            "must hold at least two of "
            f"each; got groups {groups.tolist()}"
        )
    return others
