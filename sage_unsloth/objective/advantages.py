"""Custom changes to the advantages before they reach the loss."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.signals import TokenSignals, read_only

ShapeAdvantages = Callable[..., Tensor]
"""(signals, advantages) -> advantages, (B,) or (B, T), in units of reward; arguments named as in
`OFFERED` are passed too."""
OFFERED = ("old_logps", "generator", "log_guide", "groups", "metrics")
"""Further arguments of such a function:

    old_logps   log π_old of the tokens, nats, (B, T); None if the trainer did not score it
    generator   random numbers that a resumed run repeats
    log_guide   log q_t, (B, T), 0 outside the mask; None without a guide
    groups      a number for each completion, equal for those of one prompt, (B,); None unless a
                method needs it
    metrics     a dict; the token mean of a (B, T) tensor added to it is logged as `sage/<name>`
"""


def shape_advantages(
    shape: ShapeAdvantages, signals: TokenSignals, advantages: Tensor, **offered: Any
) -> Tensor:
    """The advantages that a user's function returns, (B,) or (B, T), without gradient.

    Args:
        advantages: the trainer's, (B,) or (B, T).
        offered: values for `OFFERED`; the function gets those that it has arguments for.

    Raises:
        ValueError: a result of another shape, or the function wrote into its input.
    """
    # By name, so that a function of the user asks only for what it reads and old ones go on working
    # when something new is offered.
    requested = {*inspect.signature(shape).parameters} & {*offered}
    given = {name: offered[name] for name in requested}
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    with read_only(vars(signals) | {"advantages": advantages} | tensors, shape):
        result = shape(signals, advantages, **given)
    if not isinstance(result, Tensor) or not result.is_floating_point():
        raise ValueError(f"shape must return a floating tensor, got {result!r:.100}")
    # A rule that keeps a graph would send a second gradient through the advantages.
    result = result.detach().to(advantages.dtype)
    if result.shape not in (signals.mask.shape, signals.mask.shape[:1]):
        raise ValueError(
            f"shape must return (B,) or (B, T), got {tuple(result.shape)} for "
            f"{tuple(signals.mask.shape)}"
        )
    if result.dim() == 2:  # outside the mask the signals mean nothing, and 0 · nan is nan
        result = torch.where(signals.mask.bool(), result, 0.0)
    return result
