"""TRL's fused head on a machine without a GPU.

TRL 1.15 computes log-probabilities in a Triton kernel, which needs a GPU; 1.16 has another way.
While `head_without_gpu` is open, 1.15 scores with PyTorch, over all logits of a micro-batch at
once: for trials and tests.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import HEAD_CHOICE, HEAD_KERNEL


@contextmanager
def head_without_gpu() -> Iterator[None]:
    """Within this context, TRL's fused head works on a CPU, if it did not already."""
    from trl.trainer import utils

    if torch.cuda.is_available() or not hasattr(utils, HEAD_KERNEL) or hasattr(utils, HEAD_CHOICE):
        yield
        return
    with replace_attributes(utils, **{HEAD_KERNEL: _PlainHead}):
        yield


class _PlainHead:
    """Replaces TRL's autograd function."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        logit_scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        """Log-probabilities and entropies of N tokens, nats, each (N,) float32, and None for TRL's
        others.

        Args:
            hidden: (N, H).
            weight, bias: of the output head, (V, H) and (V,).
            targets: the tokens, (N,).
            temperature, logit_scale, softcap: divisor, factor and cap of the logits.
        """
        if any(name not in ("log_probs", "entropy") for name in outputs):
            raise ValueError(f"outputs must be log_probs or entropy without a GPU, got {outputs}")
        autocast = torch.is_autocast_enabled(hidden.device.type)
        dtype: Any = torch.get_autocast_dtype(hidden.device.type) if autocast else hidden.dtype
        logits = torch.nn.functional.linear(
            hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        )
        logits = logits.float() * logit_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        all_logps = (logits / temperature).log_softmax(-1)
        logps = all_logps.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropies = -(all_logps.exp() * all_logps).sum(-1) if "entropy" in outputs else None
        return logps, entropies, None, None, None
