"""TRL's own loss, with a reference, advantages and a penalty of ours in it.

TRL's `_compute_loss` scores the micro-batch by one call of `_get_per_token_logps_and_entropies`,
and reads the reference, the advantages and what else is of the batch from its `inputs` after that.
So while the loss runs, that call is followed by ours, which puts q·π_ref and other advantages into
a copy of `inputs`. No tensor wider than (B, T) is made.

TRL's penalty is exp(d) − d − 1 with d = ref − new, without a bound. Another one, and Unsloth's
bounds on this one, take a copy of `_compute_loss` in which that expression is a call:

    per_token_kl = torch.exp(ref − new) − (ref − new) − 1    ->  self.PENALTY_HOOK(new, ref)

What follows is TRL's: `use_bias_correction_kl`, the reduction of each loss type, the `kl` that is
logged. `trl_contract.py` checks both ways before anything is replaced.
"""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.kl import PENALTIES, UNSLOTH_K3_MAX, k3
from sage_unsloth.patch.hook import Consulted
from sage_unsloth.patch.replaced import replaced
from sage_unsloth.patch.rollout_batch import SCORE
from sage_unsloth.patch.unsloth_names import ContractError

LOSS = "_compute_loss"
PENALTY = "per_token_kl"
TRL_PENALTY = (
    "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
)
PENALTY_HOOK = "_sage_unsloth_penalty"
"""Ours, on the trainer: what the rewritten loss calls."""

Penalty = Callable[[Tensor, Tensor], Tensor]
Consult = Callable[[Tensor, Tensor | None, Tensor, dict[str, Any]], Consulted]


def penalty_of(kl_estimator: str, bounded: bool) -> Penalty | None:
    """What takes the place of TRL's penalty, (new_logps, anchor_logps) → nats; None leaves it."""
    if kl_estimator in PENALTIES:
        return PENALTIES[kl_estimator]
    return partial(k3, k3_max=UNSLOTH_K3_MAX) if bounded else None


def consulted_loss(
    trainer: Any, loss: Callable[..., Tensor], model: Any, inputs: dict[str, Any], consult: Consult
) -> Tensor:
    """`loss(trainer, model, inputs)` of a micro-batch whose reference and advantages are those that
    `consult` returns, called once the policy's log-probs are there.

    Args:
        trainer: TRL's.
        loss: TRL's `_compute_loss`, as a function.
        model: what it is given.
        inputs: the micro-batch, which stays as it is: it may be trained on again.
        consult: (new_logps, entropies, mask, inputs) → `Consulted`.
    """
    inputs, score = dict(inputs), getattr(trainer, SCORE)

    def scored(*args: Any, **kwargs: Any) -> tuple:
        result = score(*args, **kwargs)
        new_logps, entropies = result[:2]
        mask = loss_mask(inputs)
        ref_logps, advantages = consult(new_logps, entropies, mask, inputs)
        inputs["advantages"] = advantages
        if ref_logps is not None:
            # Outside the mask d = 0: 0 · inf would be nan there.
            inputs["ref_per_token_logps"] = torch.where(mask.bool(), ref_logps, new_logps.detach())
        return result

    with replaced(trainer, **{SCORE: scored}):
        return loss(trainer, model, inputs)


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The tokens that TRL's loss counts, (B, T): of the completion, and not written by a tool."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


class _PenaltyPlace(ast.NodeTransformer):
    """Puts the call in the place of TRL's expression, and counts it."""

    count = 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        found = isinstance(target, ast.Name) and target.id == PENALTY
        if found and ast.unparse(node.value) == TRL_PENALTY:
            call = f"self.{PENALTY_HOOK}(per_token_logps, ref_per_token_logps)"
            node.value = ast.copy_location(ast.parse(call, mode="eval").body, node.value)
            self.count += 1
        return node


def rewritten_loss(loss: types.FunctionType) -> types.FunctionType:
    """`_compute_loss` with the call of `PENALTY_HOOK` in it.

    Raises:
        ContractError: TRL's penalty is missing, is there twice, or is written otherwise.
    """
    place = _PenaltyPlace()
    rewritten = recompiled(sys.modules[loss.__module__], loss, place)
    if place.count != 1:
        raise ContractError(
            f"{LOSS} must assign {PENALTY} = {TRL_PENALTY} once", found=place.count, expected=1
        )
    return rewritten


def recompiled(
    module: types.ModuleType, original: Any, transformer: ast.NodeTransformer
) -> types.FunctionType:
    """A function with its source transformed, over the same globals, with the same line numbers."""
    # A closure's cells would be lost, and a decorated function's source is not what is called.
    if not isinstance(original, types.FunctionType) or original.__closure__:
        raise ContractError(
            "what is rewritten must be a plain function",
            found=repr(original),
            expected="a function",
        )
    tree = transformer.visit(ast.parse(textwrap.dedent(inspect.getsource(original))))
    ast.increment_lineno(ast.fix_missing_locations(tree), original.__code__.co_firstlineno - 1)
    compiled = compile(tree, original.__code__.co_filename, "exec")
    # Only the definition is compiled, not run: its code is taken out of it.
    name = original.__name__
    (code,) = (c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    rewritten = types.FunctionType(code, vars(module), name, original.__defaults__)
    rewritten.__kwdefaults__ = original.__kwdefaults__
    rewritten.__module__ = original.__module__
    return rewritten
