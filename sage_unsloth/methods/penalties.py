"""KL penalties other than the trainers' own k3, and all penalties by name.

As in `objective/kl.py`, each is a function of d = log f(y_t) − log π(y_t) for an anchor f = q·π_ref
held constant, and states its value and its gradient in expectation over y_t ~ π(· | s_t).

Bounds: d is clamped to ±`LOG_RATIO_MAX`, |∂penalty/∂log π| is at most `SLOPE_MAX`, and a token
beyond continues along the tangent, so its value is at most 200 nats and it keeps its gradient.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sage_unsloth.objective.kl import LOG_RATIO_MAX, log_ratio_to

KL_ESTIMATORS = ("k3", "k3-is", "k2", "forward-kl", "forward-kl-naive")
"""The first two are the trainers' own."""
SLOPE_MAX = 10.0
NAIVE_KNEE = 1.7455280027406994
"""The d at which e^d · d is `SLOPE_MAX`."""


def k2(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """½ d²; its tangent if |d| > `SLOPE_MAX`.

    Value: KL(π‖f) up to third order in d. Gradient in expectation: Σ_v π(v) log(π(v)/f(v)) ∇log
    π(v) = ∇E_π[log π/f], as `k3_is`: the *reverse* KL's with q = 1; on-policy only.
    """
    d = log_ratio_to(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    c = d.clamp(-SLOPE_MAX, SLOPE_MAX)
    return c * (d - 0.5 * c)


def forward_kl(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """−sg[r] · log π(y_t) with r = f(y_t)/π(y_t) = exp(d): importance-weighted cross-entropy.

    sg means no gradient. To this it adds sg[r · log f(y_t) − (r − 1)], so that its value is r·log r
    − (r − 1) >= 0: its mean over y_t ~ π is KL(f‖π) for a normalised anchor, and 0 if π = f. r is
    truncated at `SLOPE_MAX`.

    Gradient in expectation: −Σ_v f(v) ∇log π(v), the *forward* KL(f‖π)'s, as for `k3`, with more
    variance near π = f (k3 has 1 − r instead of −r).
    """
    d = log_ratio_to(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    # Held constant, so that the gradient of the result is r · ∇d.
    log_r = d.detach().clamp(max=math.log(SLOPE_MAX))
    return log_r.exp() * d - torch.expm1(log_r)


def forward_kl_naive(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """r·log r − (r − 1) with r = exp(d), differentiated through π; tangent beyond `SLOPE_MAX`.

    Value: as `forward_kl`. Gradient in expectation: −Σ_v f(v) log(f(v)/π(v)) ∇log π(v), which is
    neither the forward KL's nor the reverse one's, because the samples' distribution is not
    differentiated.
    """
    d = log_ratio_to(per_token_logps, anchor_logps).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    # Past the knee a straight line with the slope there: no token has an unbounded gradient.
    c = d.clamp(max=NAIVE_KNEE)
    return c.exp() * c - torch.expm1(c) + SLOPE_MAX * (d - c)


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k2": k2,
    "forward-kl": forward_kl,
    "forward-kl-naive": forward_kl_naive,
}
"""Estimators that Unsloth's own loss does not have."""


def check_kl_estimator(kl_estimator: str) -> None:
    """Raises ValueError unless `kl_estimator` is one of `KL_ESTIMATORS`."""
    if kl_estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl_estimator must be one of {KL_ESTIMATORS}, got {kl_estimator!r}")
