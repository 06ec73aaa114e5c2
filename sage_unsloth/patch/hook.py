"""Called from inside the loss: shifts the KL anchor by log q and changes the advantages."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_unsloth.objective.advantages import shape_advantages
from sage_unsloth.objective.signals import OPTIONAL_SIGNALS, TokenSignals, read_only
from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.watch import GuideMetricsLogger
from sage_unsloth.trainers.clock import Clock, StepContext
from sage_unsloth.trainers.finite import Guard
from sage_unsloth.trainers.trainer_names import ContractError


class HookOutput(NamedTuple):
    """The values that the loss continues with."""

    ref_logps: Tensor | None  # log q·π_ref, nats, (B, T)
    advantages: Tensor  # (B,) or (B, T), units of reward


@dataclass(kw_only=True)
class Hook:
    """What an open `guided_kl` does with each micro-batch, for either trainer.

    A seam (`unsloth_seam.py`, `trl_seam.py`) derives from it and calls `apply_hook` inside the
    trainer's loss.
    """

    trainer: Any
    choice: Choice
    guard: Guard
    of_batch: dict[str, Tensor]
    """Signals of the current micro-batch (`rollout_batch`)."""

    def __post_init__(self) -> None:
        self.beta = self.trainer.beta  # which must not change while this is open
        self.clock = Clock(self.trainer)
        self.measured = GuideMetricsLogger(self.trainer, self.choice.guide)

    def apply_hook(
        self,
        *,
        new_logps: Tensor,
        old_logps: Tensor | None,
        ref_logps: Tensor | None,
        entropies: Tensor | None,
        mask: Tensor,
        advantages: Tensor,
    ) -> HookOutput:
        """The anchor and the advantages of one micro-batch, checked and logged.

        Log-probs and entropies are (B, T), nats; advantages are (B,) or (B, T). Without a KL term
        the reference is unchanged.
        """
        beta = self.beta
        if beta != 0.0 and ref_logps is None:
            raise ContractError(
                "beta is not 0, so reference log-probs must exist", actual=None, expected="(B, T)"
            )
        # The loss may be computed under autocast, which would run matrix products in 16 bits.
        with torch.no_grad(), torch.autocast(mask.device.type, enabled=False):
            # With β = 0 the guide gets no reference, even where the trainer has scored one.
            signals = self._signals(new_logps, ref_logps if beta else None, entropies, mask)
            now = self.clock.tick()
            # Before the advantages, because a rule may read log q.
            log_guide = self._log_guide(signals, now)
            metrics: dict[str, Tensor] = {}
            for shape in self.choice.shapes:
                advantages = shape_advantages(
                    shape,
                    signals,
                    advantages,
                    old_logps=None if old_logps is None else old_logps.detach(),
                    generator=now.generator,
                    log_guide=log_guide,
                    groups=self.of_batch.get("groups"),
                    metrics=metrics,
                )
            # A nan is named here, before it disappears into the loss.
            checked = {"old_logps": old_logps, "advantages": advantages, "log_guide": log_guide}
            self.guard.check_signals(vars(signals) | {"mask": None} | checked, mask)
            self.measured.add(signals, log_guide, metrics)
            if log_guide is not None and ref_logps is not None:
                ref_logps = ref_logps + log_guide  # the whole method: π_ref becomes q·π_ref
        return HookOutput(ref_logps, advantages)

    def _signals(
        self, new_logps: Tensor, ref_logps: Tensor | None, entropies: Tensor | None, mask: Tensor
    ) -> TokenSignals:
        """The guide's input for this micro-batch, without gradient, so that q is a constant."""
        return TokenSignals(
            new_logps.detach(),
            None if ref_logps is None else ref_logps.detach(),
            mask,
            None if entropies is None else entropies.detach(),
            **{name: v for name, v in self.of_batch.items() if name in OPTIONAL_SIGNALS},
        )

    def _log_guide(self, signals: TokenSignals, now: StepContext) -> Tensor | None:
        """log q_t, (B, T), 0 outside the mask; None without a guide or a KL term."""
        guide = self.choice.guide
        if guide is None or signals.ref_logps is None:
            return None
        with read_only(vars(signals), guide):
            log_guide = guide.log_guide(
                signals, step=now.step, max_steps=now.max_steps, generator=now.generator
            )
        mask, result = signals.mask, f"{log_guide!r:.100}"
        if isinstance(log_guide, Tensor):
            # float32 only: log q is near 0 at most tokens, and 16 bits keep three digits of it.
            if log_guide.shape == mask.shape and log_guide.dtype == torch.float32:
                return torch.where(mask.bool(), log_guide.detach(), 0.0)
            result = f"{log_guide.dtype} {tuple(log_guide.shape)}"
        raise ValueError(
            f"log_guide must return a float32 tensor of the mask's shape, got {result} for "
            f"{tuple(mask.shape)} from {guide!r}"
        )
