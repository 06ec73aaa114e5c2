"""Advantages from the rewards of a group, instead of GRPO's centring and division.

Each function takes the rewards of P prompts with G completions each and returns their advantages,
(P, G). A loss that is a mean over completions then has the gradient mean_i A_i ∇log π(y_i). Each
rule states its expectation, with p the probability of a correct answer. Throughout, c is the number
of correct completions of a group, r̄ = c/G its mean reward, and C(n, k) the binomial coefficient, 0
if undefined. A nan reward (a completion that nothing graded) is left out of its group, and its
advantage is 0.

tests/objective/test_group_advantages.py checks each rule at every group size by enumeration.
"""

from collections.abc import Callable
from math import comb, sqrt

import torch
from torch import Tensor

GRPO_EPSILON = 1e-4
"""TRL's addition to the standard deviation of a group."""


def grpo(rewards: Tensor) -> Tensor:
    """(r − r̄) / (σ + 1e-4), TRL's rule for scale_rewards="group".

    σ has G − 1 in its denominator. For rewards of 0 and 1 and G → ∞ it ascends 2·arcsin√p.

    Args:
        rewards: (P, G).
    """
    return _score_group(rewards, _standardise)


def maxrl(rewards: Tensor) -> Tensor:
    """(r − r̄) / (r̄ + 1e-6), the rule of MaxRL (arXiv 2602.02710, code).

    It ascends log p truncated at order G − 1: the gradient is Σ_{j<G−1} (1−p)^j ∇p, of which GRPO
    without division has the first term. The paper's estimator without a baseline has order G; the
    code's baseline costs one order. Groups that are all wrong or all correct have advantage 0.

    Args:
        rewards: 0 or 1, (P, G); ValueError otherwise.
    """

    def weights(n: int, c: int) -> tuple[float, float]:
        mean = c / n
        return (1 - mean) / (mean + 1e-6), -mean / (mean + 1e-6)

    return _by_count(rewards, "maxrl", weights)


def nsr(rewards: Tensor) -> Tensor:
    """Correct 0, wrong −1: negative sample reinforcement (arXiv 2506.01347).

    The gradient is ∇p, that of REINFORCE, from the wrong completions alone: a group that is all
    wrong has a signal, one that is all correct has none. The code drops correct completions from
    the batch, so its scale is per wrong token; here they stay in the normaliser. The published runs
    had an entropy bonus of .001.

    Args:
        rewards: 0 or 1, (P, G); ValueError otherwise.
    """
    return _by_count(rewards, "nsr", lambda n, c: (0.0, -1.0))


def w_reinforce(rewards: Tensor, *, weight: float = 0.1) -> Tensor:
    """Correct λ, wrong −1: W-REINFORCE (arXiv 2506.01347).

    The gradient is (1 + λ) ∇p. Every group has a signal.

    Args:
        rewards: 0 or 1, (P, G).
        weight: λ, of correct completions.

    Raises:
        ValueError: a reward is neither 0 nor 1, or the weight is negative.
    """
    if weight < 0:
        raise ValueError(f"weight must be >= 0 for advantages='w-reinforce', got {weight}")
    return _by_count(rewards, "w-reinforce", lambda n, c: (weight, -1.0))


def pkpo(
    rewards: Tensor,
    *,
    k: int | None = None,
    k_last: int | None = None,
    step: int = 0,
    max_steps: int = 1,
) -> Tensor:
    """Correct k·C(G−c, k−1)/C(G−1, k−1), wrong 0: PKPO (arXiv 2505.15201, eq. 33, loo-1).

    The gradient is that of pass@k, ∇(1 − (1−p)^k), at every G ≥ k. The paper's weights are a sum
    over the group; these are G times as large, for a mean. Groups that are all wrong have advantage
    0, and so have those with more than G − k + 1 correct. The paper anneals k without saying how;
    here k goes linearly from `k` to `k_last` over training, rounded.

    Args:
        rewards: 0 or 1, (P, G).
        k: of pass@k, 1 to G; 1 is REINFORCE without a baseline. None is half of G.
        k_last: at the last step; None keeps k.

    Raises:
        ValueError: a reward is neither 0 nor 1, or a k is out of range.
    """
    k = _checked_k("pkpo", rewards, k, most=rewards.shape[1])
    if k_last is not None:
        # max_steps − 1, so that the last step has exactly k_last.
        last = _checked_k("pkpo", rewards, k_last, most=rewards.shape[1], name="k_last")
        k = round(k + (last - k) * min(1.0, step / max(1, max_steps - 1)))

    def weights(n: int, c: int) -> tuple[float, float]:
        return (k * comb(n - c, k - 1) / comb(n - 1, k - 1) if c and n >= k else 0.0), 0.0

    return _by_count(rewards, "pkpo", weights)


def maxpo(rewards: Tensor, *, k: int | None = None) -> Tensor:
    """pass@k's gradient with advantages that sum to 0: MaxPO (arXiv 2606.06080).

        correct  k·[C(G−c, k−1)/C(G−1, k−1) − (c−1)/(G−1) · C(G−c, k−1)/C(G−2, k−1)]
        wrong    −k · c/(G−1) · C(G−c−1, k−1)/C(G−2, k−1)

    The gradient is ∇(1 − (1−p)^k) at every G > k, as PKPO's, with a baseline for wrong completions
    too. Derived here from the paper's description (centred, unbiased), without its code. Groups
    that are all wrong, and those with fewer than k wrong, have advantage 0.

    Args:
        rewards: 0 or 1, (P, G).
        k: of pass@k, 1 to G − 1; None is half of G.

    Raises:
        ValueError: a reward is neither 0 nor 1, or k is out of range.
    """
    k = _checked_k("maxpo", rewards, k, most=rewards.shape[1] - 1)

    def weights(n: int, c: int) -> tuple[float, float]:
        if c == 0 or n - c < k or k >= n:  # 0 by the formula too, but for rounding
            return 0.0, 0.0
        own = comb(n - c, k - 1) / comb(n - 1, k - 1)
        others = (c - 1) / (n - 1) * comb(n - c, k - 1) / comb(n - 2, k - 1)
        return (
            k * (own - others),
            -k * c / (n - 1) * comb(n - c - 1, k - 1) / comb(n - 2, k - 1),
        )

    return _by_count(rewards, "maxpo", weights)


def pass_at_k_advantages(rewards: Tensor, *, k: int | None = None) -> Tensor:
    """Pass@k Training (arXiv 2508.10751, code): GRPO over all C(G, k) subsets of a group.

        R̄ = 1 − C(G−c, k)/C(G, k),   σ = √(R̄(1−R̄))
        correct (1 − R̄)/(σ + 1e-6),  wrong (1 − R̄ − C(G−c−1, k−1)/C(G−1, k−1))/(σ + 1e-6)

    For G → ∞ it ascends (2/k)·arcsin√pass@k, from which it is far at small G; without the division
    the gradient is (1/k − 1/G)·∇pass@k. A group with fewer than k wrong, c ≥ G − k + 1, has
    advantage 0, and so has one that is all wrong: with k = G no group has a signal.

    Args:
        rewards: 0 or 1, (P, G).
        k: size of a subset, 1 to G − 1; None is half of G.

    Raises:
        ValueError: a reward is neither 0 nor 1, or k is out of range.
    """
    k = _checked_k("pass-at-k", rewards, k, most=rewards.shape[1] - 1)

    def weights(n: int, c: int) -> tuple[float, float]:
        if k >= n:
            return 0.0, 0.0
        failing = comb(n - c, k) / comb(n, k)  # 1 − R̄
        # Population deviation of a 0/1 reward over all subsets; 1e-6 as in the paper's code.
        sigma = sqrt(failing * (1 - failing)) + 1e-6
        # Subsets of failures that leave one wrong completion out; with none wrong there is no such
        # one.
        without = comb(n - c - 1, k - 1) / comb(n - 1, k - 1) if c < n else 0.0
        return failing / sigma, (failing - without) / sigma

    return _by_count(rewards, "pass-at-k", weights)


def rs_grpo(rewards: Tensor, *, beta: float = 2.0) -> Tensor:
    """(e^{βr} / mean e^{βr} − 1) / β: RS-GRPO (arXiv 2509.24261, code).

    For G → ∞ it ascends (1/β)·log E e^{βr}, between the mean reward (β → 0) and the largest. For
    rewards of 0 and 1 it is MaxRL's with 1/(e^β − 1) instead of 1e-6, over β. Groups of equal
    rewards have advantage 0.

    Args:
        rewards: any numbers, (P, G).
        beta: β > 0, the risk sought; not the KL coefficient. ValueError otherwise.
    """
    if not beta > 0:
        raise ValueError(f"beta must be > 0 for advantages='rs-grpo', got {beta}")

    def risk_seeking(group: Tensor) -> Tensor:
        if (group == group[0]).all():
            return torch.zeros_like(group)
        # The largest reward is taken out of the exponent, and cancels.
        weight = (beta * (group - group.max())).exp()
        return (weight / weight.mean() - 1) / beta

    return _score_group(rewards, risk_seeking)


def unlikeliness(rewards: Tensor, *, mean_logps: Tensor, weight: float = 0.25) -> Tensor:
    """GRPO of r·(1 − w·rank/G), rank 0 the least likely of the group (arXiv 2506.02355, code).

    Likelihood is the mean log π_old of the completion's tokens. Ranks include correct and wrong
    completions, so an unlikely correct one earns up to 1/(1 − w) as much as a likely one. In a
    group that is all correct the ranks alone would be divided by their own deviation, so it has
    advantage 0; the published script drops it.

    Args:
        rewards: any numbers, (P, G).
        mean_logps: mean token log π_old, nats, (P, G).
        weight: w in [0, 1]; 0 is GRPO. ValueError otherwise.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight must be in [0, 1] for advantages='unlikeliness', got {weight}")

    def ranked(group: Tensor, logps: Tensor) -> Tensor:
        if (group == group[0]).all():
            return torch.zeros_like(group)
        # argsort of argsort is the rank; stable, so that equal completions keep their order.
        rank = logps.argsort(stable=True).argsort().to(group.dtype)
        return _standardise(group * (1 - weight * rank / len(group)))

    return _score_group(rewards, ranked, mean_logps)


def f_grpo(rewards: Tensor, *, gamma: float = 0.5) -> Tensor:
    """GRPO times (1 − r̄)^γ: F-GRPO (arXiv 2602.06717), a gate on nearly solved problems.

    For G → ∞ it ascends F with F'(p) = (1 − p)^γ / √(p (1 − p)). The weight is one number for a
    group, so the direction of a group's gradient is GRPO's.

    Args:
        rewards: 0 or 1, (P, G).
        gamma: γ >= 0; 0 is GRPO.

    Raises:
        ValueError: γ is negative, or a reward is neither 0 nor 1.
    """
    if not gamma >= 0:
        raise ValueError(f"gamma must be >= 0 for advantages='f-grpo', got {gamma}")
    _check_binary(rewards, "f-grpo")

    def gated(group: Tensor) -> Tensor:
        return _standardise(group) * (1 - group.mean()) ** gamma

    return _score_group(rewards, gated)


def ucpo(rewards: Tensor, *, mean_logps: Tensor, tau: float = 0.1, alpha: float = 0.1) -> Tensor:
    """GRPO plus a bonus for rare correct completions: UCPO (arXiv 2605.00365, its code).

    Among the c correct completions q = softmax of the mean token log π_old, with entropy H: A + τ
    (−log q − H). Among the wrong ones, with their own q: A − α max(0, −log q − H). A set of fewer
    than two keeps GRPO's. So a group that is all correct has a signal if its completions are not
    equally likely.

    Args:
        rewards: 0 or 1, (P, G).
        mean_logps: mean token log π_old, nats, (P, G).
        tau, alpha: >= 0; both 0 is GRPO.

    Raises:
        ValueError: τ or α is negative, or a reward is neither 0 nor 1.
    """
    if not (tau >= 0 and alpha >= 0):
        raise ValueError(
            f"tau and alpha must be >= 0 for advantages='ucpo', got tau={tau} and alpha={alpha}"
        )
    _check_binary(rewards, "ucpo")

    def uniform(group: Tensor, logps: Tensor) -> Tensor:
        result = _standardise(group)
        right = group == 1
        if right.sum() > 1:
            result[right] += tau * _excess_surprisal(logps[right])
        if (~right).sum() > 1:
            result[~right] -= alpha * _excess_surprisal(logps[~right]).clamp(min=0)
        return result

    return _score_group(rewards, uniform, mean_logps)


def _excess_surprisal(logps: Tensor) -> Tensor:
    """−log q − H(q) of q = softmax(logps), in nats; its mean under q is 0."""
    log_q = logps.log_softmax(0)
    return (log_q.exp() * log_q).sum() - log_q


def _standardise(group: Tensor) -> Tensor:
    """(r − mean) / (σ + ε) of one group, 0 for a single completion."""
    if len(group) < 2:
        return torch.zeros_like(group)
    return (group - group.mean()) / (group.std() + GRPO_EPSILON)


def _score_group(rewards: Tensor, of_group: Callable[..., Tensor], *others: Tensor) -> Tensor:
    """Applies `of_group` to each group's rewards that are not nan, in float64; 0 elsewhere."""
    result = torch.zeros_like(rewards)
    for row, group in enumerate(rewards):
        # nan is a completion that no reward had something to say of. It is outside its group.
        scored = ~group.isnan()
        if scored.any():
            given = (values[row][scored].double() for values in others)
            result[row, scored] = of_group(group[scored].double(), *given).to(rewards.dtype)
    return result


def _by_count(
    rewards: Tensor, name: str, weights: Callable[[int, int], tuple[float, float]]
) -> Tensor:
    """The advantages of a rule that depends only on the group's size and number of correct answers.

    Args:
        weights: (n, c) -> advantage of a correct and of a wrong completion.
    """
    _check_binary(rewards, name)

    def of_group(group: Tensor) -> Tensor:
        right, wrong = weights(len(group), int(group.sum()))
        return torch.where(group == 1, right, wrong).to(group.dtype)

    return _score_group(rewards, of_group)


def _check_binary(rewards: Tensor, name: str) -> None:
    others = rewards[~((rewards == 0) | (rewards == 1) | rewards.isnan())]
    if len(others):
        raise ValueError(
            f"advantages={name!r} counts right answers, so every reward must be 0 or 1, got "
            f"{others[0].item():g}. Use one such reward (or weights that add up to it), or "
            "advantages='rs-grpo'"
        )


def _checked_k(rule: str, rewards: Tensor, k: int | None, *, most: int, name: str = "k") -> int:
    size = rewards.shape[1]
    k = size // 2 if k is None else k
    if not isinstance(k, int) or not 1 <= k <= most:
        raise ValueError(
            f"{name} must be a whole number from 1 to {most} for advantages={rule!r} in groups of "
            f"{size}, got {name}={k}"
        )
    return k
