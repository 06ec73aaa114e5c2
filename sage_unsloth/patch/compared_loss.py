"""What both contracts end with: a trainer's loss and gradient beside those of plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.patch.unsloth_names import ContractError


def check_loss(
    name: str,
    start: Tensor,
    found: Tensor,
    found_gradient: Tensor,
    *inputs: Tensor,
    kl_estimator: str,
    **settings: Any,
) -> None:
    """Compare a loss with `grpo_loss(start, *inputs, **settings)`, gradients too.

    Args:
        name: of the trainer's function, for the message.
        start: log π of the tokens, at which both were computed, (B, T).
        found, found_gradient: the trainer's loss, and its gradient in `start`.
        inputs: reference log-probs, mask and advantages.
        kl_estimator: the penalty.
        settings: the other arguments of `grpo_loss`.

    Raises:
        ContractError: they differ.
    """
    ours = start.detach().clone().requires_grad_()
    expected = grpo_loss(ours, *inputs, kl_estimator=kl_estimator, **settings)
    (expected_gradient,) = torch.autograd.grad(expected, ours)
    if not (
        torch.allclose(found, expected, atol=1e-7)
        and torch.allclose(found_gradient, expected_gradient, atol=1e-7)
    ):
        raise ContractError(
            f"{name} must compute the loss with the penalty {kl_estimator!r} of d = ref − new, "
            "which for 'k3' is exp(d) − d − 1",
            found=f"loss {found.item():.8f}, gradient {found_gradient.flatten().tolist()}",
            expected=f"loss {expected.item():.8f}, gradient {expected_gradient.flatten().tolist()}",
        )
