"""Log-probabilities, entropies and gradient from one pass over the logits, a few rows at a time.

With a frozen output head W (V, H), the backward pass needs only one vector of width H for a token's
logits z = W h:

    log p(y | h) = z_y − log Σ_v exp(z_v)
    entropy      = −Σ_v p_v log p_v
    ∇_h log p(y) = (e_y − p) W      times the derivative of what is between z and softmax

So the forward pass computes it while the chunk of logits exists, and the backward pass is a product
with the incoming gradient. Nothing is recomputed, and nothing of width V outlives its chunk: (B·T,
H) is stored, in the dtype of the product. Entropies carry no gradient: guides and metrics read
them, no loss differentiates them.

Chunks, dtypes and the order of operations are those of Unsloth's own scorer without entropies,
which scores the reference, so policy and reference agree exactly if they are the same model.

Shapes: B completions, T tokens, V vocabulary, H hidden size.
"""

import functools
import importlib
import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK_NUMBERS = 2**23
"""Logits that are float32 at the same time: 32 MiB. Larger blocks leave a CPU allocator's heap."""
GPU_BLOCK_NUMBERS = 2**26
"""The same on a GPU: 256 MiB. Each block's product reads the whole head, which only pays for some
hundred rows.
"""
HALF_SCALE = 2.0**10
"""float16 loses probabilities below 6e-8; their product with W is far below 65504."""


def logps_and_entropies(
    hidden: Tensor,
    lm_head: Tensor,
    index: Tensor,
    chunks: int = 4,
    logit_scale_multiply: float = 0.0,
    logit_scale_divide: float = 0.0,
    logit_softcapping: float = 0.0,
    temperature: float = 1.0,
    lm_head_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log π(y_t | s_t) and H_t at the sampling temperature, nats, each (B, T) float32.

    Only the first has a gradient.

    Args:
        hidden: last hidden states, (B, T, H); the gradient goes to them.
        lm_head: W, (V, H), frozen.
        index: the tokens y_t, (B, T).
        chunks: number of parts of the rows, whose logits exist one after another.
        logit_scale_multiply, logit_scale_divide, logit_softcapping: applied to the logits in this
            order and in the head's dtype; 0 skips one.
        temperature: divides the float32 logits.
        lm_head_bias: (V,), frozen.

    Raises:
        ValueError: the head would need a gradient.
    """
    trained = [w for w in (lm_head, lm_head_bias) if w is not None and w.requires_grad]
    if trained and torch.is_grad_enabled():
        raise ValueError(
            "the output head must be frozen, because only the hidden states get a gradient here. "
            "Use Unsloth's own scorer for a trained head, or torch.no_grad()"
        )
    rows = hidden.reshape(-1, hidden.shape[-1])
    transforms = (logit_scale_multiply, logit_scale_divide, logit_softcapping, temperature)
    need_gradient = torch.is_grad_enabled() and hidden.requires_grad
    logps, entropies = _Score.apply(
        rows, lm_head, lm_head_bias, index.reshape(-1), chunks, transforms, need_gradient
    )
    return logps.reshape(hidden.shape[:-1]), entropies.reshape(hidden.shape[:-1])


class _Score(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        bias: Tensor | None,
        index: Tensor,
        chunks: int,
        transforms: tuple[float, float, float, float],
        need_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        kind = lm_head.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else lm_head.dtype
        head, index = lm_head.to(dtype), index.to(lm_head.device)
        bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            logps, entropies, gradient = _score(
                hidden, head, bias, index, chunks, transforms, need_gradient
            )
        ctx.save_for_backward(gradient)
        multiply, divide, _, temperature = transforms
        ctx.scale = -(multiply or 1.0) / ((divide or 1.0) * temperature)
        ctx.scale /= HALF_SCALE if dtype == torch.float16 else 1.0
        ctx.dtype = hidden.dtype
        entropies = entropies.to(hidden.device)
        # Otherwise a loss of the entropies would silently get the gradient 0.
        ctx.mark_non_differentiable(entropies)
        return logps.to(hidden.device), entropies

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        # In float32, whatever the dtype of what was kept.
        grad_hidden = gradient * (ctx.scale * grad_logps.to(gradient.device).unsqueeze(-1))
        return grad_hidden.to(device=grad_logps.device, dtype=ctx.dtype), *[None] * 6


def _score(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    index: Tensor,
    chunks: int,
    transforms: tuple[float, float, float, float],
    need_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log p and H, (B·T,) float32, and (p − e_y) W, (B·T, H), or None: ∇_h log p up to a factor."""
    num_rows, vocabulary = hidden.shape[0], head.shape[0]
    chunks = max(1, min(chunks, num_rows))
    bounds = [(i * num_rows) // chunks for i in range(chunks + 1)]
    numbers = BLOCK_NUMBERS if head.device.type == "cpu" else GPU_BLOCK_NUMBERS
    # At most an eighth of the rows: a small batch must not take more than the logits that a loss
    # would keep.
    block = max(1, min(numbers // vocabulary, -(-num_rows // 8)))
    logps = torch.empty(num_rows, dtype=torch.float32, device=head.device)
    entropies = torch.empty_like(logps)
    gradient = head.new_empty(num_rows, head.shape[1]) if need_gradient else None
    largest = -(-num_rows // chunks)
    together = max(1, block // max(1, largest))  # small chunks, so that their later steps are few
    # One buffer for all chunks, or each would allocate (rows, V) again.
    buffer = head.new_empty(largest * min(together, chunks), vocabulary)
    for number in range(0, chunks, together):
        edges = bounds[number : number + together + 1]
        start, end = edges[0], edges[-1]
        for low, high in itertools.pairwise(edges):
            x = hidden[low:high].to(device=head.device, dtype=head.dtype)
            logits = buffer[low - start : high - start]
            if bias is None:
                torch.mm(x, head.t(), out=logits)
            else:
                torch.addmm(bias, x, head.t(), out=logits)
        step = -(-(end - start) // max(1, -(-(end - start) // block))) or 1  # blocks of one size
        for first in range(start, end, step):
            last = min(first + step, end)
            part = buffer[first - start : last - start]
            logps[first:last], entropies[first:last], direction = _block()(
                part, index[first:last], *transforms, need_gradient
            )
            if gradient is not None and direction is not None:
                torch.mm(direction, head, out=gradient[first:last])
    return logps, entropies, gradient


def _rows(
    logits: Tensor,
    index: Tensor,
    scale_multiply: float,
    scale_divide: float,
    softcapping: float,
    temperature: float,
    need_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """log p(y), the entropy, and p − e_y in the logits' dtype, of rows; overwrites the logits."""
    dtype = logits.dtype
    if scale_multiply != 0.0:
        logits = logits * scale_multiply
    if scale_divide != 0.0:
        logits = logits / scale_divide
    slope = None
    if softcapping != 0.0:
        capped = torch.tanh(logits / softcapping)
        # The derivative of c · tanh(z / c), for the chain rule.
        slope = 1 - capped.float().square() if need_gradient else None
        logits = softcapping * capped
    # float32 from here on, as in Unsloth's scorer; until here the head's dtype.
    z = logits.float()
    if temperature != 1.0:
        z = z / temperature
    index = index.unsqueeze(-1)
    selected = z.gather(-1, index)
    # torch.logsumexp, step by step, so that what it computes on the way can be used.
    highest = z.amax(-1, keepdim=True)
    z = z.sub_(highest)
    weight = z.exp()
    total = weight.sum(-1, keepdim=True)
    log_total = total.log()
    logp = selected - (log_total + highest)
    # Around the largest logit, where little cancels even if one token has nearly all the
    # probability.
    entropy = log_total - z.mul_(weight).sum(-1, keepdim=True) / total
    if not need_gradient:
        return logp.squeeze(-1), entropy.squeeze(-1), None
    direction = weight.div_(total)
    # p − 1 at the token itself; expm1 keeps its digits where p is near 1.
    direction = direction.scatter_(-1, index, torch.expm1(logp))
    if slope is not None:
        direction = direction * slope
    # Undone in `ctx.scale`, where the product is float32.
    if dtype == torch.float16:
        direction = direction * HALF_SCALE
    return logp.squeeze(-1), entropy.squeeze(-1), direction.to(dtype)


def _block() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    """`_rows`, compiled where Unsloth compiles: two or three kernels on a GPU."""
    return _compiled() if "unsloth" in sys.modules else _rows


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:
    compile_or_not = importlib.import_module("unsloth_zoo.temporary_patches.common")._maybe_compile
    return compile_or_not(dynamic=True, fullgraph=True)(_rows)
