"""Which completions stay within reach of sampling: Theorem 4.3, modes, what is never drawn.

Theorem 4.3 is about optima under a guide that is given. A run has neither: its guide follows the
policy, and it learns from what it drew. Both are computed here, beside the theorem. float64; nats;
C completions, E edges as in `trees`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, Normal

from research.theory.kl_gradients import penalty
from research.theory.optima import guided_optimum
from research.theory.trees import Tree, guide_table
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.signals import TokenSignals


@dataclass(frozen=True)
class SupportCase:
    """What Theorem 4.3 speaks of.

    Attributes:
        ref_logps: log π_ref of each completion, (C,).
        rewards: r, (C,).
        log_guide: log q = Σ_t log q_t, (C,).
        beta: β.
        index: which completion is y*.
        delta: δ, the probability from which a completion counts as within the empirical support.
    """

    ref_logps: Tensor
    rewards: Tensor
    log_guide: Tensor
    beta: float
    index: int
    delta: float

    def __post_init__(self) -> None:
        if not 0 < self.delta < 1:
            raise ValueError(
                f"delta must lie in (0, 1) because it is a probability, got {self.delta}"
            )


def support_condition(case: SupportCase) -> dict[str, float | bool]:
    """Theorem 4.3: if q(y*) / E_RLVR[q] >= δ / π_RLVR(y*), then π_SAGE(y*) >= δ.

    Both directions hold, since π_SAGE(y*) = π_RLVR(y*) · q(y*) / E_RLVR[q] (Eq. 4 over Eq. 2).

    Returns:
        plain: π_RLVR(y*), Eq. 2; guided: π_SAGE(y*), Eq. 4; guide: q(y*); mean_guide: E_RLVR[q];
        lift and needed: the condition's two sides; holds: whether it does.
    """
    plain = guided_optimum(case.ref_logps, case.rewards, case.beta)
    guided = guided_optimum(case.ref_logps, case.rewards, case.beta, case.log_guide)
    q = case.log_guide.exp()
    mean = float((plain * q).sum())
    lift = float(q[case.index]) / mean
    needed = case.delta / float(plain[case.index])
    return {
        "plain": float(plain[case.index]),
        "guided": float(guided[case.index]),
        "guide": float(q[case.index]),
        "mean_guide": mean,
        "lift": lift,
        "needed": needed,
        "holds": lift >= needed,
    }


def literal_example() -> SupportCase:
    """Worked example A: two right answers with given entropies; π_ref = (.90, .04).

    The entropies are (.2, .2) and (2.2, .2) nats. No tree has these entropies, because the first
    token's is the same for both: it shows the arithmetic alone.
    """
    entropies = torch.tensor([[0.2, 0.2], [2.2, 0.2], [0.2, 0.2]], dtype=torch.float64)
    signals = TokenSignals(entropies, entropies, torch.ones_like(entropies), entropies)
    log_guide = BranchGuide(0.3, 1.2).log_guide(signals, step=0, max_steps=1).double().sum(1)
    ref = torch.tensor([0.90, 0.04, 0.06], dtype=torch.float64)
    rewards = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    return SupportCase(ref.log(), rewards, log_guide, beta=0.05, index=1, delta=0.05)


def tree_example() -> tuple[SupportCase, Tree, Tensor]:
    """Worked example B: the case, its tree, and log π_ref, (E,).

    First a .94, b .05 or c .01 (wrong); after a right with .98; after b eight equal tokens, one of
    them right (y*).
    """
    tree = Tree.of({"a+": 1.0, "a-": 0.0} | {f"b{i}": float(i == 0) for i in range(8)} | {"c": 0.0})
    ref = torch.tensor([0.94 * 0.98, 0.94 * 0.02] + [0.05 / 8] * 8 + [0.01], dtype=torch.float64)
    logps = tree.policy(ref)
    log_guide = guide_table(tree, BranchGuide(0.3, 1.2), logps, logps).sum(1)
    case = SupportCase(ref.log(), tree.rewards, log_guide, 0.05, tree.index("b0"), 0.008)
    return case, tree, logps


def own_guide_optimum(
    tree: Tree, ref_logps: Tensor, beta: float, guide: Guide, *, steps: int = 1000
) -> tuple[Tensor, Tensor]:
    """Eq. 4 with the guide of its own policy, as in training, where q_t follows the current π.

    π and log q that belong together, π ∝ q_π · π_ref · exp(r/β), by iteration from π_ref; (C,)
    probabilities and (C, T). The guide must be a function of the policy alone (no noise).

    Args:
        ref_logps: log π_ref(y_t | s_t), (E,).

    Raises:
        ValueError: no such pair is found in `steps` steps.
    """
    ref = tree.completion_logps(ref_logps)
    logps, probability = ref_logps, ref.exp()
    for _ in range(steps):
        table = guide_table(tree, guide, logps, ref_logps)
        new = guided_optimum(ref, tree.rewards, beta, table.sum(1))
        change = float((new - probability).abs().max())
        # Half a step: a guide that falls as the policy sharpens can swing. The guide is float32,
        # about 1e-7.
        probability = (probability + new) / 2
        logps = tree.policy(probability)
        if change < 1e-6:
            return new, table
    raise ValueError(
        f"guide and policy must converge within {steps} steps, but they move by {change:.1e}. "
        "Raise beta or steps"
    )


def random_tree(
    generator: torch.Generator, *, depth: int = 4, branching: int = 6
) -> tuple[Tree, Tensor]:
    """A tree of up to `depth` tokens with 1 to `branching` at a state, and log π_ref, (E,).

    About a third of the completions is right; the states of the random π_ref range from sure to
    undecided.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"[:branching]
    rewards: dict[str, float] = {}
    open_prefixes = [""]
    while open_prefixes:
        prefix = open_prefixes.pop()
        for letter in letters[: int(torch.randint(1, branching + 1, (), generator=generator))]:
            draw = torch.rand(2, generator=generator)
            if len(prefix) + 1 == depth or draw[0] < 0.5:
                rewards[prefix + letter] = float(draw[1] < 1 / 3)
            else:
                open_prefixes.append(prefix + letter)
    tree = Tree.of(rewards)
    spread = 4 * torch.rand(len(tree.prefixes), generator=generator, dtype=torch.float64)
    noise = torch.randn(tree.num_edges, generator=generator, dtype=torch.float64)
    return tree, tree.logps(spread[tree.state_of] * noise)


def search_trees(
    num_trees: int,
    *,
    guide: Guide | None = None,
    beta: float = 0.05,
    delta: float = 0.01,
    seed: int = 0,
) -> list[dict]:
    """Theorem 4.3 on random trees: `support_condition` for every right completion of each.

    A row has its numbers, and tree, completion, inside_before and inside_after (π_RLVR >= δ, π_SAGE
    >= δ). The guide is that of π_ref, the default `BranchGuide()`.
    """
    generator = torch.Generator().manual_seed(seed)
    guide = BranchGuide() if guide is None else guide
    rows = []
    for number in range(num_trees):
        tree, logps = random_tree(generator)
        ref = tree.completion_logps(logps)
        log_guide = guide_table(tree, guide, logps, logps, generator=generator).sum(1)
        for index in tree.rewards.nonzero().flatten().tolist():
            result = support_condition(
                SupportCase(ref, tree.rewards, log_guide, beta, index, delta)
            )
            rows.append(
                {"tree": number, "completion": "".join(tree.completions[index])}
                | result
                | {
                    "inside_before": result["plain"] >= delta,
                    "inside_after": result["guided"] >= delta,
                }
            )
    return rows


def from_anchor_to_optimum(
    tree: Tree, ref_logps: Tensor, beta: float, log_guide: Tensor
) -> list[dict]:
    """A row for each completion: q and its probabilities on the way to the optimum.

    These are `reference`, `anchor` (q·π_ref, normalised), `plain` (Eq. 2) and `guided` (Eq. 4).

    Args:
        ref_logps: log π_ref(y_t | s_t), (E,).
        log_guide: log q_t, (C, T).
    """
    whole, log_q = tree.completion_logps(ref_logps), log_guide.sum(1)
    columns = {
        "q": log_q.exp(),
        "reference": whole.exp(),
        "anchor": (whole + log_q).softmax(0),
        "plain": guided_optimum(whole, tree.rewards, beta),
        "guided": guided_optimum(whole, tree.rewards, beta, log_q),
    }
    return [
        {"completion": "".join(tree.completions[i]), "right": bool(tree.rewards[i] > 0)}
        | {name: float(values[i]) for name, values in columns.items()}
        for i in range(len(tree.completions))
    ]


# Mode seeking and mode covering.


def normal_logpdf(x: Tensor, mean: Tensor | float, deviation: Tensor | float) -> Tensor:
    """log N(x; mean, deviation²)."""
    mean, deviation = (torch.as_tensor(value, dtype=x.dtype) for value in (mean, deviation))
    return Normal(mean, deviation).log_prob(x)


def mixture_logpdf(
    x: Tensor, means: Sequence[float], deviations: Sequence[float], weights: Sequence[float]
) -> Tensor:
    """log Σ_k w_k N(x; m_k, s_k²) at each x; the weights must sum to 1."""
    if abs(sum(weights) - 1) > 1e-9:
        raise ValueError(
            f"weights must sum to 1 because they are a mixture's, got {list(weights)}. Divide by "
            f"{sum(weights)}"
        )
    shares, m, s = (torch.as_tensor(v, dtype=x.dtype) for v in (weights, means, deviations))
    return MixtureSameFamily(Categorical(shares), Normal(m, s)).log_prob(x)


def fit_gaussian(
    x: Tensor,
    log_target: Tensor,
    kl_estimator: str,
    start: tuple[float, float],
    *,
    rate: float = 0.2,
    steps: int = 5000,
) -> tuple[float, float]:
    """The Gaussian (mean, deviation) where descent on a *differentiated estimator* comes to rest.

    The policy is N(mean, deviation²), the anchor is the target, and the expectation over the policy
    is a sum over the grid, the samples' distribution held as in training. So the implemented code
    decides which KL is fitted.

    Args:
        x, log_target: even grid and log density of the target, (N,); wide enough that both
        densities
            vanish at its ends.
        kl_estimator: as in `losses`, or "k1".
        start: mean and deviation.

    Raises:
        ValueError: not at rest after `steps`.
    """
    width = float(x[1] - x[0])
    mean, log_deviation = (
        torch.tensor(v, dtype=x.dtype, requires_grad=True) for v in (start[0], math.log(start[1]))
    )
    for _ in range(steps):
        logps = normal_logpdf(x, mean, log_deviation.exp())
        loss = width * (logps.detach().exp() * penalty(kl_estimator, logps, log_target)).sum()
        slope = torch.autograd.grad(loss, (mean, log_deviation))
        if max(abs(float(g)) for g in slope) < 1e-10:
            return mean.item(), log_deviation.exp().item()
        with torch.no_grad():
            # The natural gradient of a Gaussian: the Fisher information is 1/σ² for the mean and 2
            # for log σ.
            mean -= rate * (2 * log_deviation).exp() * slope[0]
            log_deviation -= rate * slope[1] / 2
    raise ValueError(
        f"the fit must converge within {steps} steps, but the slope is "
        f"{[float(g) for g in slope]}. Start nearer or lower the rate"
    )


# What was never drawn.


@dataclass(frozen=True)
class SampledRuns:
    """Many runs of on-policy training on one prompt.

    Attributes:
        final: π at the end, (runs, C).
        first_draw: the step in which y* was first drawn, `steps` where it never was, (runs,).
        steps: optimizer steps.
    """

    final: Tensor
    first_draw: Tensor
    steps: int

    @property
    def seen(self) -> Tensor:
        """Whether y* was ever drawn, (runs,)."""
        return self.first_draw < self.steps


def train_by_sampling(
    ref_logps: Tensor,
    rewards: Tensor,
    log_guide: Tensor | None,
    *,
    index: int,
    num_generations: int,
    steps: int = 200,
    runs: int = 200,
    beta: float = 0.05,
    learning_rate: float = 0.5,
    kl_estimator: str = "k3",
    seed: int = 0,
) -> SampledRuns:
    """GRPO on a softmax over C completions: draw a group, take one gradient step, draw again.

    Advantages are (r − mean) / (standard deviation + 1e-4) of the group, the penalty is the
    package's, to q·π_ref. Runs with the same seed and group size draw with the same random numbers,
    so two settings can be compared run by run.

    Args:
        ref_logps, rewards, log_guide: as in `SupportCase`, (C,); training starts at π_ref.
        index: y*, the completion that is watched.
        num_generations: completions drawn in a step, at least 2.
        learning_rate: of the logits.
    """
    if num_generations < 2:
        raise ValueError(
            "num_generations must be >= 2 because an advantage is relative to the group, got "
            f"{num_generations}"
        )
    generator = torch.Generator().manual_seed(seed)
    anchor = ref_logps if log_guide is None else ref_logps + log_guide
    logits = ref_logps.expand(runs, -1).clone()
    first_draw = torch.full((runs,), steps)
    for step in range(steps):
        logits.requires_grad_()
        logps = logits.log_softmax(1)
        uniform = torch.rand((runs, num_generations), generator=generator, dtype=torch.float64)
        drawn = torch.searchsorted(logps.detach().exp().cumsum(1), uniform)
        drawn = drawn.clamp(max=len(ref_logps) - 1)
        met = (drawn == index).any(1) & (first_draw == steps)
        first_draw = torch.where(met, step, first_draw)
        reward = rewards[drawn]
        deviation, mean = torch.std_mean(reward, 1, keepdim=True)
        advantages = (reward - mean) / (deviation + 1e-4)
        taken = logps.gather(1, drawn)
        ratio = (taken - taken.detach()).exp()
        loss = -ratio * advantages + beta * penalty(kl_estimator, taken, anchor[drawn])
        slope = torch.autograd.grad(loss.mean(1).sum(), logits)[0]
        logits = (logits - learning_rate * slope).detach()
    return SampledRuns(logits.softmax(1), first_draw, steps)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    Raises:
        ValueError: not 0 <= successes <= trials, or no trials.
    """
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(
            f"successes must lie in [0, trials] and trials be >= 1, got {successes} of {trials}"
        )
    result = binomtest(successes, trials).proportion_ci(method="wilson")
    return float(result.low), float(result.high)
