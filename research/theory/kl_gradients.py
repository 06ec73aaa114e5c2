"""The gradient of a KL estimator in expectation, by enumeration on trees, for the package's losses.

The *value* of an estimator says nothing about it: k3's mean is the reverse KL, its gradient as a
loss is the forward one's.

Gradients are with respect to the logits, (E,). float64; shapes: C completions, T tokens, E edges,
as in `trees`.
"""

from typing import Any

import torch
from torch import Tensor

from research.theory.trees import Tree, from_here
from sage_unsloth.methods.penalties import KL_ESTIMATORS, PENALTIES
from sage_unsloth.objective.kl import k3, k3_is

ESTIMATORS = ("k1", *KL_ESTIMATORS)


def penalty(kl_estimator: str, logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """The package's penalty as training differentiates it on-policy, and k1 = log π − log f."""
    if kl_estimator == "k1":
        return logps - anchor_logps
    if kl_estimator == "k3":
        return k3(logps, anchor_logps)
    if kl_estimator == "k3-is":
        return k3_is(logps, anchor_logps, (logps - logps.detach()).exp())
    if kl_estimator not in PENALTIES:
        raise ValueError(f"kl_estimator must be one of {ESTIMATORS}, got {kl_estimator!r}")
    return PENALTIES[kl_estimator](logps, anchor_logps)


def expected_gradient(
    tree: Tree,
    logits: Tensor,
    anchor_logps: Tensor,
    kl_estimator: str,
    *,
    in_reward: bool = False,
    whole: bool = False,
) -> Tensor:
    """The gradient of a KL estimator in expectation over y ~ π, (E,), by enumeration.

    As a loss, the estimator is differentiated on the samples: E[Σ_t ∇penalty_t]. In the reward its
    value is a cost that the score function carries, E[Σ_t ∇log π(y_t | s_t) · Σ_{t'>=t}
    penalty_t'].

    Args:
        anchor_logps: log f of every completion's tokens, (C, T).
        in_reward: which of the two.
        whole: one estimator of the whole completion, from d = Σ_t d_t, instead of one per
            token.
    """
    logits = logits.detach().requires_grad_()
    logps = tree.table(tree.logps(logits))
    probability = logps.detach().sum(1).exp()
    if whole:
        logps, anchor_logps = logps.sum(1, keepdim=True), anchor_logps.sum(1, keepdim=True)
        mask = torch.ones_like(logps)
    else:
        mask = tree.mask
    value = penalty(kl_estimator, logps, anchor_logps) * mask
    if in_reward:
        value = from_here(value.detach()) * logps
    return torch.autograd.grad((probability * value.sum(1)).sum(), logits)[0]


def divergence_gradients(tree: Tree, logits: Tensor, anchor_logps: Tensor) -> dict[str, Tensor]:
    """The gradients that an estimator may have, each (E,), written out; the anchor f is (E,).

    "forward" is −Σ f ∇log π and "reverse" ∇E_π[log π/f], the KLs' own gradients if f sums to 1. "of
    completions": f and π are distributions over completions. "per state": Σ_s d(s) · that of the
    distributions over the next token, the visits d(s) held.
    """
    logits = logits.detach().requires_grad_()
    logps = tree.logps(logits)
    whole, anchor = tree.completion_logps(logps), tree.completion_logps(anchor_logps)
    visits = tree.visits(logps.detach())
    terms = {
        "forward, of completions": -(anchor.exp() * whole).sum(),
        "reverse, of completions": (whole.exp() * (whole - anchor)).sum(),
        "forward, per state": -(visits * anchor_logps.exp() * logps).sum(),
        "reverse, per state": (visits * logps.exp() * (logps - anchor_logps)).sum(),
    }
    result = {
        name: torch.autograd.grad(term, logits, retain_graph=True)[0]
        for name, term in terms.items()
    }
    result["reverse − forward, of completions"] = (
        result["reverse, of completions"] - result["forward, of completions"]
    )
    result["reverse, of completions − forward, per state"] = (
        result["reverse, of completions"] - result["forward, per state"]
    )
    return {"zero": torch.zeros_like(logits.detach())} | result


def gradient_table(tree: Tree, logits: Tensor, anchor_logps: Tensor) -> list[dict]:
    """Which estimator has which gradient in expectation: a row for each estimator, place and unit.

    `gradient` is the name in `divergence_gradients` that it equals to 1e-9 of the reverse KL's
    norm, or "neither". `off forward` and `off reverse` are the distances to those two (of
    completions if `unit` is "completion", else per state), relative to their norms.
    """
    targets = divergence_gradients(tree, logits, anchor_logps)
    scale = float(targets["reverse, of completions"].norm())
    rows = []
    for unit in ("token", "completion"):
        for kl_estimator in ESTIMATORS:
            for in_reward in (False, True):
                result = expected_gradient(
                    tree,
                    logits,
                    tree.table(anchor_logps),
                    kl_estimator,
                    in_reward=in_reward,
                    whole=unit == "completion",
                )
                named = [
                    name for name, g in targets.items() if float((result - g).norm()) < 1e-9 * scale
                ]
                row: dict[str, Any] = {
                    "unit": unit,
                    "estimator": kl_estimator,
                    "place": "reward" if in_reward else "loss",
                }
                row["gradient"] = named[0] if named else "neither"
                for kl in ("forward", "reverse"):
                    of = targets[
                        f"{kl}, of completions" if unit == "completion" else f"{kl}, per state"
                    ]
                    row[f"off {kl}"] = float((result - of).norm() / of.norm())
                rows.append(row)
    return rows


def forward_kl_gradient(
    tree: Tree, logits: Tensor, ref_logps: Tensor, weight: Tensor | None = None
) -> Tensor:
    """∇ Σ_s d(s) w(s) KL(π_ref‖π)(s), visits d and weights w held, (E,), by enumeration.

    Args:
        weight: w of the state of each edge, (E,); None is 1.
    """
    logits = logits.detach().requires_grad_()
    logps = tree.logps(logits)
    kl = ref_logps.exp() * (ref_logps - logps) * tree.visits(logps.detach())
    return torch.autograd.grad((kl if weight is None else weight * kl).sum(), logits)[0]


def k3_mean(tree: Tree, logps: Tensor, ref_logps: Tensor, log_guide: Tensor) -> dict[str, float]:
    """The mean of k3 to q·π_ref, which is the *generalised* KL, nats a completion.

        D̃(π‖qπ_ref) + Σ_s d(s) (Σ_v q π_ref − 1)

    Args:
        logps, ref_logps: log π and log π_ref, (E,).
        log_guide: log q_t of each edge, (E,).

    Returns:
        k3: E_π[Σ_t k3_t] over completions, by the package's k3; pseudo_kl: D̃, Eq. 5; excess: the
            second term, state by state.
    """
    anchor = ref_logps + log_guide
    table = tree.table(logps)
    probability = table.sum(1).exp()
    value = (k3(table, tree.table(anchor)) * tree.mask).sum(1)
    pseudo = (table - tree.table(anchor)).sum(1)
    visits = tree.visits(logps)
    return {
        "k3": float((probability * value).sum()),
        "pseudo_kl": float((probability * pseudo).sum()),
        "excess": float((visits * (anchor.exp() - ref_logps.exp())).sum()),
    }
