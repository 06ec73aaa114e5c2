"""The guided GRPO loss and its gradient in float64, from texts and weights alone.

Independent of this package's loss, of Unsloth and of TRL: each completion is scored by one unpadded
pass of a separate model (`decoder.py`), and the loss is implemented here a second time. It is a sum
of three terms with separate gradients, since each may be wrong by itself:

    advantage   −mean over completions of the mean over tokens of min(ρ A, clip(ρ) A)
    kl          β · the same mean of exp(d) − d − 1, d = log π_ref − log π
    guide       the same with d + log q, minus `kl`

Shapes: B sequences, T completion tokens; log-probabilities in nats.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TERMS = ("advantage", "kl", "guide")
SMALL_D = 2.5  # nats; from 2.6 on Unsloth bounds k3, which the oracle does not

FLOAT16_SCALE = 2.0**12
"""Of the loss in float16, in which gradients of a token's logits would underflow."""


def completion_rows(inputs: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """(prompt ids, completion ids) of each row of a trainer's batch, without padding."""
    for row in range(inputs["prompt_ids"].shape[0]):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        ids, mask = inputs["completion_ids"][row], inputs["completion_mask"][row].bool()
        yield prompt, ids[mask]


def score_batch(
    logits: Callable[[Tensor], Tensor], inputs: Mapping[str, Any], temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log π(y_t | s_t) and H_t, each (B, T), zero outside the mask.

    Args:
        logits: of one text, (length,) token ids to (length, V).
        temperature: divides the logits.
    """
    length = inputs["completion_ids"].shape[1]
    logps, entropies = [], []
    for prompt, completion in completion_rows(inputs):
        result = logits(torch.cat([prompt, completion]))[len(prompt) - 1 : -1] / temperature
        all_logps = result.log_softmax(-1)
        padding = (0, length - len(completion))
        picked = all_logps.gather(1, completion[:, None])[:, 0]
        logps.append(torch.nn.functional.pad(picked, padding))
        entropy = -(all_logps.exp() * all_logps).sum(-1)
        entropies.append(torch.nn.functional.pad(entropy, padding))
    return torch.stack(logps), torch.stack(entropies)


def to_completion_layout(values: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Unsloth's layout as (B, T) float64.

    There each row is shifted left by its padding, and (B, T + largest left padding) wide.
    """
    valid = inputs["completion_mask"].bool()
    left_pad = inputs["prompt_mask"].shape[1] - inputs["prompt_mask"].sum(-1)
    start = (values.shape[1] - valid.shape[1]) - left_pad
    result = torch.zeros(valid.shape, dtype=torch.float64, device=values.device)
    for row, first in enumerate(start.tolist()):
        shifted = values[row, first : first + valid.shape[1]].double()
        result[row, : len(shifted)] = shifted
    return torch.where(valid, result, 0.0)


def branch_guide(
    entropies: Tensor, *, ratio: float, threshold: float, q_min: float, q_max: float
) -> Tensor:
    """log q_t of Eq. 11: q = 1 + ratio · max(0, H − threshold), clipped; entropies in nats."""
    return (1 + ratio * (entropies - threshold).clamp(min=0)).clamp(q_min, q_max).log()


def loss_terms(
    logps: Tensor,
    ref_logps: Tensor,
    log_guide: Tensor,
    lengths: Sequence[int],
    advantages: Tensor,
    *,
    beta: float,
    epsilon: float,
    old_logps: Tensor | None = None,
) -> dict[str, Tensor]:
    """The three scalars whose sum is the loss, computed per completion.

    Args:
        logps: (B, T), with gradient.
        ref_logps, log_guide, old_logps: (B, T); without `old_logps` ρ = 1.
        lengths: tokens of each completion.
        advantages: (B,).
        epsilon: ρ is clipped to [1 − ε, 1 + ε].

    Raises:
        ValueError: policy and reference differ so much that Unsloth bounds k3.
    """
    terms = {name: torch.zeros((), dtype=logps.dtype, device=logps.device) for name in TERMS}
    rows = [row for row, length in enumerate(lengths) if length]
    for row in rows:
        length, weight = lengths[row], 1 / (lengths[row] * len(lengths))
        new, ref = logps[row, :length], ref_logps[row, :length].detach()
        old = new.detach() if old_logps is None else old_logps[row, :length]
        ratio, a = (new - old).exp(), advantages[row]
        surrogate = torch.minimum(ratio * a, ratio.clamp(1 - epsilon, 1 + epsilon) * a)
        d = ref - new
        guided = d + log_guide[row, :length].detach()
        if guided.max() > SMALL_D:
            raise ValueError(
                f"log q + log π_ref − log π must be at most {SMALL_D:g} nats at each token, or "
                f"Unsloth bounds k3, got {guided.max():.1f}. Use a smaller adapter"
            )
        kl, kl_guided = (x.exp() - x - 1 for x in (d, guided))
        terms["advantage"] = terms["advantage"] - weight * surrogate.sum()
        terms["kl"] = terms["kl"] + beta * weight * kl.sum()
        terms["guide"] = terms["guide"] + beta * weight * (kl_guided - kl).sum()
    return terms


@dataclass(frozen=True)
class Expected:
    """Loss and gradient of one batch.

    Attributes:
        gradients: of each term, one flat float64 vector for each trained weight.
        ref_logps: (B, T) of the reference.
    """

    loss: float
    gradients: dict[str, dict[str, Tensor]]
    ref_logps: Tensor

    @property
    def total(self) -> dict[str, Tensor]:
        """The gradient of the loss, by the names of the weights."""
        first, *rest = (self.gradients[term] for term in TERMS)
        return {name: sum((g[name] for g in rest), start=first[name]) for name in first}


def expected_step(
    decoder: Any,
    inputs: Mapping[str, Any],
    *,
    guide: Mapping[str, float],
    source: str,
    beta: float,
    epsilon: float,
    temperature: float = 1.0,
) -> Expected:
    """Loss and gradients of a batch, in the dtype of `decoder`.

    Args:
        guide: the arguments of `branch_guide`.
        source: whose entropies the guide reads, "policy" or "reference".
    """
    device = next(iter(decoder.weights.values())).device
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in inputs.items()}
    wide = decoder.wide
    with torch.no_grad():
        ref, ref_entropies = score_batch(
            lambda ids: decoder.logits(ids, adapted=False).to(wide), batch, temperature
        )
    logps, entropies = score_batch(lambda ids: decoder.logits(ids).to(wide), batch, temperature)
    read = ref_entropies if source == "reference" else entropies.detach()
    old = batch.get("old_per_token_logps")
    terms = loss_terms(
        logps,
        ref,
        branch_guide(read, **guide),
        batch["completion_mask"].sum(-1).tolist(),
        batch["advantages"].to(wide),
        beta=beta,
        epsilon=epsilon,
        old_logps=None if old is None else to_completion_layout(old, batch).to(wide),
    )
    gradients = {}
    scale = FLOAT16_SCALE if decoder.dtype == torch.float16 else 1.0
    for term, value in terms.items():
        weights = list(decoder.adapter.values())
        result = torch.autograd.grad(value * scale, weights, retain_graph=True)
        gradients[term] = {
            name: g.double().cpu().flatten() / scale
            for name, g in zip(decoder.adapter, result, strict=True)
        }
    loss = sum(value.item() for value in terms.values())
    return Expected(loss, gradients, ref.double().cpu())
