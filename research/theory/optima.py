"""The optima of the paper's objectives and the updates of the implemented losses, exact, on trees.

The optima that the paper names (Eq. 2, 4, 21, 27), the exact gradient of its objective (Eq. 6), the
expected update of the loss that `losses` implements, and the fixed points where training with it
comes to rest.

Differs from the paper: it names the optimum of the objective; a loss need not lead there, so both
are computed.

float64, in nats. Shapes: C completions, T tokens of the longest, E edges (a token at a state).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from research.theory.kl_gradients import penalty
from research.theory.trees import Tree, from_here
from sage_unsloth.objective.kl import k3

CREDITS = ("none", "guide", "later", "completion")
REDUCTIONS = ("dr_grpo", "grpo")
KLS = ("forward", "reverse")


# The optima that the paper names, as distributions over completions.


def guided_optimum(
    ref_logps: Tensor, rewards: Tensor, beta: float, log_guide: Tensor | None = None
) -> Tensor:
    """Eq. 4: π ∝ q · π_ref · exp(r/β), and without a guide Eq. 2; probabilities, (C,).

    Args:
        ref_logps: log π_ref(y | x), (C,); what it lacks to sum 1 does not matter.
        rewards: r, (C,).
        beta: β > 0.
        log_guide: log q(x, y) = Σ_t log q_t, (C,).
    """
    _check_positive("beta", beta)
    return (ref_logps + (0 if log_guide is None else log_guide) + rewards / beta).softmax(0)


def entropy_bonus_optimum(ref_logps: Tensor, rewards: Tensor, beta: float, alpha: float) -> Tensor:
    """Eq. 21, the optimum with an entropy bonus α·H(π): Eq. 2 at another temperature, (C,).

    π ∝ π_ref^(β/(α+β)) · exp(r/(α+β))
    """
    _check_positive("beta", beta)
    if not alpha >= 0:
        raise ValueError(f"alpha must be >= 0 because it is a bonus on entropy, got {alpha}")
    return ((beta * ref_logps + rewards) / (alpha + beta)).softmax(0)


def forward_kl_optimum(ref_logps: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Eq. 27, the optimum with a penalty β·KL(π_ref‖π): π = β π_ref / (λ − r), (C,).

    λ > max r is the root of Σπ = 1, by bisection to the last bit: scipy's `brentq` stops at an
    absolute tolerance, and λ − max r may be as small as β π_ref of one completion. `exp(ref_logps)`
    may sum to q ≠ 1: the factor is one on β, as a prefix's guide is per token.
    """
    _check_positive("beta", beta)
    weight = beta * ref_logps.exp()
    # In gap = λ − max r: one term alone is 1 at the lower end, every term at most its share at the
    # upper.
    short = rewards.max() - rewards
    low, high = weight[short.argmin()], weight.sum()
    for _ in range(200):
        middle = (low + high) / 2
        if (weight / (middle + short)).sum() > 1:
            low = middle
        else:
            high = middle
    return weight / ((low + high) / 2 + short)


def objective(
    logps: Tensor,
    ref_logps: Tensor,
    rewards: Tensor,
    beta: float,
    *,
    log_guide: Tensor | None = None,
    alpha: float = 0.0,
    kl: str = "reverse",
) -> Tensor:
    """E_π[r] − β·KL + α·H(π), a scalar with the gradient; all of completions, (C,).

    kl="reverse": the pseudo-KL E_π[log π − log π_ref − log q] of Eq. 5, with q = 1 the objective of
    Eq. 1, with α that of Eq. 21. kl="forward": KL(π_ref‖π), the objective of Eq. 27, which takes no
    guide.
    """
    check_kl(kl)
    probability = logps.exp()
    value = (probability * (rewards - alpha * logps)).sum()
    if kl == "forward":
        if log_guide is not None:
            raise ValueError("log_guide must be None with kl='forward': Eq. 27 has no guide")
        return value - beta * (ref_logps.exp() * (ref_logps - logps)).sum()
    anchor = ref_logps if log_guide is None else ref_logps + log_guide
    return value - beta * (probability * (logps - anchor)).sum()


# The gradient of the objective, and the update of the implemented loss.


def guided_gradient(
    tree: Tree, logits: Tensor, ref_logps: Tensor, beta: float, log_guide: Tensor | None = None
) -> Tensor:
    """The exact gradient of Eq. 6, with q held constant, (E,).

        J_q = E_π[r − β Σ_t (log π − log π_ref − log q_t)]

    The objective is enumerated and differentiated as a function; no estimator and no credit
    assignment come in.

    Args:
        ref_logps: log π_ref(y_t | s_t), (E,).
        log_guide: log q_t, (C, T).
    """
    _check_positive("beta", beta)
    logits = logits.detach().requires_grad_()
    value = objective(
        tree.completion_logps(tree.logps(logits)),
        tree.completion_logps(ref_logps),
        tree.rewards,
        beta,
        log_guide=None if log_guide is None else (log_guide * tree.mask).sum(1),
    )
    return torch.autograd.grad(value, logits)[0]


def expected_update(
    tree: Tree,
    logits: Tensor,
    ref_logps: Tensor,
    beta: float,
    kl_estimator: str = "k3",
    *,
    log_guide: Tensor | None = None,
    credit: str = "none",
    scale_rewards: bool = False,
    loss_type: str = "dr_grpo",
) -> Tensor:
    """The expected on-policy ascent direction of `loss.grpo_loss` with credit, −∇E[Σ_t ℓ_t], (E,).

        E[Σ_t A ∇log π_t − β ∇penalty_t + β b_t ∇log π_t]

        none        b_t = 0, as the paper's loss
        guide       b_t = Σ_{t'>t} log q_t', without the later KL: not Eq. 6's gradient
        later       b_t = Σ_{t'>t} (log q_t' − k3(π, π_ref)_t'), the later tokens' guide and KL
        completion  as later, with log q_t' of the earlier tokens too, for a guide that reads later
        tokens

    With "k3-is" and q read from the prefix and the token, "later" makes this Eq. 6's gradient; a
    guide that reads later tokens (`TokenGuide`) needs "completion". k3 to the plain π_ref stands
    for log π − log π_ref: the same mean whatever the prefix, and less variance while π is near
    π_ref. To q·π_ref it would not do: its mean has Σ_v qπ_ref − 1 in it.

    Args:
        ref_logps: log π_ref(y_t | s_t), (E,).
        log_guide: log q_t, (C, T), held constant.
        scale_rewards: A = (r − E[r]) / sd(r), as a large group has it; else A = r, whose baseline
            drops out. The update is then 1/sd(r) times the one without it at β · sd(r): the better
            the policy, the weaker the KL.
        loss_type: "dr_grpo" is the sum over a completion's tokens, up to a constant; so are "dapo"
            and "bnpo" in a large batch. "grpo" is their mean, which divides each completion by its
            own length and so changes the direction where lengths differ.

    Raises:
        ValueError: unknown names, or `scale_rewards` where all rewards are the same.
    """
    _check_positive("beta", beta)
    if credit not in CREDITS:
        raise ValueError(f"credit must be one of {CREDITS}, got {credit!r}")
    if loss_type not in REDUCTIONS:
        raise ValueError(f"loss_type must be one of {REDUCTIONS}, got {loss_type!r}")
    logits = logits.detach().requires_grad_()
    logps, ref = tree.table(tree.logps(logits)), tree.table(ref_logps)
    log_guide = torch.zeros_like(ref) if log_guide is None else log_guide * tree.mask
    probability = logps.detach().sum(1).exp()
    advantages = tree.rewards
    if scale_rewards:
        mean = (probability * tree.rewards).sum()
        deviation = (probability * (tree.rewards - mean) ** 2).sum().sqrt()
        if not deviation > 0:
            raise ValueError(
                "scale_rewards needs rewards that differ because it divides by their deviation, "
                f"got {tree.rewards.tolist()}"
            )
        advantages = (tree.rewards - mean) / deviation
    bonus = torch.zeros_like(ref)
    if credit != "none":
        guide = log_guide.sum(1, keepdim=True) if credit == "completion" else from_here(log_guide)
        later_kl = from_here(k3(logps.detach(), ref)) - k3(logps.detach(), ref)
        bonus = guide - log_guide - (0 if credit == "guide" else later_kl)
    gain = (advantages.unsqueeze(1) + beta * bonus) * logps
    gain = (gain - beta * penalty(kl_estimator, logps, ref + log_guide)) * tree.mask
    share = probability / tree.mask.sum(1) if loss_type == "grpo" else probability
    return torch.autograd.grad((share * gain.sum(1)).sum(), logits)[0]


# Where training comes to rest.


def ascend(
    tree: Tree,
    logps: Tensor,
    update: Callable[[Tensor], Tensor],
    *,
    rate: float = 0.25,
    steps: int = 20_000,
    tolerance: float = 1e-10,
) -> list[Tensor]:
    """Follows `update` in the metric of the natural gradient until it rests; the policies on the
    way, each log π, (E,).

    A step adds rate · g_e / (d(s) π(y_t | s)) to the logit of edge e: in this metric a state's
    speed does not depend on how often it is visited, so that steps are counted in hundreds. The
    points of rest are those of plain ascent, g = 0.

    Args:
        logps: where it starts, (E,).
        update: logits (E,) -> ascent direction g (E,), for example `expected_update`; it may
            compute a guide anew each time.
        tolerance: largest |g_e / (d(s) π)| that counts as rest.

    Raises:
        ValueError: not at rest after `steps`.
    """
    path = [logps.detach()]
    for _ in range(steps):
        current = path[-1]
        direction = update(current) / (tree.visits(current) * current.exp())
        if float(direction.abs().max()) < tolerance:
            return path
        path.append(tree.logps(current + rate * direction))
    raise ValueError(
        f"the update must converge within {steps} steps, but |g| is "
        f"{float(direction.abs().max()):.1e}. Lower the rate or allow more steps"
    )


def per_token_optimum(
    tree: Tree,
    ref_logps: Tensor,
    beta: float,
    *,
    log_guide: Tensor | None = None,
    kl: str = "forward",
) -> Tensor:
    """Where a per-token penalty without credit comes to rest, in closed form: log π, (E,).

        forward  (k3, forward-kl)  π(a|s) = β q π_ref / (λ_s − Q(s, a)), Eq. 27 with β q for β
        reverse  (k3-is, k2)       π(a|s) ∝ q π_ref · exp(Q(s, a)/β)

    Computed state by state from the leaves.

    Q is the expected reward alone: the KL and the guide of later tokens are not in it.

    Args:
        ref_logps: log π_ref(y_t | s_t), (E,).
        log_guide: log q_t of each edge, (E,).
    """
    check_kl(kl)
    anchor = ref_logps if log_guide is None else ref_logps + log_guide
    logps = torch.zeros_like(ref_logps)
    for t in reversed(range(tree.mask.shape[1])):
        table = tree.table(logps)
        later = (table.sum(1) - table.cumsum(1)[:, t]).exp()
        here = tree.mask[:, t].bool()
        edges = tree.edge_of[here, t]
        # Q of the edges at this depth: the completions through them, by the probability of what
        # follows.
        value = torch.zeros_like(logps).index_add(0, edges, (later * tree.rewards)[here])
        for state in tree.state_of[edges].unique():
            at = tree.state_of == state
            if kl == "forward":
                logps[at] = forward_kl_optimum(anchor[at], value[at], beta).log()
            else:
                logps[at] = (anchor[at] + value[at] / beta).log_softmax(0)
    return logps


def check_kl(kl: str) -> None:
    """Raise ValueError unless `kl` is one of `KLS`."""
    if kl not in KLS:
        raise ValueError(f"kl must be one of {KLS}, got {kl!r}")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be > 0 because it is divided by, got {value}")
