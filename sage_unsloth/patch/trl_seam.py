"""The seam to TRL's own trainer, if Unsloth is not imported: its loss calls the hook.

TRL's `_compute_loss` scores the micro-batch by one call of `_get_per_token_logps_and_entropies`,
and reads reference, advantages and the rest of the batch from its `inputs` after that. So while the
loss runs, that call is followed by ours, which puts q·π_ref and other advantages into a copy of
`inputs`. No tensor wider than (B, T) is made.

TRL's penalty is exp(d) − d − 1 with d = ref − new, without a bound.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.contract import check_trl
from sage_unsloth.patch.hook import Hook, HookOutput
from sage_unsloth.patch.trl_scoring import TrlScoring
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.data_parallel import parallelism
from sage_unsloth.trainers.finite import Guard
from sage_unsloth.trainers.listening import listening
from sage_unsloth.trainers.trl_without_gpu import head_without_gpu

ApplyHook = Callable[[Tensor, Tensor | None, Tensor, dict[str, Any]], HookOutput]


class TrlHook(Hook):
    """TRL's loss while one `guided_kl` is open."""

    def compute_loss(
        self, proceed: Callable[..., Tensor], model: Any, inputs: dict[str, Any]
    ) -> Tensor:
        """Around `trainer._compute_loss`."""

        def apply_hook(
            new_logps: Tensor, entropies: Tensor | None, mask: Tensor, inputs: dict[str, Any]
        ) -> HookOutput:
            return self.apply_hook(
                new_logps=new_logps,
                old_logps=inputs.get("old_per_token_logps"),
                ref_logps=inputs.get("ref_per_token_logps"),
                entropies=entropies if self.choice.needs_entropies else None,
                mask=mask,
                advantages=inputs["advantages"],
            )

        return loss_with_hook(self.trainer, proceed, model, inputs, apply_hook)


def loss_with_hook(
    trainer: Any,
    loss: Callable[..., Tensor],
    model: Any,
    inputs: dict[str, Any],
    apply_hook: ApplyHook,
) -> Tensor:
    """`loss(model, inputs)` of a micro-batch, with reference and advantages from `apply_hook`.

    Args:
        loss: TRL's `_compute_loss` of that trainer.
        inputs: the micro-batch, which is not changed: it may be trained on again.
        apply_hook: (new_logps, entropies, mask, inputs) → `HookOutput`; called once the policy's
            log-probs exist.
    """
    # A copy: TRL trains on the same dict again in the next iteration.
    inputs = dict(inputs)

    def score(proceed: Callable[..., tuple], *args: Any, **kwargs: Any) -> tuple:
        result = proceed(*args, **kwargs)
        new_logps, entropies = result[:2]
        mask = loss_mask(inputs)
        # TRL reads both from `inputs` only after this call, which `check_trl` has verified by
        # numbers.
        ref_logps, advantages = apply_hook(new_logps, entropies, mask, inputs)
        inputs["advantages"] = advantages
        if ref_logps is not None:
            # Outside the mask d = 0: 0 · inf would be nan there.
            inputs["ref_per_token_logps"] = torch.where(mask.bool(), ref_logps, new_logps.detach())
        return result

    with listening(trainer, "loss", **{names.SCORE: score}):
        return loss(model, inputs)


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The tokens in TRL's loss, (B, T): of the completion, and not written by a tool."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


class TrlSeam:
    """`seam.Seam` of TRL's own trainer."""

    name = "trl"
    loss = names.TRL_LOSS
    bounds_k3 = False
    scoring = TrlScoring()

    def __init__(self, trainer_class: type) -> None:
        self.trainer_class = trainer_class

    def check(self) -> None:
        check_trl(self.trainer_class, loss_with_hook)

    def cpu_shims(self, trainer: Any) -> AbstractContextManager:
        # DeepSpeed gathers the head for TRL's kernel alone, once more in the backward pass.
        if parallelism(trainer.accelerator) == "DEEPSPEED":
            return nullcontext()
        return head_without_gpu()

    def own_adapters(self, trainer: Any) -> tuple[str, ...]:
        """TRL's copy of an initial adapter, with which it scores π_ref."""
        name = names.REFERENCE_ADAPTER
        return (name,) if name in getattr(trainer.model, "peft_config", {}) else ()

    @contextmanager
    def install_hook(
        self, trainer: Any, choice: Choice, guard: Guard, of_batch: dict[str, Tensor]
    ) -> Iterator[TrlHook]:
        hook = TrlHook(trainer=trainer, choice=choice, guard=guard, of_batch=of_batch)
        with listening(trainer, "loss", **{names.TRL_LOSS: hook.compute_loss}):
            yield hook
