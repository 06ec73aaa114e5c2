"""The KL penalty per token, k3: what it estimates, and which gradient it has in expectation.

The trainers compute it themselves, with or without the importance ratio; the functions here are
what their losses are compared with, and what is logged. Other penalties: `methods/penalties.py`.

A penalty is a function of d = log f(y_t) − log π(y_t) for an anchor f = q·π_ref held constant. Its
value and its gradient estimate different things, so each says both. "In expectation" is per token:
over y_t ~ π(· | s_t), with the states s_t as they were sampled. How y_t changes the later states is
in no per-token penalty, so none has the gradient of a divergence between distributions over whole
completions: that takes `methods/credit.py` beside a penalty with the reverse KL's gradient.

Bounds, so that one rare token cannot drown a batch: Unsloth clamps d to ±`LOG_RATIO_MAX` and k3 to
`UNSLOTH_K3_MAX`, where the paper's and TRL's loss has no bound; a token beyond it still counts in
the loss, without a gradient. `k3_max` reproduces that.

Shapes: B completions, T completion tokens. Log-probabilities are in nats.
"""

import torch
from torch import Tensor

# Both are written as literals in Unsloth's loss kernel. `check_numbers` in patch/contract.py fails
# if a version of Unsloth changes one of them.
UNSLOTH_K3_MAX = 10.0
LOG_RATIO_MAX = 20.0


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
    # expm1, since k3 is about d²/2 near 0 and exp(d) − 1 would cancel.
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


def log_ratio_to(per_token_logps: Tensor, anchor_logps: Tensor) -> Tensor:
    if per_token_logps.shape != anchor_logps.shape:
        raise ValueError(
            "per_token_logps and anchor_logps must have the same shape, got "
            f"{tuple(per_token_logps.shape)} and {tuple(anchor_logps.shape)}"
        )
    return anchor_logps - per_token_logps
