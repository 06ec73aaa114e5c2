"""The seam to Unsloth's generated trainer: its loss, with the hook in it.

Three places of Unsloth's loss are rewritten (`rewrite.py`):

    whether entropies are computed     also if the guide asks for them
    what computes them                 `scoring.py`, where that is cheaper
    UnslothEfficientGRPO.apply(…)      becomes UnslothHook.apply(trainer, entropies, …)

The hook sees every (B, T) tensor of the loss. Under "k3" and "k3-is" it shifts `ref_logps` and
calls what Unsloth would have called. Another penalty goes through a copy of that function over
another kernel (`kernel.py`). Chunks, compilation and every scale (gradient accumulation, fp16) stay
Unsloth's.
"""

import types
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage_unsloth.objective.kl import PENALTIES
from sage_unsloth.patch import unsloth_names as names
from sage_unsloth.patch.contract import check_contract
from sage_unsloth.patch.data_parallel import pooled_means
from sage_unsloth.patch.hook import Hook
from sage_unsloth.patch.kernel import kernel_with
from sage_unsloth.patch.replaced import replaced
from sage_unsloth.patch.scoring import scorer
from sage_unsloth.patch.unsloth_scoring import UnslothScoring


@dataclass(kw_only=True)
class UnslothHook(Hook):
    """What the rewritten loss calls (its scorer aside) while one `guided_kl` is open."""

    plain: Any  # UnslothEfficientGRPO
    function: Any  # the same, or its copy over the kernel with another penalty

    def needs_entropies(self, trainer: Any) -> bool:
        return trainer is self.trainer and self.asks_for_entropies

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
        ref_logps, advantages = self.consult(
            new_logps=new_logps,
            old_logps=old_logps,
            ref_logps=ref_logps,
            entropies=entropies,
            mask=mask,
            advantages=advantages,
        )
        if self.kl_in == "reward":  # and so in the advantages already
            beta, ref_logps = 0.0, None
        function = self.function if beta else self.plain
        logps = (new_logps, old_logps, ref_logps, sampling_logps)
        result = function.apply(*logps, head, ids, mask, advantages, beta, *rest)
        return pooled_means(result, mask, trainer.accelerator)


class UnslothSeam:
    """`seam.Seam` of Unsloth's generated trainer."""

    name = "unsloth"
    loss = names.LOSS
    bounds_k3 = True
    whole_model = True
    scoring = UnslothScoring()

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def prepared(self, trainer: Any) -> AbstractContextManager:
        return nullcontext()

    def own_adapters(self, trainer: Any) -> tuple[str, ...]:
        return ()

    def opened(
        self, kl_estimator: str, bounded: bool, **settings: Any
    ) -> tuple[UnslothHook, AbstractContextManager]:
        """Check the contract; the hook, and the context within which Unsloth's loss calls it."""
        module, own_penalty = self.module, kl_estimator in PENALTIES
        rewritten = check_contract(module)
        plain = getattr(module, names.FUNCTION)
        function = rewritten.function if own_penalty else plain
        hook = UnslothHook(plain=plain, function=function, **settings)
        # The names that the rewritten source calls, and that source in the place of Unsloth's. The
        # module is the trainer's, so these names are looked up there at every call.
        called = {
            names.NEEDS_ENTROPIES_HOOK: hook.needs_entropies,
            names.CALL_HOOK: hook.apply,
            names.SCORER_HOOK: scorer,
            names.LOSS: rewritten.loss,
        }
        if own_penalty:
            kernel = getattr(module, names.KERNEL)
            called[names.KERNEL_HOOK] = kernel_with(PENALTIES[kl_estimator], kernel)
        return hook, replaced(module, **called)
