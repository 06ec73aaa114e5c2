"""What the rewritten loss calls: the anchor is shifted, and advantages are changed, here."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.advantage_rules import AdvantageRule
from sage_unsloth.objective.advantages import ShapeAdvantages, shaped, with_sequence_credit
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.signals import OPTIONAL_SIGNALS, TokenSignals, read_only
from sage_unsloth.patch.clock import Clock
from sage_unsloth.patch.data_parallel import pooled_means
from sage_unsloth.patch.finite import Guard
from sage_unsloth.patch.unsloth_names import ContractError
from sage_unsloth.patch.watch import Measured


@dataclass(kw_only=True)
class Hook:
    """What the rewritten loss calls (its scorer aside) while one `guided_kl` is open."""

    trainer: Any
    guide: Guide | None
    credit: str
    kl_in: str
    rule: AdvantageRule
    shape_advantages: ShapeAdvantages | None
    log_entropy: bool
    plain: Any  # UnslothEfficientGRPO
    function: Any  # the same, or its copy over the kernel with another penalty
    # Set by `guided_kl` as it opens them, before the first call of `apply`.
    guard: Guard = field(init=False)
    of_batch: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.trainer)
        self.measured = Measured(self.trainer, self.guide)

    def needs_entropies(self, trainer: Any) -> bool:
        asked = self.guide is not None and "entropies" in self.guide.needs
        return trainer is self.trainer and (asked or self.log_entropy)

    def apply(self, trainer: Any, entropies: Tensor | None, *arguments: Any) -> tuple:
        """In the place of `UnslothEfficientGRPO.apply(*arguments)`, and what that returns.

        Tensors are (B, T) of one micro-batch, log-probs and entropies in nats; advantages are (B,)
        or (B, T). For another trainer in the process this is that call as it came.
        """
        if trainer is not self.trainer:
            return self.plain.apply(*arguments)
        # In the order that `rewrite.py` has checked.
        new_logps, old_logps, ref_logps, sampling_logps, head, ids, mask, *rest = arguments
        advantages, beta, *rest = rest
        if trainer.beta != 0.0 and ref_logps is None:
            raise ContractError(
                "beta is not 0, so reference log-probs must exist", found=None, expected="(B, T)"
            )
        # Unsloth calls this under autocast, which would run matrix products in 16 bits.
        with torch.no_grad(), torch.autocast(mask.device.type, enabled=False):
            signals = self._signals(new_logps, ref_logps if beta else None, entropies, mask)
            log_guide = self._log_guide(signals)
            advantages, credit = self._advantages(advantages, signals, log_guide)
            # A nan is named here, before it disappears into the loss.
            checked = {"old_logps": old_logps, "advantages": advantages, "log_guide": log_guide}
            self.guard.check_signals(vars(signals) | {"mask": None} | checked, mask)
            self.measured.add(signals, log_guide, credit)
            if log_guide is not None:
                ref_logps = ref_logps + log_guide  # the whole method: π_ref becomes q·π_ref
        if self.kl_in == "reward":  # and so in the advantages already
            beta, ref_logps = 0.0, None
        function = self.function if beta else self.plain
        logps = (new_logps, old_logps, ref_logps, sampling_logps)
        result = function.apply(*logps, head, ids, mask, advantages, beta, *rest)
        return pooled_means(result, mask, trainer.accelerator)

    def _signals(
        self, new_logps: Tensor, ref_logps: Tensor | None, entropies: Tensor | None, mask: Tensor
    ) -> TokenSignals:
        """What the guide sees of this micro-batch; without gradient, so q is a constant in the
        update.
        """
        return TokenSignals(
            new_logps.detach(),
            None if ref_logps is None else ref_logps.detach(),
            mask,
            None if entropies is None else entropies.detach(),
            **{name: v for name, v in self.of_batch.items() if name in OPTIONAL_SIGNALS},
        )

    def _log_guide(self, signals: TokenSignals) -> Tensor | None:
        """log q_t, (B, T), 0 outside the mask; None without a guide or without a KL term."""
        if self.guide is None or signals.ref_logps is None:
            return None
        step, max_steps, generator = self.clock.tick()
        with read_only(vars(signals), self.guide):
            log_guide = self.guide.log_guide(
                signals, step=step, max_steps=max_steps, generator=generator
            )
        mask, found = signals.mask, f"{log_guide!r:.100}"
        if isinstance(log_guide, Tensor):
            if log_guide.shape == mask.shape and log_guide.dtype == torch.float32:
                return torch.where(mask.bool(), log_guide.detach(), 0.0)
            found = f"{log_guide.dtype} {tuple(log_guide.shape)}"
        raise ValueError(
            f"log_guide must return a float32 tensor of the mask's shape; got {found} for "
            f"{tuple(mask.shape)} from {self.guide!r}"
        )

    def _advantages(
        self, advantages: Tensor, signals: TokenSignals, log_guide: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The advantages of the loss, and the part of them that is sequence credit, (B, T)."""
        if self.shape_advantages is not None:
            advantages = shaped(self.shape_advantages, signals, advantages)
        if self.credit == "token":
            return advantages, None
        groups, beta = self.of_batch["groups"], self.trainer.beta
        return with_sequence_credit(
            advantages,
            signals,
            groups,
            beta=beta,
            log_guide=log_guide,
            own_baseline=not self.rule.is_grpo,
        )
