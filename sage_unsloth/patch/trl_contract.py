"""What TRL's trainer must be for the patch to hold. Nothing is replaced here.

Names, parameters and the one expression that is replaced are checked, and on small tensors the
numbers themselves: TRL's own `_compute_loss` runs on a stand-in for a trainer, with the hook where
it would be, and its loss and gradient must be those of `objective.loss`. A loss that reads the
reference or the advantages too early, or elsewhere, gives others. Anything else than expected is a
`ContractError`.
"""

import inspect
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.kl import KL_ESTIMATORS, UNSLOTH_K3_MAX
from sage_unsloth.patch.compared_loss import check_loss
from sage_unsloth.patch.hook import Consulted
from sage_unsloth.patch.rollout_batch import SCORE
from sage_unsloth.patch.trl_loss import (
    LOSS,
    PENALTY_HOOK,
    Penalty,
    consulted_loss,
    penalty_of,
    rewritten_loss,
)
from sage_unsloth.patch.trl_scoring import check_score
from sage_unsloth.patch.unsloth_names import ContractError

LOSS_PARAMETERS = ("self", "model", "inputs")


def check_trl_contract(
    trainer_class: type,
) -> tuple[types.FunctionType, types.FunctionType]:
    """Check everything the patch relies on, and return TRL's loss, as it is and rewritten.

    Raises:
        ContractError: a name, a parameter, an expression or a computed value is not as expected.
    """
    loss = getattr(trainer_class, LOSS, None)
    if not isinstance(loss, types.FunctionType):
        raise ContractError(
            f"{trainer_class.__module__}.{trainer_class.__qualname__} must have a method {LOSS}",
            found=repr(loss),
            expected="a function",
        )
    found = tuple(inspect.signature(loss).parameters)
    if found != LOSS_PARAMETERS:
        raise ContractError(
            f"{LOSS} must have these parameters", found=found, expected=LOSS_PARAMETERS
        )
    check_score(trainer_class)
    rewritten = rewritten_loss(loss)
    for kl_estimator in KL_ESTIMATORS:
        for bounded in (False, True) if kl_estimator in ("k3", "k3-is") else (False,):
            penalty = penalty_of(kl_estimator, bounded)
            of = loss if penalty is None else rewritten
            _check_numbers(of, penalty, kl_estimator, UNSLOTH_K3_MAX if bounded else None)
    return loss, rewritten


def _check_numbers(
    loss: Callable[..., Tensor], penalty: Penalty | None, kl_estimator: str, k3_max: float | None
) -> None:
    """TRL's loss and gradient, with the anchor shifted, against the plain-torch reference on a
    (2, 3) batch, of which one token is far from the reference.
    """
    ref = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -4.0]], dtype=torch.float64)
    log_guide = torch.tensor([[0.3, 0.0, -0.4], [0.1, 0.2, 0.0]], dtype=torch.float64)
    start = ref + torch.tensor([[0.2, -3.1, 0.3], [0.0, 0.4, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[0.7, -0.2, 0.4], [-0.7, 0.1, 0.3]], dtype=torch.float64)

    theirs = start.clone().requires_grad_()
    trainer = _stand_in(theirs, use_bias_correction_kl=kl_estimator == "k3-is", penalty=penalty)
    inputs = {
        "prompt_ids": torch.zeros(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        # What the hook must replace.
        "advantages": torch.full((2,), 9.0, dtype=torch.float64),
        "ref_per_token_logps": ref,
    }

    def consult(new_logps: Tensor, entropies: Any, of_loss: Tensor, batch: dict) -> Consulted:
        return Consulted(batch["ref_per_token_logps"] + log_guide, advantages)

    try:
        found = consulted_loss(trainer, loss, None, inputs, consult)
        (found_gradient,) = torch.autograd.grad(found, theirs)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ContractError(
            f"{LOSS} must run on a batch of this form",
            found=f"{type(error).__name__}: {error!s:.200}",
            expected="a loss and its gradient",
        ) from error
    check_loss(
        LOSS,
        start,
        found,
        found_gradient,
        ref,
        mask,
        advantages,
        kl_estimator=kl_estimator,
        log_guide=log_guide,
        beta=trainer.beta,
        k3_max=k3_max,
    )


def _stand_in(new_logps: Tensor, *, use_bias_correction_kl: bool, penalty: Penalty | None) -> Any:
    """What `_compute_loss` reads of a trainer, in one process and without any further term."""

    def score(*args: Any, **kwargs: Any) -> tuple:
        return new_logps, torch.zeros_like(new_logps), None

    def same(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return values

    return types.SimpleNamespace(
        accelerator=types.SimpleNamespace(
            gather=same, gather_for_metrics=same, reduce=same, num_processes=1, sync_gradients=True
        ),
        args=types.SimpleNamespace(
            delta=None, use_bias_correction_kl=use_bias_correction_kl, steps_per_generation=1
        ),
        model=types.SimpleNamespace(training=True),
        beta=0.05,
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=3,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        **{SCORE: score, PENALTY_HOOK: penalty},
    )
