"""KL penalties per token: what each estimates, and which gradient it has in expectation.

`k2`, `forward_kl` and `forward_kl_naive` run in training, because Unsloth's own loss has only k3,
with or without the importance ratio; `k3` and `k3_is` are what that loss is compared with.

A penalty is a function of d = log f(y_t) − log π(y_t) for an anchor f = q·π_ref held constant. Its
value and its gradient estimate different things, so each says both. "In expectation" is per token:
over y_t ~ π(· | s_t), with the states s_t as they were sampled. How y_t changes the later states is
in no per-token penalty, so none has the gradient of a divergence between distributions over whole
completions: that takes `sequence_credit` beside a penalty with the reverse KL's gradient.

Bounds, so that one rare token cannot drown a batch: Unsloth clamps d to ±`LOG_RATIO_MAX` and k3 to
`UNSLOTH_K3_MAX`, where the paper's and TRL's loss has no bound; a token beyond it still counts in
the loss, without a gradient. `k3_max` reproduces that. The other penalties keep their gradient: d
is clamped the same, |∂penalty/∂log π| is at most `SLOPE_MAX`, and a token beyond continues along
the tangent, so that its value is at most 200 nats.

Shapes: B completions, T completion tokens. Log-probabilities are in nats.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

KL_ESTIMATORS = ("k3", "k3-is", "k2", "forward-kl", "forward-kl-naive")
UNSLOTH_K3_MAX = 10.0
LOG_RATIO_MAX = 20.0
SLOPE_MAX = 10.0
NAIVE_KNEE = 1.7455280027406994
"""The d at which e^d · d is `SLOPE_MAX`."""


def k3(per_token_logps: Tensor, anchor_logps: Tensor, *, k3_max: float | None = None) -> Tensor:
    """k3, an estimator of the KL to an anchor f: exp(d) − d − 1 with d = log f(y_t) − log π(y_t).

    For a normalised anchor its mean over y_t ~ π is KL(π‖f). For f = q·π_ref it is the
    *generalised* KL, E_π[log π/f] + Σ_v f(v) − 1, which is not comparable with a plain run's KL; so
    both are logged.

    Gradient in expectation: −Σ_v f(v) ∇log π(v), the *forward* KL(f‖π)'s, though the value is the
    reverse one's.

    Args:
        per_token_logps: log π(y_t | s_t), any shape.
        anchor_logps: log f(y_t | s_t), the same shape.
        k3_max: upper bound of a token's k3; None for no bound.

    Raises:
        ValueError: the shapes differ; so for every penalty.
    """
    d = log_ratio_to(per_token_logps, anchor_logps)
    if k3_max is None:
        return torch.expm1(d) - d
    # At ±20 k3 is past any bound of use; without it e^d would overflow, and 0 · inf is nan.
    d = d.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return (torch.expm1(d) - d).clamp(max=k3_max)


def k3_is(
    per_token_logps: Tensor, anchor_logps: Tensor, ratio: Tensor, *, k3_max: float | None = None
) -> Tensor:
    """ρ · k3 with ρ = π(y_t)/π_old(y_t) differentiated too: TRL's and Unsloth's
    `use_bias_correction_kl`.

    Value: as k3. Gradient in expectation: ∇E_π[log π/f], that of the pseudo-KL D̃(π‖f), on-policy
    and off it; with q = 1 the *reverse* KL(π‖π_ref)'s, that of Eq. 1 with the states held fixed.

    Args:
        per_token_logps, anchor_logps: as for `k3`.
        ratio: ρ, of a shape that broadcasts to theirs, with its gradient.
        k3_max: upper bound of k3 before the factor ρ, as in Unsloth 2026.10.7; 2026.10.9 bounds the
            product.
    """
    return k3(per_token_logps, anchor_logps, k3_max=k3_max) * ratio


def k2(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """½ d², where |d| > `SLOPE_MAX` its tangent.

    Value: KL(π‖f) up to third order in d. Gradient in expectation: Σ_v π(v) log(π(v)/f(v)) ∇log
    π(v) = ∇E_π[log π/f], as `k3_is`: the *reverse* KL's with q = 1; on-policy only.
    """
    d = log_ratio_to(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    c = d.clamp(-SLOPE_MAX, SLOPE_MAX)
    return c * (d - 0.5 * c)


def forward_kl(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """Importance-weighted cross-entropy, −sg[r] · log π(y_t) with r = f(y_t)/π(y_t) = exp(d), sg:
    no gradient.

    To this it adds sg[r · log f(y_t) − (r − 1)], so that its value is r·log r − (r − 1) >= 0: its
    mean over y_t ~ π is KL(f‖π) for a normalised anchor, and 0 where π = f. r is truncated at
    `SLOPE_MAX`.

    Gradient in expectation: −Σ_v f(v) ∇log π(v), the *forward* KL(f‖π)'s, and so that of `k3`, with
    more variance near π = f (k3 has 1 − r in the place of −r).
    """
    d = log_ratio_to(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    log_r = d.detach().clamp(max=math.log(SLOPE_MAX))
    return log_r.exp() * d - torch.expm1(log_r)


def forward_kl_naive(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """r·log r − (r − 1) with r = f(y_t)/π(y_t) = exp(d), differentiated through π; where the slope
    exceeds `SLOPE_MAX`, its tangent.

    Value: as `forward_kl`. Gradient in expectation: −Σ_v f(v) log(f(v)/π(v)) ∇log π(v), which is
    neither the forward KL's nor the reverse one's: the samples' own distribution is not
    differentiated, as it would have to be.
    """
    d = log_ratio_to(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
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


def log_ratio_to(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    if per_token_logps.shape != anchor_logps.shape:
        raise ValueError(
            "per_token_logps and anchor_logps must have one shape; "
            f"got {tuple(per_token_logps.shape)} and {tuple(anchor_logps.shape)}"
        )
    return anchor_logps - per_token_logps
