"""The seam to TRL's own trainer, where Unsloth is not imported: its loss calls the hook."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.data_parallel import kind_of
from sage_unsloth.patch.hook import Consulted, Hook
from sage_unsloth.patch.replaced import replaced
from sage_unsloth.patch.trl_contract import check_trl_contract
from sage_unsloth.patch.trl_loss import LOSS, PENALTY_HOOK, Penalty, consulted_loss, penalty_of
from sage_unsloth.patch.trl_scoring import TrlScoring
from sage_unsloth.patch.trl_without_gpu import head_without_gpu


@dataclass(kw_only=True)
class TrlHook(Hook):
    """TRL's loss while one `guided_kl` is open."""

    loss: Callable[..., Tensor]
    penalty: Penalty | None

    def compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """In the place of `trainer._compute_loss`."""
        attributes: dict[str, Any] = {} if self.penalty is None else {PENALTY_HOOK: self.penalty}
        if self.choice.kl_in == "reward":  # and so in the advantages already
            attributes["beta"] = 0.0

        def consult(
            new_logps: Tensor, entropies: Tensor | None, mask: Tensor, inputs: dict[str, Any]
        ) -> Consulted:
            return self.consult(
                new_logps=new_logps,
                old_logps=inputs.get("old_per_token_logps"),
                ref_logps=inputs.get("ref_per_token_logps"),
                entropies=entropies if self.choice.needs_entropies else None,
                mask=mask,
                advantages=inputs["advantages"],
            )

        with replaced(self.trainer, **attributes):
            return consulted_loss(self.trainer, self.loss, model, inputs, consult)


class TrlSeam:
    """`seam.Seam` of TRL's own trainer."""

    name = "trl"
    loss = LOSS
    bounds_k3 = False
    whole_model = False
    scoring = TrlScoring()

    def __init__(self, trainer_class: type) -> None:
        self.trainer_class = trainer_class

    def prepared(self, trainer: Any) -> AbstractContextManager:
        # DeepSpeed gathers the head for TRL's kernel alone, once more in the backward pass.
        if kind_of(trainer.accelerator) == "DEEPSPEED":
            return nullcontext()
        return head_without_gpu()

    def own_adapters(self, trainer: Any) -> tuple[str, ...]:
        """TRL's copy of an adapter that training began with, under which it scores π_ref."""
        return ("ref",) if "ref" in getattr(trainer.model, "peft_config", {}) else ()

    def opened(self, trainer: Any, choice: Choice) -> tuple[TrlHook, AbstractContextManager]:
        """Check the contract; the hook, and the context within which TRL's loss calls it."""
        plain, rewritten = check_trl_contract(self.trainer_class)
        bounded = choice.is_bounded(self.bounds_k3)
        penalty = penalty_of(choice.kl_estimator, bounded)
        loss = plain if penalty is None else rewritten
        hook = TrlHook(loss=loss, penalty=penalty, trainer=trainer, choice=choice)
        return hook, replaced(trainer, **{LOSS: hook.compute_loss})
