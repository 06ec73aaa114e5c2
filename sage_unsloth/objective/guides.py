"""Guides: q(x, y) = Π_t q_t turns the KL anchor π_ref into q·π_ref (arXiv 2605.18864).

Three ways to choose q_t:

    random   q_t = 1 + σ ξ with probability ε, else 1                              (Eq. 9)
    token    q_t = 1 + α w_t + σ w_t ξ,  w_t = normalised surprisal of y_t         (Eq. 10)
    branch   q_t = 1 + ratio · max(0, H_t − threshold),  H_t = entropy before y_t  (Eq. 11)

with ξ ~ N(0, 1). Each q_t is clipped to [q_min, q_max], is a constant in the update (no gradient),
and is 1 outside the completion. A guide returns log q_t, which is added to the reference
log-probabilities. Other guides are in `methods/`.

Entropies and surprisals are the policy's, as in the paper, or the reference's
(`source="reference"`): then q·π_ref is one fixed anchor for the whole run, as the theory of Eq. 4
assumes.

Differs from the authors' code: time is the optimizer step alone, so it survives a checkpoint; noise
comes from the caller's generator (torch's global one with None); no loop over rows.

Shapes: B completions, T tokens.
"""

import math
from collections.abc import Set
from dataclasses import dataclass

import torch
from torch import Tensor

from sage_unsloth.objective.schedule import CosineSchedule
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.objective.surprisal import NORMS, normalised_surprisal

# The same bounds for all three guides of the paper.
Q_MIN = 0.6
Q_MAX = 1.4
SOURCES = ("policy", "reference")


@dataclass(frozen=True)
class BranchGuide:
    """Eq. 11: a stronger anchor at undecided tokens, q_t = 1 + ratio · max(0, H_t − threshold).

    In the paper's per-token loss this scales the pull towards π_ref by q(s_t) and keeps the
    anchor's shape, since q_t does not depend on y_t. With `ratio=0` it is plain GRPO that also logs
    entropies.

    Attributes:
        ratio: increase of q_t for each nat above the threshold.
        threshold: entropy above which a token counts as a branch point, nats.
        source: take entropies from the "policy", which changes in training, or the "reference".
    """

    ratio: float = 0.3
    threshold: float = 1.2
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    source: str = "policy"

    @property
    def needs(self) -> Set[str]:
        return {"entropies" if self.source == "policy" else "ref_entropies"}

    @property
    def causal(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        _check_source(self.source)
        if not math.isfinite(self.ratio):
            raise ValueError(f"ratio must be finite, got {self.ratio}")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(
                "threshold must be finite and >= 0 because it is an entropy in nats, got "
                f"{self.threshold}"
            )

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32; ValueError if the signals have no entropies of that source."""
        name = "entropies" if self.source == "policy" else "ref_entropies"
        excess = torch.relu(signals.require(name, self).float() - self.threshold)
        return _log_clipped(1 + self.ratio * excess, signals.mask, self.q_min, self.q_max)


@dataclass(frozen=True)
class TokenGuide:
    """Eq. 10: a larger anchor probability for surprising tokens, q_t = 1 + α w_t + σ w_t ξ.

    w_t ∈ [0, 1] is the surprisal −log π(y_t | s_t), normalised over the valid tokens of its
    completion. With the paper's norms q_t therefore depends on the whole completion, and Π_t q_t is
    not a product of factors that depend on the past (Eq. 7); with "causal" it is.

    Attributes:
        alpha: α, mean increase of q at the most surprising token, by optimizer step.
        sigma: σ, standard deviation of the noise there.
        norm: "minmax" clips to the completion's 5 % and 95 % quantiles and rescales to [0, 1];
            "rank" is rank / (n − 1); "zscore" is the sigmoid of the z-score (population standard
            deviation); "causal" is the running quantile level, the share of the completion up to
            y_t that is less surprising than y_t, where y_t and equal tokens count half. If all
            tokens are equal, w is 0 ("minmax"), 0 for a single token ("rank") or ½ ("zscore",
            "causal").
        source: take surprisal from the "policy", which changes in training, or the "reference".
    """

    alpha: CosineSchedule = CosineSchedule(0.3, 0.1)
    sigma: CosineSchedule = CosineSchedule(0.25, 0.1)
    norm: str = "minmax"
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    source: str = "policy"

    @property
    def causal(self) -> bool:
        """Only norm "causal": the others rank a token among later ones."""
        return self.norm == "causal"

    @property
    def needs(self) -> Set[str]:
        return frozenset()

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        _check_source(self.source)
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}, got {self.norm!r}")

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32, at optimizer step `step` of `max_steps`."""
        logps = signals.policy_logps
        if self.source == "reference":
            logps = signals.require("ref_logps", self)
        weight = normalised_surprisal(logps, signals.mask, self.norm)
        alpha = self.alpha.value(step, max_steps)
        sigma = self.sigma.value(step, max_steps)
        # For every position, padding too: the noise of a token does not depend on the mask.
        noise = _normal_like(weight, generator)
        return _log_clipped(
            1 + alpha * weight + sigma * weight * noise, signals.mask, self.q_min, self.q_max
        )


@dataclass(frozen=True)
class RandomGuide:
    """Eq. 9: q_t = 1 + σ ξ with probability ε, else 1.

    E[q_t] is 1 for every token. This is GRPO plus noise, so it shows how much noise alone changes.

    Attributes:
        epsilon: ε, probability that a token's q is changed, by optimizer step; at most 1.
        sigma: σ, standard deviation of q at such a token.
    """

    epsilon: CosineSchedule = CosineSchedule(0.1, 0.0)
    sigma: CosineSchedule = CosineSchedule(0.15, 0.05)
    q_min: float = Q_MIN
    q_max: float = Q_MAX

    @property
    def needs(self) -> Set[str]:
        return frozenset()

    @property
    def causal(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        if self.epsilon.upper > 1:
            raise ValueError(
                "epsilon must stay within [0, 1] because it is a probability, got "
                f"upper={self.epsilon.upper}"
            )

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32, at optimizer step `step` of `max_steps`."""
        epsilon = self.epsilon.value(step, max_steps)
        sigma = self.sigma.value(step, max_steps)
        # Both draws are of full shape, whatever epsilon is, so that a resumed run draws the same
        # numbers.
        touched = _uniform_like(signals.policy_logps, generator) < epsilon
        noise = _normal_like(signals.policy_logps, generator)
        return _log_clipped(
            torch.where(touched, 1 + sigma * noise, 1.0), signals.mask, self.q_min, self.q_max
        )


def _log_clipped(guide: Tensor, mask: Tensor, q_min: float, q_max: float) -> Tensor:
    """log of the clipped guide; 0 outside the mask, where it may be nan or inf."""
    # Clip before the logarithm: q can be below 0, since ξ has no bound.
    return torch.where(mask.bool(), guide.float().clamp(q_min, q_max).log(), 0.0)


def clip_guide(log_guide: Tensor, mask: Tensor, q_min: float, q_max: float) -> Tensor:
    """log q within the bounds of q, 0 outside the mask."""
    within = log_guide.clamp(math.log(q_min), math.log(q_max))
    return torch.where(mask.bool(), within, 0.0)


def _check_source(source: str) -> None:
    if source not in SOURCES:
        raise ValueError(f"source must be one of {SOURCES}, got {source!r}")


def check_clip(q_min: float, q_max: float) -> None:
    """Raises ValueError unless 0 < q_min <= q_max < ∞."""
    if not q_min > 0:
        raise ValueError(f"q_min must be > 0 because log q is taken, got {q_min}")
    if not q_min <= q_max < math.inf:
        raise ValueError(f"q_max must be finite and >= q_min, got q_min={q_min}, q_max={q_max}")


def _normal_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    """ξ ~ N(0, 1), drawn where the generator lives, so that the numbers do not depend on the
    tensor's device.
    """
    device = generator.device if generator is not None else "cpu"
    return torch.randn(tensor.shape, generator=generator, device=device).to(tensor.device)


def _uniform_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else "cpu"
    return torch.rand(tensor.shape, generator=generator, device=device).to(tensor.device)
