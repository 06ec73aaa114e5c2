"""How TRL's own trainer scores a rollout batch: by a fused head, in the completions' layout.

The head returns a token's log-probability and, if requested, the entropy from one pass over tiles
of the logits, so the reference's entropies need no pass of their own. A separate reference model
and a teacher get such a head while `guided_kl` is open.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.patch.contract import check_parameters
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import ContractError


class TrlScoring:
    """`rollout_batch.Scoring` of `trl.GRPOTrainer`."""

    def check(self, trainer: Any) -> None:
        for name in (names.ROLLOUT, names.SCORE):
            if not callable(getattr(type(trainer), name, None)):
                raise ContractError(
                    "the trainer must have this method", actual="nothing", expected=name
                )
        check_parameters(names.SCORE, getattr(type(trainer), names.SCORE), names.SCORE_PARAMETERS)
        check_parameters(names.FUSED_HEAD, _add_fused_head(), names.FUSED_HEAD_PARAMETERS)

    @contextmanager
    def prepare(self, trainer: Any, *, with_entropies: bool, teacher: Any) -> Iterator[None]:
        with ExitStack() as stack:
            reference = trainer.ref_model  # None where it is the policy without its adapter
            if with_entropies and reference is not None:
                reference = trainer.accelerator.unwrap_model(reference)
                stack.enter_context(_fused_head(trainer, reference, ("log_probs", "entropy")))
            if teacher is not None:
                stack.enter_context(_fused_head(trainer, teacher, ("log_probs",)))
            yield

    def score_with_entropies(
        self, score: Callable[..., tuple], with_entropies: bool, *args: Any, **kwargs: Any
    ) -> tuple[tuple, Callable[[], Tensor]]:
        if not with_entropies:
            result = score(*args, **kwargs)
        else:
            result = score(*args, **kwargs | {"compute_entropy": True})
        return result, lambda: result[1]

    def in_completion_layout(self, logps: Tensor, batch: dict[str, Any]) -> Tensor:
        mask = batch["completion_mask"]
        if logps.shape != mask.shape:
            raise ContractError(
                f"{names.SCORE} must return a log-prob of each completion token",
                actual=tuple(logps.shape),
                expected=tuple(mask.shape),
            )
        return torch.where(mask.bool(), logps.float(), 0.0)


def _add_fused_head() -> Callable[..., None]:
    from trl.trainer import utils

    head = getattr(utils, names.FUSED_HEAD, None)
    if head is None:
        raise ContractError(
            "trl.trainer.utils must have what gives a model a head that scores",
            actual="nothing",
            expected=names.FUSED_HEAD,
        )
    return head


@contextmanager
def _fused_head(trainer: Any, model: Any, outputs: tuple[str, ...]) -> Iterator[None]:
    """Within it, TRL's scoring returns these outputs of the model."""
    from accelerate.utils import is_peft_model

    base = model.get_base_model() if is_peft_model(model) else model
    with replace_attributes(base, forward=base.forward):
        _add_fused_head()(
            base,
            temperature=trainer.temperature,
            cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
            outputs=outputs,
        )
        yield
