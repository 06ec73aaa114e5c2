"""KL penalties per token, and the GRPO loss in plain torch: what Unsloth's fused loss computes, to read and to test against.

`k2`, `forward_kl` and `forward_kl_naive` also run in training (Unsloth's loss has only the k3 of the others); the rest is
what every path of the patched trainer is compared with, gradients included.

A penalty is a function of d = log f(y_t) − log π(y_t) for an anchor f = q·π_ref held constant. Its value and its gradient
estimate different things, so each says both. "In expectation" is per token: over y_t ~ π(· | s_t), with the states s_t as
they were sampled. How y_t changes the later states is in no per-token penalty, so none has the gradient of a divergence
between distributions over whole completions: that takes `sequence_credit` beside a penalty with the reverse KL's gradient.

Bounds, so that one rare token cannot drown a batch: Unsloth clamps d to ±`LOG_RATIO_MAX` and k3 to `UNSLOTH_K3_MAX`, where the
paper's and TRL's loss has no bound; a token beyond it still counts in the loss, without a gradient. `k3_max` reproduces
that. The other penalties keep their gradient: d is clamped the same, |∂penalty/∂log π| is at most `SLOPE_MAX`, and a token
beyond continues along the tangent, so that its value is at most 200 nats.

Shapes: B completions, T completion tokens. Log-probabilities are in nats.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
KL_ESTIMATORS = ("k3", "k3-is", "k2", "forward-kl", "forward-kl-naive")
CREDITS = ("token", "sequence")
REVERSE_KL_ESTIMATORS = ("k3-is", "k2")
"""Those whose expected gradient is the reverse KL's, which `credit="sequence"` completes."""
UNSLOTH_K3_MAX = 10.0
LOG_RATIO_MAX = 20.0
SLOPE_MAX = 10.0
NAIVE_KNEE = 1.7455280027406994
"""The d at which e^d · d is `SLOPE_MAX`."""


def k3(per_token_logps: Tensor, anchor_logps: Tensor, *, k3_max: float | None = None) -> Tensor:
    """The k3 estimator of the KL to an anchor f, per token: exp(d) − d − 1 with d = log f(y_t) − log π(y_t).

    For a normalised anchor its mean over y_t ~ π is KL(π‖f). For f = q·π_ref it is the *generalised* KL,
    E_π[log π/f] + Σ_v f(v) − 1, which is not comparable with a plain run's KL; so both are logged.

    Gradient in expectation: −Σ_v f(v) ∇log π(v), the *forward* KL(f‖π)'s, though the value is the reverse one's.

    Args:
        per_token_logps: log π(y_t | s_t), any shape.
        anchor_logps: log f(y_t | s_t), the same shape.
        k3_max: upper bound of a token's k3; None for no bound.

    Raises:
        ValueError: the shapes differ; so for every penalty.
    """
    d = _log_ratio(per_token_logps, anchor_logps)
    value = torch.expm1(d) - d
    return value if k3_max is None else value.clamp(max=k3_max)


def k3_is(
    per_token_logps: Tensor, anchor_logps: Tensor, ratio: Tensor, *, k3_max: float | None = None
) -> Tensor:
    """ρ · k3 with ρ = π(y_t)/π_old(y_t) differentiated too: TRL's and Unsloth's `use_bias_correction_kl`.

    Value: as k3. Gradient in expectation: ∇E_π[log π/f], that of the pseudo-KL D̃(π‖f), on-policy and off it; with q = 1
    the *reverse* KL(π‖π_ref)'s, that of Eq. 1 with the states held fixed.

    Args:
        per_token_logps, anchor_logps: as for `k3`.
        ratio: ρ, of a shape that broadcasts to theirs, with its gradient.
        k3_max: upper bound of k3 before the factor ρ, as in Unsloth 2026.10.7; 2026.10.9 bounds the product.
    """
    return k3(per_token_logps, anchor_logps, k3_max=k3_max) * ratio


def k2(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """½ d², where |d| > `SLOPE_MAX` its tangent.

    Value: KL(π‖f) up to third order in d. Gradient in expectation: Σ_v π(v) log(π(v)/f(v)) ∇log π(v) = ∇E_π[log π/f], as
    `k3_is`: the *reverse* KL's with q = 1; on-policy only.
    """
    d = _log_ratio(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    c = d.clamp(-SLOPE_MAX, SLOPE_MAX)
    return c * (d - 0.5 * c)


def forward_kl(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """Importance-weighted cross-entropy, −sg[r] · log π(y_t) with r = f(y_t)/π(y_t) = exp(d), sg: no gradient.

    To this it adds sg[r · log f(y_t) − (r − 1)], so that its value is r·log r − (r − 1) >= 0: its mean over y_t ~ π is KL(f‖π)
    for a normalised anchor, and 0 where π = f. r is truncated at `SLOPE_MAX`.

    Gradient in expectation: −Σ_v f(v) ∇log π(v), the *forward* KL(f‖π)'s, and so that of `k3`, with more variance near π = f (k3 has 1 − r in the place of −r).
    """
    d = _log_ratio(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    log_r = d.detach().clamp(max=math.log(SLOPE_MAX))
    return log_r.exp() * d - torch.expm1(log_r)


def forward_kl_naive(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """r·log r − (r − 1) with r = f(y_t)/π(y_t) = exp(d), differentiated through π; where the slope exceeds `SLOPE_MAX`, its tangent.

    Value: as `forward_kl`. Gradient in expectation: −Σ_v f(v) log(f(v)/π(v)) ∇log π(v), which is neither the forward KL's
    nor the reverse one's: the samples' own distribution is not differentiated, as it would have to be.
    """
    d = _log_ratio(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    c = d.clamp(max=NAIVE_KNEE)
    return c.exp() * c - torch.expm1(c) + SLOPE_MAX * (d - c)


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k2": k2,
    "forward-kl": forward_kl,
    "forward-kl-naive": forward_kl_naive,
}
"""The estimators that Unsloth's own loss does not have."""


def check_kl_estimator(kl_estimator: str) -> None:
    """Raise ValueError unless `kl_estimator` is one of `KL_ESTIMATORS`."""
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {KL_ESTIMATORS}; got {kl_estimator!r}")


def check_credit(credit: str, kl_estimator: str, beta: float) -> None:
    """Raise ValueError unless `credit` is one of `CREDITS` and, for "sequence", the penalty is one that it completes."""
    if credit not in CREDITS:
        raise ValueError(f"credit must be one of {CREDITS}; got {credit!r}")
    if credit == "sequence" and (kl_estimator not in REVERSE_KL_ESTIMATORS or beta == 0.0):
        raise ValueError(
            "credit='sequence' adds what the later tokens owe to a penalty with the reverse KL's gradient, so kl_estimator must "
            f"be one of {REVERSE_KL_ESTIMATORS} and beta not 0; got kl_estimator={kl_estimator!r} and beta={beta}; change "
            "these, or use credit='token'"
        )


def sequence_credit(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    groups: Tensor,
    *,
    beta: float,
    log_guide: Tensor | None = None,
) -> Tensor:
    """What the tokens after y_t add to its advantage, so that the update follows Eq. 6, not a sum of per-token penalties.

    The gradient of E_π[r − β Σ_t log(π/(q·π_ref))] with q held constant gives y_t the return r and, with a minus and β, the sum
    of the later log-ratios; a per-token penalty with the reverse KL's gradient holds the states fixed and gives it only its
    own. This is the rest, for completion i of a prompt:

        c_t = log q_t − k3(π_ref(y_t)/π(y_t))                          what y_t earns
        R_t = β Σ_{t' > t} c_t',    N_t = number of tokens after y_t
        result = (R_t − mean_j R_t) − β m (N_t − mean_j N_t)

    with means over the prompt's other completions j (R_t and N_t are 0 where j has ended) and m their mean log q per token.
    k3 to π_ref itself stands for log(π/π_ref): the same expectation, less variance. The term with m takes away what a
    completion would earn by length alone: Π_t q_t of Branch grows with every branch point, so that Eq. 4 prefers long
    completions. The optimum is π_ref · Π_t (q_t/e^m) · exp(r/β) instead, which is Eq. 4 among completions of one length.
    All means leave completion i itself out, so none biases its gradient.

    Args:
        per_token_logps: log π(y_t | s_t), (B, T); used without its gradient.
        ref_per_token_logps: log π_ref(y_t | s_t), (B, T).
        completion_mask: 1 for the tokens of the completion, (B, T).
        groups: a number for each completion, equal for those of one prompt, (B,).
        beta: KL coefficient β.
        log_guide: log q_t, (B, T); None is q = 1.

    Returns:
        (B, T) in units of reward, without gradient, 0 outside the mask; to be added to `leave_one_out(advantages)`.

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
    """In float32 at least: under autocast the sums over completions would be products of 16 bits."""
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
    """A · n/(n − 1): TRL's A = r − mean over all n completions becomes r − mean over the n − 1 others, (B,) or (B, T).

    With the completion's own reward in its baseline the policy gradient is (n − 1)/n of what it should be, and reward and
    KL would be weighed otherwise than in Eq. 6.
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
            "credit='sequence' compares a completion with others of its prompt, so a micro-batch must hold at least two of "
            f"each; got groups {groups.tolist()}"
        )
    return others


def _log_ratio(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    if per_token_logps.shape != anchor_logps.shape:
        raise ValueError(
            "per_token_logps and anchor_logps must have one shape; "
            f"got {tuple(per_token_logps.shape)} and {tuple(anchor_logps.shape)}"
        )
    return anchor_logps - per_token_logps


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
    kl_estimator: str = "k3",
    k3_max: float | None = None,
    max_completion_length: int | None = None,
    num_items_in_batch: float | None = None,
) -> Tensor:
    """The clipped surrogate with a guide-weighted KL penalty, reduced to a scalar.

        ρ_t   = exp(log π(y_t) − log π_old(y_t))            "sequence": one ρ from the mean log-ratio of the completion
        ℓ_t   = −min(ρ_t A, clip(ρ_t, 1 − ε, 1 + ε_high) A) + β · penalty_t
        d_t   = log q_t + log π_ref(y_t) − log π(y_t), the argument of the penalty

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
        kl_estimator: the penalty: `k3`, "k3-is" (`k3_is`), `k2`, "forward-kl" (`forward_kl`) or "forward-kl-naive".
        k3_max: upper bound of a token's k3, for "k3" and "k3-is"; None for no bound.
        max_completion_length: tokens, for `dr_grpo`.
        num_items_in_batch: valid tokens that `bnpo` and `dapo` divide by; None counts those of this batch.

    Raises:
        ValueError: an unknown `loss_type`, `kl_estimator` or level, a missing reference, or shapes that differ.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {LOSS_TYPES}; got {loss_type!r}")
    if importance_sampling_level not in IMPORTANCE_SAMPLING_LEVELS:
        raise ValueError(
            f"importance_sampling_level must be one of {IMPORTANCE_SAMPLING_LEVELS}; "
            f"got {importance_sampling_level!r}"
        )
    check_kl_estimator(kl_estimator)
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
        anchor = torch.where(valid, anchor, 0.0)
        if kl_estimator == "k3":
            penalty = k3(logps, anchor, k3_max=k3_max)
        elif kl_estimator == "k3-is":
            penalty = k3_is(logps, anchor, ratio, k3_max=k3_max)
        else:
            penalty = PENALTIES[kl_estimator](logps, anchor)
        loss = loss + beta * penalty

    if loss_type == "grpo":
        return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    total = (loss * mask).sum()
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("dr_grpo divides by max_completion_length; got None")
        return total / (loss.shape[0] * max_completion_length)
    count = float(mask.sum()) if num_items_in_batch is None else float(num_items_in_batch)
    return total / max(count, 1.0)
