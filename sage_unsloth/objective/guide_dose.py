"""How much a guide can change, from completions sampled before training.

With credit="sequence" the optimum is π* ∝ q π_ref exp(r/β) (Eq. 4), so a completion y earns β Σ_t
log q_t in addition to its reward. GRPO divides rewards by their deviation σ in the group, so in
units of reward the guide pays

    β · σ · S(y),    S(y) = Σ_t log q_t, nats.

Let Δ be the largest difference of S between two correct completions. (Where their lengths differ,
the guide pays more or less: credit subtracts the prompt's mean log q per token.) A way of working
that solves a share `gap` more of the training rows than another earns `gap` more reward, so the
guide can keep the other one only if β·σ·Δ >= gap. With credit="token", a guide that
depends only on the prefix scales the pull towards π_ref by q_t: it is GRPO with about β times mean
q.

Shapes: B completions, T tokens.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHARE_DIFFERENCE = 0.5
"""Difference between the shares of rows that two ways solve; .53 on the embedded task."""


@dataclass(frozen=True)
class GuideDose:
    """How many tokens a guide changes, and which completions it pays.

    Attributes:
        touched: share of completion tokens with q ≠ 1.
        guide_mean: mean of q over the tokens.
        correct, wrong: mean Σ log q of a correct and of a wrong completion, nats; None without any.
        spread: Δ, the largest difference of Σ log q between two correct completions, nats; between
            any two if fewer than two are correct.
        sigma: σ, the mean deviation of rewards in groups with different rewards; 1 without any.
    """

    touched: float
    guide_mean: float
    correct: float | None
    wrong: float | None
    spread: float
    sigma: float

    def payment(self, beta: float) -> float:
        """β·σ·Δ: the most that the guide pays one correct completion over another, in reward."""
        return beta * self.sigma * self.spread

    def needed_beta(self, gap: float = SHARE_DIFFERENCE) -> float | None:
        """The smallest β with `payment` >= gap; None if there is none."""
        return gap / (self.sigma * self.spread) if self.spread > 0 else None

    def needed_spread(self, beta: float, gap: float = SHARE_DIFFERENCE) -> float:
        """The smallest Δ, nats, with `payment` >= gap."""
        return gap / (beta * self.sigma)


def compute_dose(
    log_guide: Tensor,
    mask: Tensor,
    correct: Sequence[bool],
    rewards: Sequence[float],
    groups: Sequence[Hashable],
    scale_rewards: str = "group",
) -> GuideDose:
    """The dose of B completions.

    Args:
        log_guide: log q_t, (B, T), nats; 0 outside the mask.
        mask: nonzero at completion tokens, (B, T).
        scale_rewards: as in `RlvrConfig`; σ is 1 for "none".

    Raises:
        ValueError: no completion token.
    """
    tokens = int(mask.bool().sum())
    if not tokens:
        raise ValueError(f"a dose needs at least one completion token, got {tuple(mask.shape)}")
    # A sum over thousands of tokens near 0 loses its digits in float32.
    sums = log_guide.double().sum(-1)
    is_correct = torch.tensor(list(correct), dtype=torch.bool)
    # With fewer than two correct completions their spread is unknown; that of all bounds the
    # guide's effect from above.
    comparable = sums[is_correct] if int(is_correct.sum()) > 1 else sums
    return GuideDose(
        touched=int((log_guide != 0).sum()) / tokens,
        guide_mean=float((log_guide.double().exp() * mask.bool()).sum()) / tokens,
        correct=_mean(sums[is_correct]),
        wrong=_mean(sums[~is_correct]),
        spread=float(comparable.max() - comparable.min()),
        sigma=_sigma(rewards, groups, scale_rewards),
    )


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if len(values) else None


def _sigma(rewards: Sequence[float], groups: Sequence[Hashable], scale_rewards: str) -> float:
    if scale_rewards == "none":
        return 1.0
    by_group: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        # One key for "batch": the trainer then takes one deviation over all rewards.
        by_group.setdefault("" if scale_rewards == "batch" else group, []).append(reward)
    # n − 1 in the denominator, as in TRL.
    deviations = [
        float(torch.tensor(group, dtype=torch.float64).std())
        for group in by_group.values()
        # A dead group has no advantage that the guide could be compared with.
        if max(group) > min(group)
    ]
    return sum(deviations) / len(deviations) if deviations else 1.0


def dose_text(
    dose: GuideDose,
    beta: float,
    credit: str,
    gap: float = SHARE_DIFFERENCE,
    *,
    on_prefix: bool = True,
    comparable: bool = True,
) -> str:
    """Two or three sentences about what the guide can change at this β.

    Args:
        on_prefix: q_t depends on the tokens before t alone.
        comparable: Σ log q is paid in units of the reward, and to the same completions each step.
    """
    if not dose.touched:
        return (
            "This guide touches no token of these completions, so the run is the same without it."
        )
    sums = [
        f"{value:.3f} nats in a {name} completion"
        for name, value in (("correct", dose.correct), ("wrong", dose.wrong))
        if value is not None
    ]
    facts = (
        f"The guide changes {100 * dose.touched:.3g} % of the tokens (mean q "
        f"{dose.guide_mean:.5g}), and Σ log q is {' and '.join(sums)}."
    )
    if not comparable or (credit == "token" and not on_prefix):
        return f"{facts} How much that can change is not known for this guide and this algorithm."
    needed = dose.needed_beta(gap)
    needs = "" if needed is None else f"β {needed:.2g}, or "
    needs += f"Σ log q that differs by {dose.needed_spread(beta, gap):.3g} nats"
    if credit == "token":
        return (
            f"{facts} With credit='token' a guide that depends only on the prefix acts like β "
            # Per token a q(s_t) multiplies the pull towards π_ref, so in the mean it scales β.
            f"{beta * dose.guide_mean:.4g} instead of {beta:g}, so it cannot change which "
            f"solutions survive. With credit='sequence' it would need {needs}."
        )
    worth = (
        f"between two correct completions it is worth at most {dose.payment(beta):.2g} of a reward"
    )
    if dose.payment(beta) < gap:
        text = (
            f"{facts} At β {beta:g} this guide cannot change which solutions survive: {worth}, "
            f"less than what a method gains that solves {gap:g} more of the rows. It would need "
            f"{needs} instead of {dose.spread:.3g}."
        )
    else:
        text = f"{facts} At β {beta:g} this guide can change which solutions survive: {worth}."
    if dose.correct is not None and dose.wrong is not None and dose.wrong > dose.correct:
        text += " It favours wrong completions over correct ones."
    return text
