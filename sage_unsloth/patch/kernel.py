"""Unsloth's loss kernel with another KL penalty."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POLICY_ONLY = {
    "delta": None,
    "entropy_mask": None,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
}
"""Settings of the policy term, switched off in the second call; the normaliser stays."""


def kernel_with(penalty: Callable[[Tensor, Tensor], Tensor], kernel: Any) -> Callable[..., tuple]:
    """Unsloth's loss kernel with another KL penalty: the same parameters, the same seven values.

    It runs inside `torch.func.grad_and_value` and, compiled, as one graph, as Unsloth's own does.
    """

    def compute_loss(
        ref: Tensor,
        new: Tensor,
        old: Tensor | None,
        sampling_per_token_logps: Tensor | None,
        input_ids: Tensor,
        mask: Tensor,
        beta: float,
        advantages: Tensor,
        **settings: Any,
    ) -> tuple:
        loss, length, _, delta, is_ratio, ratio, mask_out = kernel(
            ref, new, old, sampling_per_token_logps, input_ids, mask, 0.0, advantages, **settings
        )
        # inf or nan in a masked position must not reach a product, where 0 · inf is nan.
        valid = mask.bool()
        values = penalty(torch.where(valid, new, 0.0), torch.where(valid, ref, 0.0))
        # At ratio 1 the policy term of a token is −A, so A = −penalty reduces the penalty exactly
        # as this loss_type reduces the loss.
        at_ratio_one = torch.zeros_like(new)
        reduced = kernel(
            None,
            at_ratio_one,
            at_ratio_one,
            None,
            input_ids,
            mask,
            0.0,
            -values,
            **settings | POLICY_ONLY,
        )[0]
        # The logged kl, as Unsloth takes it of k3: mean over completions that have tokens of the
        # token mean.
        tokens = mask.sum(-1)
        per_completion = (values.detach() * mask).sum(-1) / tokens.clamp(min=1)
        mean = per_completion.sum() / (tokens > 0).sum().clamp(min=1)
        return loss + beta * reduced, length, mean, delta, is_ratio, ratio, mask_out

    return compute_loss
