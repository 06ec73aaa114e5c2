"""Guides: q(x, y) = Π_t q_t, the weight that shapes the KL anchor from π_ref into q·π_ref (arXiv 2605.18864, Eq. 7-12).

Three ways to choose q_t:

    random   q_t = 1 + σ ξ with probability ε, else 1                              (Eq. 9)
    token    q_t = 1 + α w_t + σ w_t ξ,  w_t = normalised surprisal of y_t         (Eq. 10)
    branch   q_t = 1 + ratio · max(0, H_t − threshold),  H_t = entropy before y_t  (Eq. 11)

with ξ ~ N(0, 1). Each q_t is clipped to [q_min, q_max], is a constant in the update (no gradient), and is 1 outside the
completion. What a guide returns is log q_t, because that is what is added to the reference log-probabilities.
`teacher.py` and `adaptive.py` have the guides beyond these three.

Entropies and surprisals are the policy's, as in the paper, or the reference's (`source="reference"`): then q·π_ref is one fixed
anchor for the whole run, as the theory of Eq. 4 assumes.

Differs from the authors' code: time is the optimizer step and nothing else, so it survives a checkpoint; noise comes from a
generator that the caller owns; no loop runs over rows.

Shapes: B completions, T tokens.
"""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

Q_MIN = 0.6
Q_MAX = 1.4
NORMS = ("minmax", "rank", "zscore", "causal")
SOURCES = ("policy", "reference")
OPTIONAL_SIGNALS = ("entropies", "ref_entropies", "teacher_logps")
"""The fields of `TokenSignals` that are there only if a guide needs them."""


@dataclass(frozen=True)
class TokenSignals:
    """What a guide may look at, one value for each completion token.

    Attributes:
        policy_logps: log π(y_t | s_t) of the policy being trained, nats, (B, T).
        ref_logps: log π_ref(y_t | s_t), nats, (B, T); a guide always has it (None only where nothing but metrics is computed).
        mask: nonzero where the token belongs to the completion, (B, T). Values elsewhere mean nothing and may be inf or nan.
        entropies: H_t = −Σ_v π(v | s_t) log π(v | s_t) over the whole vocabulary at the sampling temperature, nats, (B, T);
            None unless the guide needs them.
        ref_entropies: the same of π_ref, nats, (B, T); None unless the guide needs them.
        teacher_logps: log π_teacher(y_t | s_t), nats, (B, T); None unless the guide needs them.

    Raises:
        ValueError: a tensor is not (B, T), or the shapes differ.
    """

    policy_logps: Tensor
    ref_logps: Tensor | None
    mask: Tensor
    entropies: Tensor | None = None
    ref_entropies: Tensor | None = None
    teacher_logps: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = {name: tuple(v.shape) for name, v in vars(self).items() if v is not None}
        if len(set(shapes.values())) != 1 or self.mask.dim() != 2:
            raise ValueError(f"every signal must be a (B, T) tensor of one shape; got {shapes}")

    def require(self, name: str, guide: object) -> Tensor:
        """The signal `name`.

        Raises:
            ValueError: it is None.
        """
        value = getattr(self, name)
        if value is None:
            raise ValueError(
                f"{type(guide).__name__} needs the signal {name!r}; got {name}=None; pass TokenSignals(..., {name}=…), or use "
                "guided_kl, which fills in what the guide's `needs` names"
            )
        return value


@runtime_checkable
class Guide(Protocol):
    """What `guided_kl` accepts: any object with these two members is a guide.

    Attributes:
        needs: which of `OPTIONAL_SIGNALS` `log_guide` reads.
    """

    needs: Set[str]

    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32, without gradient, 0 where the mask is 0."""
        ...


@runtime_checkable
class SteeredGuide(Guide, Protocol):
    """A guide with a state of its own, which is moved after each optimizer step and kept in each checkpoint."""

    def after_step(self, metrics: Mapping[str, float]) -> None:
        """Learn from the metrics of `sage_unsloth.monitor`, pooled over the step's micro-batches and processes."""
        ...

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, as numbers; each is logged as `sage/<name>`."""
        ...

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Go on from what `state()` returned, or begin anew with None."""
        ...


@dataclass(frozen=True)
class CosineSchedule:
    """A decaying cosine with warm restarts, as a pure function of the optimizer step.

        L = max(1, ⌊max_steps / periods⌋),  c = min(⌊step / L⌋, periods − 1)
        v = lower + (upper · decay^c − lower) · ½ (1 + cos(π · (step mod L) / L))

    Attributes:
        upper: value at step 0.
        lower: value that each period falls towards.
        periods: number of periods in `max_steps`.
        decay: factor on `upper` from one period to the next.
    """

    upper: float
    lower: float
    periods: int = 8
    decay: float = 0.9

    def __post_init__(self) -> None:
        if not (math.isfinite(self.upper) and math.isfinite(self.lower) and self.lower >= 0):
            raise ValueError(
                "upper and lower must be finite and lower must be >= 0 because they scale probabilities and noise; "
                f"got upper={self.upper}, lower={self.lower}"
            )
        if self.upper < self.lower:
            raise ValueError(f"upper must be >= lower; got upper={self.upper}, lower={self.lower}")
        if self.periods < 1:
            raise ValueError(f"periods must be >= 1; got {self.periods}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay must be in (0, 1]; got {self.decay}")

    def value(self, step: int, max_steps: int) -> float:
        """The scheduled value at optimizer step `step` of `max_steps`.

        Raises:
            ValueError: `step` < 0 or `max_steps` < 1.
        """
        if step < 0 or max_steps < 1:
            raise ValueError(
                f"step must be >= 0 and max_steps >= 1; got step={step}, max_steps={max_steps}"
            )
        length = max(1, max_steps // self.periods)
        cycle = min(step // length, self.periods - 1)
        fall = 0.5 * (1 + math.cos(math.pi * (step % length) / length))
        return self.lower + (self.upper * self.decay**cycle - self.lower) * fall


@dataclass(frozen=True)
class BranchGuide:
    """Eq. 11: a stronger anchor where the policy is undecided, q_t = 1 + ratio · max(0, H_t − threshold).

    As the paper's loss differentiates it, per token, this multiplies the pull towards π_ref by q(s_t) and leaves the
    anchor's shape alone (q_t does not depend on y_t). With `ratio=0` it is plain GRPO that also logs entropies.

    Attributes:
        ratio: increase of q_t for each nat above the threshold.
        threshold: entropy from which a token counts as a branch point, nats.
        q_min, q_max: q_t is clipped to [q_min, q_max].
        source: whose entropies: "policy", as they change in training, or "reference".
    """

    ratio: float = 0.3
    threshold: float = 1.2
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    source: str = "policy"

    @property
    def needs(self) -> Set[str]:
        return {"entropies" if self.source == "policy" else "ref_entropies"}

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        _check_source(self.source)
        if not math.isfinite(self.ratio):
            raise ValueError(f"ratio must be finite; got {self.ratio}")
        if not (math.isfinite(self.threshold) and self.threshold >= 0):
            raise ValueError(
                f"threshold must be finite and >= 0 because it is an entropy in nats; got {self.threshold}"
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
        """log q_t, (B, T) float32; `step`, `max_steps` and `generator` are not used.

        Raises:
            ValueError: the signals carry no entropies of that source.
        """
        (name,) = self.needs
        excess = torch.relu(signals.require(name, self).float() - self.threshold)
        return _log_clipped(1 + self.ratio * excess, signals.mask, self.q_min, self.q_max)


@dataclass(frozen=True)
class TokenGuide:
    """Eq. 10: a larger anchor probability for surprising tokens, q_t = 1 + α w_t + σ w_t ξ.

    w_t ∈ [0, 1] is the surprisal −log π(y_t | s_t), normalised over the valid tokens of its own completion. With the paper's
    norms q_t therefore reads the whole completion, and Π_t q_t is no product of factors that each know the past alone (Eq. 7);
    with "causal" it is.

    Attributes:
        alpha: α, mean increase of q at the most surprising token, by optimizer step.
        sigma: σ, standard deviation of the noise there.
        norm: "minmax" clips to the completion's 5 % and 95 % quantiles and rescales to [0, 1]; "rank" is rank / (n − 1);
            "zscore" is the sigmoid of the z-score (population standard deviation); "causal" is the running quantile level, the
            share of the completion up to y_t that is less surprising than y_t, itself and its equals counted half. A completion
            whose tokens cannot be told apart gets w = 0 ("minmax"), 0 for its only token ("rank") or ½ ("zscore", "causal").
        q_min, q_max: q_t is clipped to [q_min, q_max].
        source: whose surprisal: "policy", as it changes in training, or "reference".
    """

    alpha: CosineSchedule = CosineSchedule(0.3, 0.1)
    sigma: CosineSchedule = CosineSchedule(0.25, 0.1)
    norm: str = "minmax"
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    source: str = "policy"
    needs: ClassVar[Set[str]] = frozenset()

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        _check_source(self.source)
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {NORMS}; got {self.norm!r}")

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32, at optimizer step `step` of `max_steps`; ξ comes from `generator`."""
        logps = signals.policy_logps
        if self.source == "reference":
            logps = signals.require("ref_logps", self)
        weight = normalised_surprisal(logps, signals.mask, self.norm)
        alpha = self.alpha.value(step, max_steps)
        sigma = self.sigma.value(step, max_steps)
        noise = _normal_like(weight, generator)
        return _log_clipped(
            1 + alpha * weight + sigma * weight * noise, signals.mask, self.q_min, self.q_max
        )


@dataclass(frozen=True)
class RandomGuide:
    """Eq. 9: q_t = 1 + σ ξ with probability ε, else 1. E[q_t] is 1 whatever the token: GRPO plus noise, a noise floor.

    Attributes:
        epsilon: ε, probability that a token is touched, by optimizer step; at most 1.
        sigma: σ, standard deviation of q there.
        q_min, q_max: q_t is clipped to [q_min, q_max].
    """

    epsilon: CosineSchedule = CosineSchedule(0.1, 0.0)
    sigma: CosineSchedule = CosineSchedule(0.15, 0.05)
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    needs: ClassVar[Set[str]] = frozenset()

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        if self.epsilon.upper > 1:
            raise ValueError(
                f"epsilon must stay within [0, 1] because it is a probability; got upper={self.epsilon.upper}"
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
        """log q_t, (B, T) float32, at optimizer step `step` of `max_steps`; all draws come from `generator`."""
        epsilon = self.epsilon.value(step, max_steps)
        sigma = self.sigma.value(step, max_steps)
        touched = _uniform_like(signals.policy_logps, generator) < epsilon
        noise = _normal_like(signals.policy_logps, generator)
        return _log_clipped(
            torch.where(touched, 1 + sigma * noise, 1.0), signals.mask, self.q_min, self.q_max
        )


def normalised_surprisal(logps: Tensor, mask: Tensor, norm: str = "minmax") -> Tensor:
    """w_t ∈ [0, 1], (B, T) float32: −log π(y_t | s_t) on the scale of its own completion, 0 where the mask is 0."""
    valid = mask.bool()
    surprisal = torch.where(valid, -logps.detach().float(), torch.nan)
    if norm == "minmax":
        low, high = _row_quantiles(surprisal, (0.05, 0.95))
        weight = (surprisal.clamp(low, high) - low) / (high - low)
        # A constant row is 0 / 0.
        weight = torch.where(high > low, weight, 0.0)
    elif norm == "rank":
        order = torch.where(valid, surprisal, torch.inf).argsort(dim=-1, stable=True)
        rank = order.argsort(dim=-1).float()
        weight = rank / (valid.sum(-1, keepdim=True) - 1).clamp(min=1)
    elif norm == "zscore":
        count = valid.sum(-1, keepdim=True).clamp(min=1)
        mean = surprisal.nansum(-1, keepdim=True) / count
        deviation = (((surprisal - mean) ** 2).nansum(-1, keepdim=True) / count).sqrt()
        # The mean of equal numbers can be off by a rounding; what is left then is not a deviation.
        constant = deviation <= 1e-6 * mean.abs()
        weight = torch.sigmoid(torch.where(constant, 0.0, (surprisal - mean) / deviation))
    elif norm == "causal":
        weight = _running_level(surprisal)
    else:
        raise ValueError(f"norm must be one of {NORMS}; got {norm!r}")
    return torch.where(valid, weight, 0.0)


def _running_level(values: Tensor, block: int = 128) -> Tensor:
    """(#{i <= t: v_i < v_t} + ½ #{i <= t: v_i = v_t}) / #{i <= t}, (B, T), nan left out; B·block·T comparisons at a time."""
    count = (~values.isnan()).cumsum(-1).clamp(min=1)
    levels = []
    for first in range(0, values.shape[1], block):
        here = values[:, first : first + block]
        past = values[:, : first + block].unsqueeze(1)
        known = torch.ones(here.shape[1], past.shape[2], dtype=torch.bool, device=values.device)
        known = known.tril(diagonal=first)
        less = ((past < here.unsqueeze(2)) & known).sum(-1)
        equal = ((past == here.unsqueeze(2)) & known).sum(-1)
        levels.append((less + 0.5 * equal) / count[:, first : first + block])
    return torch.cat(levels, dim=1) if levels else torch.zeros_like(values)


def _row_quantiles(values: Tensor, quantiles: tuple[float, ...]) -> list[Tensor]:
    """Quantiles of each row's numbers, nan left out, by linear interpolation; each (B, 1), nan for an empty row."""
    points = torch.tensor(quantiles, dtype=values.dtype, device=values.device)
    return list(torch.nanquantile(values, points, dim=-1, keepdim=True))


def _log_clipped(guide: Tensor, mask: Tensor, q_min: float, q_max: float) -> Tensor:
    """log of the clipped guide, 0 outside the mask; nan and inf there do not come through."""
    return torch.where(mask.bool(), guide.float().clamp(q_min, q_max).log(), 0.0)


def _check_source(source: str) -> None:
    if source not in SOURCES:
        raise ValueError(f"source must be one of {SOURCES}; got {source!r}")


def check_clip(q_min: float, q_max: float) -> None:
    """Raise ValueError unless 0 < q_min <= q_max < ∞."""
    if not q_min > 0:
        raise ValueError(f"q_min must be > 0 because log q is taken; got {q_min}")
    if not q_min <= q_max < math.inf:
        raise ValueError(f"q_max must be finite and >= q_min; got q_min={q_min}, q_max={q_max}")


def _normal_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    """ξ ~ N(0, 1), drawn where the generator lives, so that the numbers do not depend on the tensor's device."""
    device = generator.device if generator is not None else "cpu"
    return torch.randn(tensor.shape, generator=generator, device=device).to(tensor.device)


def _uniform_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    device = generator.device if generator is not None else "cpu"
    return torch.rand(tensor.shape, generator=generator, device=device).to(tensor.device)
