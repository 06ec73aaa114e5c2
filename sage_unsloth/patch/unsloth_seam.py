"""The seam to Unsloth's generated trainer.

Its source is not changed: while `compute_loss` of this one trainer runs, other functions have these
names,

    UnslothEfficientGRPO      of its module: `apply` gets q·π_ref and the advantages of the hook
    grpo_high_entropy_mask    of unsloth_zoo: receives the entropies, and masks nothing
    …_log_softmax_recompute   of unsloth_zoo: scores in one pass over the logits (`one_pass.py`)

and TRL's setting for the mask makes Unsloth compute entropies. Each function is looked up when it
is called, which the contract checks. Chunks, compilation and every scale (gradient accumulation,
fp16) stay Unsloth's, and other trainers in the process never call the hook.
"""

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.contract import check_unsloth
from sage_unsloth.patch.hook import Hook
from sage_unsloth.patch.one_pass import OnePassScorers, has_entropy_bonus
from sage_unsloth.patch.unsloth_scoring import UnslothScoring
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.data_parallel import pooled_means
from sage_unsloth.trainers.finite import Guard
from sage_unsloth.trainers.listening import listen
from sage_unsloth.trainers.replaced import replace_attributes

ANY_QUANTILE = 0.5
"""Below 1, so that Unsloth computes entropies; nothing is masked by it."""


@dataclass(kw_only=True)
class UnslothHook(Hook):
    """Unsloth's loss while one `guided_kl` is open."""

    module: types.ModuleType

    def __post_init__(self) -> None:
        super().__post_init__()
        self.function = getattr(self.module, names.FUNCTION)
        self.zoo = importlib.import_module(names.ZOO)
        self.scorers = OnePassScorers(self.trainer)
        self.entropies: Tensor | None = None  # of the micro-batch whose loss is computed

    def compute_loss(self, proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Around `trainer.compute_loss`."""
        # Unsloth's loss calls `apply` alone, so a namespace with it can stand for the class.
        own = {names.FUNCTION: types.SimpleNamespace(apply=self.apply)}
        with replace_attributes(self.module, **own), self._with_entropies():
            return proceed(*args, **kwargs)

    @contextmanager
    def _with_entropies(self) -> Iterator[None]:
        """Within it, Unsloth computes entropies if they are needed, and passes them to the hook."""
        settings = self.trainer.args
        quantile = getattr(settings, names.ENTROPY_QUANTILE, None)
        masks = quantile is not None and quantile < 1
        if not (self.choice.needs_entropies or masks or has_entropy_bonus(self.trainer)):
            yield
            return
        plain = getattr(self.zoo, names.ENTROPY_MASK)

        def mask(trainer: Any, entropies: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
            self.entropies = entropies
            return plain(trainer, entropies, *args, **kwargs) if masks else None

        score = self.scorers.by_name[names.SCORER_WITH_ENTROPY]
        own = {names.ENTROPY_MASK: mask, names.SCORER_WITH_ENTROPY: score}
        with ExitStack() as stack:
            # Entropies of a micro-batch that raised must not reach the next one.
            stack.callback(setattr, self, "entropies", None)
            stack.enter_context(replace_attributes(self.zoo, **own))
            if not masks:
                requested = {names.ENTROPY_QUANTILE: ANY_QUANTILE}
                stack.enter_context(replace_attributes(settings, **requested))
            yield

    def apply(self, *arguments: Any) -> tuple:
        """Replaces `UnslothEfficientGRPO.apply(*arguments)` and returns its result.

        Tensors are (B, T) of one micro-batch, log-probs and entropies in nats; advantages are (B,)
        or (B, T).
        """
        if self.choice.needs_entropies and self.entropies is None:
            raise names.ContractError(
                f"{names.LOSS} must hand its entropies to {names.ENTROPY_MASK} before it calls "
                f"{names.FUNCTION}.apply",
                actual="none",
                expected="(B, T)",
            )
        # In the order that `contract.py` has checked.
        new_logps, old_logps, ref_logps, sampling_logps, head, ids, mask, *rest = arguments
        advantages, beta, *rest = rest
        ref_logps, advantages = self.apply_hook(
            new_logps=new_logps,
            old_logps=old_logps,
            ref_logps=ref_logps,
            entropies=self.entropies,
            mask=mask,
            advantages=advantages,
        )
        logps = (new_logps, old_logps, ref_logps, sampling_logps)
        result = self.function.apply(*logps, head, ids, mask, advantages, beta, *rest)
        # Two of the six values, length and KL, are means over this process alone.
        return pooled_means(result, mask, self.trainer.accelerator)


class UnslothSeam:
    """`seam.Seam` of Unsloth's generated trainer."""

    name = "unsloth"
    loss = names.LOSS
    bounds_k3 = True
    whole_model = True
    scoring = UnslothScoring()

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module

    def cpu_shims(self, trainer: Any) -> AbstractContextManager:
        return nullcontext()

    def own_adapters(self, trainer: Any) -> tuple[str, ...]:
        return ()

    def check(self) -> None:
        check_unsloth(self.module)

    @contextmanager
    def install_hook(
        self, trainer: Any, choice: Choice, guard: Guard, of_batch: dict[str, Tensor]
    ) -> Iterator[UnslothHook]:
        hook = UnslothHook(
            module=self.module, trainer=trainer, choice=choice, guard=guard, of_batch=of_batch
        )
        with listen(trainer, "loss", **{names.COMPUTE_LOSS: hook.compute_loss}):
            yield hook
