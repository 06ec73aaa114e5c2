"""A laboratory of small policies: every completion is enumerated, so an expectation is a sum and nothing is sampled.

A policy is a softmax at each state of a tree. The optima that the paper names (Eq. 2, 4, 21, 27), the exact gradients of its
objectives, the expected gradient of what `losses` implements, and the fixed points where training with it comes to rest.

Differs from the paper: it names the optimum of the objective; a loss need not lead there, so both are computed.

Everything is float64, in nats. Shapes: C completions, T tokens of the longest, E edges. An edge is a token at a state, a state is
a prefix; values of edges (E,) become values of the completions' tokens (C, T), the package's (B, T), by `Tree.table`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_unsloth.guides import Guide, TokenSignals
from sage_unsloth.losses import KL_ESTIMATORS, PENALTIES, k3, k3_is

ESTIMATORS = ("k1", *KL_ESTIMATORS)
CREDITS = ("none", "later", "completion")
KLS = ("forward", "reverse")


@dataclass(frozen=True)
class Tree:
    """All completions of one prompt.

    Attributes:
        completions: the tokens of each; none is a prefix of another, because a completion ends where it ends.
        rewards: r of each, (C,).
        edge_of: edge of each token, 0 where there is none, (C, T).
        mask: 1.0 where there is a token, (C, T).
        state_of: state of each edge, (E,).
        prefixes: the prefix that each state is.
    """

    completions: tuple[tuple[str, ...], ...]
    rewards: Tensor
    edge_of: Tensor
    mask: Tensor
    state_of: Tensor
    prefixes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rewards: Mapping[Sequence[str], float]) -> "Tree":
        """The tree of completions -> reward; a completion is a sequence of tokens, in a string each letter is one.

        Raises:
            ValueError: no completion, an empty one, or one that is a prefix of another.
        """
        completions = tuple(tuple(c) for c in rewards)
        if not completions or () in completions:
            raise ValueError(
                f"a tree needs completions of at least one token; got {list(rewards)}; leave the empty one out"
            )
        prefixes = tuple(dict.fromkeys(c[:t] for c in completions for t in range(len(c))))
        for c in completions:
            if c in prefixes:
                raise ValueError(
                    f"no completion may be a prefix of another; got {c}; give it an end token"
                )
        edges = list(dict.fromkeys((c[:t], c[t]) for c in completions for t in range(len(c))))
        number = {edge: i for i, edge in enumerate(edges)}
        length = max(map(len, completions))
        rows = [[number[c[:t], c[t]] for t in range(len(c))] for c in completions]
        return cls(
            completions,
            torch.tensor(list(rewards.values()), dtype=torch.float64),
            torch.tensor([row + [0] * (length - len(row)) for row in rows]),
            torch.tensor(
                [[1.0] * len(row) + [0.0] * (length - len(row)) for row in rows],
                dtype=torch.float64,
            ),
            torch.tensor([prefixes.index(prefix) for prefix, _ in edges]),
            prefixes,
        )

    @property
    def num_edges(self) -> int:
        return len(self.state_of)

    def index(self, completion: Sequence[str]) -> int:
        """The number of a completion."""
        return self.completions.index(tuple(completion))

    def logps(self, logits: Tensor) -> Tensor:
        """log π(y_t | s_t) of a softmax over the edges of each state, (E,); carries the gradient."""
        self._check("logits", logits, (self.num_edges,))
        member = self.state_of == torch.arange(len(self.prefixes)).unsqueeze(1)
        normaliser = torch.where(member, logits, -torch.inf).logsumexp(1)
        return logits - normaliser[self.state_of]

    def table(self, values: Tensor) -> Tensor:
        """Values of edges (E,) as values of the completions' tokens, (C, T), 0 where there is no token."""
        self._check("values", values, (self.num_edges,))
        return values[self.edge_of] * self.mask

    def completion_logps(self, logps: Tensor) -> Tensor:
        """log π(y | x), (C,), of log π(y_t | s_t), (E,)."""
        return self.table(logps).sum(1)

    def sum_over_edges(self, values: Tensor) -> Tensor:
        """Σ over the completions through each edge of their values (C, T), (E,)."""
        flat = (values * self.mask).flatten()
        return torch.zeros(self.num_edges, dtype=flat.dtype).index_add(
            0, self.edge_of.flatten(), flat
        )

    def visits(self, logps: Tensor) -> Tensor:
        """Probability of reaching the state of each edge, (E,)."""
        table = self.table(logps)
        reached = (table.cumsum(1) - table).exp()
        through = self.mask.bool()
        # Every completion through an edge has one and the same prefix.
        return torch.zeros(self.num_edges, dtype=table.dtype).index_put(
            (self.edge_of[through],), reached[through]
        )

    def policy(self, probabilities: Tensor) -> Tensor:
        """log π(y_t | s_t), (E,), of the policy whose completions have these probabilities, (C,).

        Raises:
            ValueError: one is not > 0.
        """
        self._check("probabilities", probabilities, (len(self.completions),))
        if not bool((probabilities > 0).all()):
            raise ValueError(
                "every completion must have a probability > 0 because its logarithm is taken; "
                f"got {probabilities.tolist()}; leave impossible completions out of the tree"
            )
        weight = self.sum_over_edges(probabilities.unsqueeze(1).expand_as(self.mask))
        return self.logps(weight.log())

    def entropies(self, logps: Tensor) -> Tensor:
        """Eq. 12: H_t = −Σ_v π(v | s_t) log π(v | s_t) at the state of each edge, nats, (E,)."""
        terms = torch.zeros(len(self.prefixes), dtype=logps.dtype)
        return terms.index_add(0, self.state_of, -logps.exp() * logps)[self.state_of]

    def _check(self, name: str, value: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(value.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} of this tree; got {tuple(value.shape)}"
            )


def guide_table(
    tree: Tree,
    guide: Guide,
    logps: Tensor,
    ref_logps: Tensor,
    *,
    step: int = 0,
    max_steps: int = 8,
    generator: torch.Generator | None = None,
) -> Tensor:
    """log q_t of every completion's tokens, (C, T), as the package's own guide computes it (Eq. 9-11), float32 inside.

    (C, T) and not (E,), because random noise and the token guide's surprisal rank differ between completions that share a token.

    Args:
        logps, ref_logps: log π and log π_ref, (E,).
        step, max_steps, generator: as for `Guide.log_guide`.
    """
    logps, ref_logps = logps.detach(), ref_logps.detach()
    signals = TokenSignals(
        policy_logps=tree.table(logps),
        ref_logps=tree.table(ref_logps),
        mask=tree.mask,
        entropies=tree.table(tree.entropies(logps)) if guide.needs_entropies else None,
    )
    return guide.log_guide(signals, step=step, max_steps=max_steps, generator=generator).double()


def centred_guide(tree: Tree, log_guide: Tensor, logps: Tensor) -> Tensor:
    """log q_t − m with m = E_π[Σ_t log q_t] / E_π[T], the mean log q of a token, (C, T): Π_t q_t no longer grows with length.

    m is what the mean over the tokens of a prompt's other completions tends to in a large group. Where all completions are
    equally long it is a constant per completion, and Eq. 4 stays.
    """
    tree._check("log_guide", log_guide, tuple(tree.mask.shape))
    probability = tree.completion_logps(logps.detach()).exp().unsqueeze(1)
    mean = (probability * tree.mask * log_guide).sum() / (probability * tree.mask).sum()
    return (log_guide - mean) * tree.mask


# The optima that the objectives name, as distributions over completions.


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


def entropy_bonus_optimum(
    ref_logps: Tensor, rewards: Tensor, beta: float, alpha: float
) -> Tensor:
    """Eq. 21: π ∝ π_ref^(β/(α+β)) · exp(r/(α+β)), the optimum with an entropy bonus α·H(π): Eq. 2 at another temperature."""
    _check_positive("beta", beta)
    if not alpha >= 0:
        raise ValueError(f"alpha must be >= 0 because it is a bonus on entropy; got {alpha}")
    return ((beta * ref_logps + rewards) / (alpha + beta)).softmax(0)


def forward_kl_optimum(ref_logps: Tensor, rewards: Tensor, beta: float) -> Tensor:
    """Eq. 27: π = β π_ref / (λ − r), the optimum with a penalty β·KL(π_ref‖π); λ > max r from Σπ = 1, by bisection, (C,).

    `exp(ref_logps)` may sum to q ≠ 1: the factor is one on β, as a prefix's guide is per token.
    """
    _check_positive("beta", beta)
    weight = beta * ref_logps.exp()
    # In gap = λ − max r: one term alone is 1 at the lower end, every term at most its share at the upper.
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

    kl="reverse": the pseudo-KL E_π[log π − log π_ref − log q] of Eq. 5, with q = 1 the objective of Eq. 1, with α that of
    Eq. 21. kl="forward": KL(π_ref‖π), the objective of Eq. 27, which takes no guide.
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


# Gradients with respect to the logits, (E,).


def penalty(kl_estimator: str, logps: Tensor, anchor_logps: Tensor) -> Tensor:
    """The package's own penalty as training differentiates it on-policy, and k1 = log π − log f, which it does not offer."""
    if kl_estimator == "k1":
        return logps - anchor_logps
    if kl_estimator == "k3":
        return k3(logps, anchor_logps)
    if kl_estimator == "k3-is":
        return k3_is(logps, anchor_logps, (logps - logps.detach()).exp())
    if kl_estimator not in PENALTIES:
        raise ValueError(f"kl_estimator must be one of {ESTIMATORS}; got {kl_estimator!r}")
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

    As a loss, the estimator is differentiated on the samples: E[Σ_t ∇penalty_t]. In the reward its value is a cost that the
    score function carries, E[Σ_t ∇log π(y_t | s_t) · Σ_{t'>=t} penalty_t'].

    Args:
        anchor_logps: log f of every completion's tokens, (C, T).
        in_reward: which of the two.
        whole: one estimator of the whole completion, from d = Σ_t d_t, in the place of one per token.
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
        value = _from_here(value.detach()) * logps
    return torch.autograd.grad((probability * value.sum(1)).sum(), logits)[0]


def kl_gradients(tree: Tree, logits: Tensor, anchor_logps: Tensor) -> dict[str, Tensor]:
    """The gradients that an estimator may have, each (E,), for an anchor f given per edge, (E,); written out, no estimator used.

    "forward" is −Σ f ∇log π and "reverse" ∇E_π[log π/f], the KLs' own gradients if f sums to 1. "of completions": f and π are
    distributions over completions. "per state": Σ_s d(s) · that of the distributions over the next token, the visits d(s) held.
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
    found = {
        name: torch.autograd.grad(term, logits, retain_graph=True)[0]
        for name, term in terms.items()
    }
    found["reverse − forward, of completions"] = (
        found["reverse, of completions"] - found["forward, of completions"]
    )
    found["reverse, of completions − forward, per state"] = (
        found["reverse, of completions"] - found["forward, per state"]
    )
    return {"zero": torch.zeros_like(logits.detach())} | found


def gradient_table(tree: Tree, logits: Tensor, anchor_logps: Tensor) -> list[dict]:
    """Which estimator has which gradient in expectation: a row for each estimator, place and unit.

    `gradient` is the name in `kl_gradients` that it equals to 1e-9 of the reverse KL's norm, or "neither". `off forward` and
    `off reverse` are the distances to those two (of completions if `unit` is "completion", else per state), relative to their norms.
    """
    targets = kl_gradients(tree, logits, anchor_logps)
    scale = float(targets["reverse, of completions"].norm())
    rows = []
    for unit in ("token", "completion"):
        for kl_estimator in ESTIMATORS:
            for in_reward in (False, True):
                found = expected_gradient(
                    tree, logits, tree.table(anchor_logps), kl_estimator, in_reward=in_reward, whole=unit == "completion"
                )  # fmt: skip
                named = [
                    name for name, g in targets.items() if float((found - g).norm()) < 1e-9 * scale
                ]
                row = {"unit": unit, "estimator": kl_estimator, "place": "reward" if in_reward else "loss"}  # fmt: skip
                row["gradient"] = named[0] if named else "neither"
                for kl in KLS:
                    of = targets[
                        f"{kl}, of completions" if unit == "completion" else f"{kl}, per state"
                    ]
                    row[f"off {kl}"] = float((found - of).norm() / of.norm())
                rows.append(row)
    return rows


def guided_gradient(
    tree: Tree, logits: Tensor, ref_logps: Tensor, beta: float, log_guide: Tensor | None = None
) -> Tensor:
    """The exact gradient of Eq. 6, J_q = E_π[r − β Σ_t (log π − log π_ref − log q_t)], q held constant, (E,).

    The objective is enumerated and differentiated as a function; no estimator and no credit assignment come in.

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
) -> Tensor:
    """The ascent direction of the implemented loss in expectation, on-policy, (E,): −∇E[Σ_t ℓ_t] of `losses.grpo_loss`, and credit.

        E[Σ_t A ∇log π_t − β ∇penalty_t + β b_t ∇log π_t]

        none        b_t = 0, as the paper's loss
        later       b_t = Σ_{t'>t} (log q_t' − k3(π, π_ref)_t'): what y_t does to the later tokens' guide and KL
        completion  as later, with log q_t' of the earlier tokens too, for a guide that reads later tokens

    k3 to the plain π_ref stands for log π − log π_ref: the same mean whatever the prefix, less variance. To q·π_ref it would not
    do (its mean has Σ_v qπ_ref − 1 in it).

    Args:
        ref_logps: log π_ref(y_t | s_t), (E,).
        log_guide: log q_t, (C, T), held constant.
        scale_rewards: A = (r − E[r]) / standard deviation of r, as a large group has it; else A = r, whose baseline drops out.

    Raises:
        ValueError: unknown names, or `scale_rewards` where all rewards are the same.
    """
    _check_positive("beta", beta)
    if credit not in CREDITS:
        raise ValueError(f"credit must be one of {CREDITS}; got {credit!r}")
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
                f"scale_rewards needs rewards that differ because it divides by their deviation; got {tree.rewards.tolist()}"
            )
        advantages = (tree.rewards - mean) / deviation
    bonus = torch.zeros_like(ref)
    if credit != "none":
        guide = _from_here(log_guide) if credit == "later" else log_guide.sum(1, keepdim=True)
        later_kl = _from_here(k3(logps.detach(), ref)) - k3(logps.detach(), ref)
        bonus = guide - log_guide - later_kl
    gain = (advantages.unsqueeze(1) + beta * bonus) * logps
    gain = (gain - beta * penalty(kl_estimator, logps, ref + log_guide)) * tree.mask
    return torch.autograd.grad((probability * gain.sum(1)).sum(), logits)[0]


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
    """Follows `update` in the metric of the natural gradient until it rests; the policies on the way, each log π, (E,).

    A step adds rate · g_e / (d(s) π(y_t | s)) to the logit of edge e: in this metric a state's speed does not depend on how
    often it is visited, so that steps are counted in hundreds. The points of rest are those of plain ascent, g = 0.

    Args:
        logps: where it starts, (E,).
        update: logits (E,) -> ascent direction g (E,), for example `expected_update`; it may compute a guide anew each time.
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
        f"the update must come to rest within {steps} steps; |g| is still {float(direction.abs().max()):.1e}; "
        "lower the rate or allow more steps"
    )


def per_token_optimum(
    tree: Tree,
    ref_logps: Tensor,
    beta: float,
    *,
    log_guide: Tensor | None = None,
    kl: str = "forward",
) -> Tensor:
    """Where a per-token penalty without credit comes to rest, in closed form, state by state from the leaves, log π, (E,).

        forward  π(a|s) = β q π_ref / (λ_s − Q(s, a)): Eq. 27 with β q in the place of β        k3, forward-kl
        reverse  π(a|s) ∝ q π_ref · exp(Q(s, a)/β)                                              k3-is, k2

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
        # Q of the edges at this depth: the completions through them, by the probability of what follows.
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
        raise ValueError(f"kl must be one of {KLS}; got {kl!r}")


def _from_here(values: Tensor) -> Tensor:
    """Σ_{t'>=t} of each row."""
    return values.flip(1).cumsum(1).flip(1)


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be > 0 because it is divided by; got {value}")
