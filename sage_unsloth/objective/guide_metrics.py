"""The metrics of a guided step, pooled over its micro-batches and processes.

    sage/guide_mean, _min, _max   q_t over the completion tokens
    sage/log_guide_mean           log q_t, nats
    sage/share_touched            share of completion tokens with q_t ≠ 1
    sage/entropy                  H_t, nats, if the guide or `log_entropy` needs entropies
    sage/ref_entropy              the same of π_ref, if the guide needs it
    sage/<name>                   the state of a steered guide (`protocols.SteeredGuide`), and token
                                  means of custom advantage terms
    kl/ref_k3                     k3 to π_ref, nats; not without a KL term
    kl/anchor_k3                  k3 to q·π_ref, nats: Unsloth's `kl` under the estimator "k3"

Without a guide only `kl/ref_k3` and `sage/entropy` are logged, whatever the penalty in the loss, so
that runs can be compared. Both k3 are means over completions of the token mean, with Unsloth's
bound for each token. Sums are pooled instead of averaging means, so that micro-batches of different
sizes have the right weight.
"""

import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.kl import LOG_RATIO_MAX, UNSLOTH_K3_MAX, k3
from sage_unsloth.objective.signals import TokenSignals

LOG_GUIDE_MAX = LOG_RATIO_MAX
"""Largest |log q_t|, nats: Unsloth clamps log-ratios there, so a larger one has no effect."""


class GuideMetrics:
    """Running totals of one window: everything since the trainer last logged."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._last: list[float] | None = None
        self._further: tuple[str, ...] = ()
        self.values: dict[str, float] = {}
        """Metrics of the window so far."""
        self.tokens = 0
        """Completion tokens of the window; with 0 the values mean nothing."""

    def add(
        self,
        signals: TokenSignals,
        log_guide: Tensor | None,
        gather: Callable[[Tensor], Tensor],
        metrics: MutableMapping[str, list[Any]],
        further: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Adds one micro-batch and writes the window's values into the trainer's `metrics`.

        Args:
            log_guide: log q_t, (B, T), 0 outside the mask; None without a guide or a reference.
            gather: collects a (1, n) tensor of every process into (processes, n).
            metrics: the trainer's lists of values, which it averages and empties when it logs.
            further: values of tokens by name, (B, T), whose mean is logged.

        Raises:
            ValueError: `log_guide` is not finite, or beyond `LOG_GUIDE_MAX`.
        """
        sums, extremes = _micro_batch(signals, log_guide, further or {})
        # One transfer from the device: everything in one tensor.
        gathered = gather(torch.stack([*sums.values(), *extremes.values()]).unsqueeze(0))
        totals = gathered[:, : len(sums)].sum(0).tolist()
        lows = gathered[:, len(sums) :].amin(0).tolist()
        new = dict(zip([*sums, *extremes], totals + lows, strict=True))
        if log_guide is not None and new["tokens"]:
            _check_range(new["log_guide"], new["lowest"], -new["minus_highest"])

        # The list written last time is gone when the trainer has logged; then a new window begins.
        # Compared by identity: a new list with equal numbers belongs to a new window.
        if self._last is not None and any(values is self._last for values in metrics.values()):
            # A shape function may give a value in some micro-batches only.
            new = {
                name: min(new[name], self._sums[name])
                if name in extremes
                else new.get(name, 0.0) + self._sums.get(name, 0.0)
                for name in self._sums | new
            }
        else:
            self._further = ()
        self._sums = new
        self._further = tuple(dict.fromkeys((*self._further, *(further or {}))))
        # All completions of a micro-batch can be masked, when each was truncated.
        tokens, completions = max(new["tokens"], 1.0), max(new["completions"], 1.0)
        values = {} if "ref_k3" not in new else {"kl/ref_k3": new["ref_k3"] / completions}
        if log_guide is not None:
            values |= {
                "sage/guide_mean": new["guide"] / tokens,
                "sage/guide_min": new["lowest"] if new["tokens"] else 1.0,
                "sage/guide_max": -new["minus_highest"] if new["tokens"] else 1.0,
                "sage/log_guide_mean": new["log_guide"] / tokens,
                "sage/share_touched": new["touched"] / tokens,
                "kl/anchor_k3": new["anchor_k3"] / completions,
            }
        for name in ("entropy", "ref_entropy", *self._further):
            if name in new:
                values[f"sage/{name}"] = new[name] / tokens
        self.values = values
        self.tokens = int(new["tokens"])
        for name, value in values.items():
            metrics[name] = [value]
            self._last = metrics[name]


def _check_range(total: float, lowest: float, highest: float) -> None:
    """Takes Σ log q_t and the extremes of q_t in one micro-batch."""
    if not math.isfinite(total):
        raise ValueError(f"log_guide must be finite on completion tokens, got {total}")
    largest = math.exp(LOG_GUIDE_MAX) * (1 + 1e-5)  # one float32 step at 20 is 2e-6 nats
    if lowest < 1 / largest or highest > largest:
        raise ValueError(
            f"|log_guide| must be at most {LOG_GUIDE_MAX:g} nats, where the loss clamps it, got q "
            f"from {lowest:.3g} to {highest:.3g}. Clip q, as the guides of this package do (q_min, "
            "q_max)"
        )


def _micro_batch(
    signals: TokenSignals, log_guide: Tensor | None, further: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and minima over one micro-batch; 0-d tensors."""
    valid = signals.mask.bool()
    per_row = valid.sum(-1)
    policy = torch.where(valid, signals.policy_logps.float(), 0.0)
    ref = None
    if signals.ref_logps is not None:
        ref = torch.where(valid, signals.ref_logps.float(), 0.0)

    def over_rows(anchor: Tensor) -> Tensor:
        kl = k3(policy, anchor, k3_max=UNSLOTH_K3_MAX)
        # The same reduction as loss_type "grpo": completions count alike, however long.
        return ((kl * valid).sum(-1) / per_row.clamp(min=1)).sum()

    sums = {
        "tokens": valid.sum().float(),
        "completions": (per_row > 0).sum().float(),
    }
    if ref is not None:
        sums["ref_k3"] = over_rows(ref)
    extremes = {}
    if log_guide is not None:
        q = log_guide.exp()
        sums |= {
            "guide": (q * valid).sum(),
            "log_guide": log_guide.sum(),
            "touched": (log_guide != 0).sum().float(),
        }
        if ref is not None:  # always so with a guide; the order of the keys is that of the log
            sums["anchor_k3"] = over_rows(ref + log_guide)
        extremes = {
            "lowest": torch.where(valid, q, math.inf).min(),
            # As a minimum too, so that one `amin` over processes serves both.
            "minus_highest": -torch.where(valid, q, -math.inf).max(),
        }
    own = {"entropy": signals.entropies, "ref_entropy": signals.ref_entropies}
    for name, values in (own | {**further}).items():
        if values is not None:
            sums[name] = torch.where(valid, values.float(), 0.0).sum()
    return sums, extremes
