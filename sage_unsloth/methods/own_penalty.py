"""Puts another KL penalty into the trainers' losses.

Unsloth's kernel is called twice: once without a KL term, and once for the penalty alone, which it
reduces as it reduces its loss. TRL's trainer gets a copy of `_compute_loss` in which the expression
of its penalty is a call,

    per_token_kl = torch.exp(ref − new) − (ref − new) − 1    ->  self.PENALTY_HOOK(new, ref)

and everything after it is TRL's: `use_bias_correction_kl`, the reduction, the logged `kl`. Both are
checked on small numbers before anything is replaced.
"""

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.methods.choices import check_together
from sage_unsloth.methods.penalties import PENALTIES, check_kl_estimator
from sage_unsloth.objective.kl import UNSLOTH_K3_MAX, k3
from sage_unsloth.objective.loss import LOSS_TYPES, Penalty
from sage_unsloth.patch.choice import Choice, Method, add_method
from sage_unsloth.patch.contract import check_numbers, run_of_trl, run_of_unsloth
from sage_unsloth.patch.seam import Seam, find_seam, seam_of_class
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import Listener, listen
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.switches import rollout_rejection
from sage_unsloth.trainers.trainer_names import ContractError

PENALTY_HOOK = "_sage_unsloth_penalty"
"""Our attribute of TRL's trainer, called by the rewritten loss."""


@contextmanager
def kl_penalty(
    trainer: Any, kl_estimator: str = "k3", *, bounded: bool | None = None
) -> Iterator[None]:
    """Within this context, a `guided_kl` of the trainer has this KL penalty.

        with kl_penalty(trainer, "forward-kl"), guided_kl(trainer, guide):
            trainer.train()

    Args:
        kl_estimator: one of `penalties.KL_ESTIMATORS`. "k3" and "k3-is" are the trainers' own: with
            these alone, nothing is replaced.
        bounded: bounds a token's k3 at 10 nats, without a gradient beyond. None keeps the trainer's
            behaviour (bounded in Unsloth, unbounded in TRL); True bounds TRL's too.

    Raises:
        ValueError: an unknown penalty, or an unsupported bound; from `guided_kl` one that
            contradicts the trainer's settings.
        ContractError: the trainer's loss differs from the tested ones.
    """
    check_kl_estimator(kl_estimator)
    seam = find_seam(trainer)
    _check_bound(kl_estimator, bounded, seam.bounds_k3)
    of_trainer = kl_estimator not in PENALTIES and bounded in (None, seam.bounds_k3)
    # The trainer's default: nothing to check, replace or record.
    if of_trainer and kl_estimator == "k3":
        yield
        return
    method = Method(
        name="kl_estimator",
        record=kl_estimator if of_trainer or not bounded else f"{kl_estimator}, bounded",
        check=partial(_check_trainer, seam),
        needs_hook=not of_trainer,
    )
    with add_method(trainer, method):
        if of_trainer:
            yield
            return
        # Only "k3" and "k3-is" with another bound come here without an entry in the table.
        penalty = PENALTIES.get(kl_estimator) or partial(k3, k3_max=UNSLOTH_K3_MAX)
        inside = _inside_unsloth if seam.name == "unsloth" else _inside_trl
        with listen(trainer, "kl_penalty", **inside(seam, kl_estimator, penalty, trainer)):
            yield


def check_penalties(trainer_class: type) -> None:
    """Raises ContractError if a penalty cannot be put into the losses of such trainers."""
    seam = seam_of_class(trainer_class)
    inside = _inside_unsloth if seam.name == "unsloth" else _inside_trl
    for kl_estimator, penalty in PENALTIES.items():
        inside(seam, kl_estimator, penalty)
    if not seam.bounds_k3:
        for kl_estimator in ("k3", "k3-is"):
            inside(seam, kl_estimator, partial(k3, k3_max=UNSLOTH_K3_MAX))


def _inside_unsloth(
    seam: Any, kl_estimator: str, penalty: Penalty, trainer: Any = None
) -> dict[str, Listener]:
    kernel = getattr(seam.module, names.KERNEL)
    check_switches(kernel)
    # One function for all calls: compiled code is compiled anew for another one.
    own = {names.KERNEL: make_kernel(penalty, kernel)}
    check_numbers(names.KERNEL, run_of_unsloth(own[names.KERNEL]), penalty, k3_max=None)

    def compute_loss(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replace_attributes(seam.module, **own):
            return proceed(*args, **kwargs)

    return {names.COMPUTE_LOSS: compute_loss}


def _inside_trl(
    seam: Any, kl_estimator: str, penalty: Penalty, trainer: Any = None
) -> dict[str, Listener]:
    from sage_unsloth.patch.trl_seam import loss_with_hook

    rewritten = rewritten_loss(getattr(seam.trainer_class, names.TRL_LOSS))
    own: dict[str, Any] = {PENALTY_HOOK: penalty}
    with_ratio, bounded = kl_estimator == "k3-is", kl_estimator not in PENALTIES
    check_numbers(
        names.TRL_LOSS,
        run_of_trl(rewritten, loss_with_hook, with_ratio=with_ratio, **own),
        kl_estimator if bounded else penalty,
        k3_max=UNSLOTH_K3_MAX if bounded else None,
    )

    def compute_loss(_: Callable[..., Any], model: Any, inputs: dict[str, Any]) -> Tensor:
        with replace_attributes(trainer, **own):
            return rewritten(trainer, model, inputs)

    return {names.TRL_LOSS: compute_loss}


def _check_trainer(seam: Seam, trainer: Any, choice: Choice) -> None:
    check_together(trainer, choice)
    if seam.name == "unsloth":
        _check_own_penalty(trainer, choice.method_record("kl_estimator", "k3"))


def _check_bound(kl_estimator: str, bounded: bool | None, bounds_k3: bool) -> None:
    if bounded is None:
        return
    if kl_estimator in PENALTIES:
        raise ValueError(
            f"bounded is for the estimators 'k3' and 'k3-is' only, got {bounded} and "
            f"kl_estimator={kl_estimator!r}"
        )
    if bounds_k3 and not bounded:
        raise ValueError(
            "bounded must be True or None with Unsloth's trainer, whose loss bounds k3, got False"
        )


def _check_own_penalty(trainer: Any, kl_estimator: str) -> None:
    """Unsloth's loss must reduce a penalty that it does not have itself."""
    if kl_estimator not in PENALTIES:
        return
    if trainer.args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type must be one of {LOSS_TYPES} for kl_estimator={kl_estimator!r}, got "
            f"loss_type={trainer.args.loss_type!r}"
        )
    if rejection := rollout_rejection():
        raise ValueError(
            f"UNSLOTH_GRPO_ROLLOUT_RS must not be set with kl_estimator={kl_estimator!r}, because "
            f"Unsloth's versions differ in what a rejected token keeps, got {rejection!r}"
        )


def check_switches(kernel: Any) -> None:
    """Raises ContractError unless the kernel reads the settings that `make_kernel` switches off.

    Its `**kwargs` drop an unknown name without an error, which would switch nothing off.
    """
    read = {name for name in inspect.unwrap(kernel).__code__.co_consts if isinstance(name, str)}
    if missing := sorted(POLICY_ONLY.keys() - read):
        raise ContractError(
            f"{names.KERNEL} must read these settings of the policy term",
            actual=f"none named {', '.join(missing)}",
            expected=sorted(POLICY_ONLY),
        )


POLICY_ONLY = {
    "delta": None,
    "entropy_mask": None,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
}
"""Settings of the policy term that are off in the second call; the normaliser stays."""


def make_kernel(penalty: Callable[[Tensor, Tensor], Tensor], kernel: Any) -> Callable[..., tuple]:
    """Unsloth's loss kernel with another KL penalty: the same parameters, the same seven values.

    It runs inside `torch.func.grad_and_value` and, compiled, as one graph, like Unsloth's own.
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
        # new = old, so the importance ratio is 1, the clip does nothing, and only −A is left.
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


class _PenaltyPlace(ast.NodeTransformer):
    """Replaces TRL's expression by the call, and counts it."""

    count = 0

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        result = isinstance(target, ast.Name) and target.id == names.PENALTY
        if result and ast.unparse(node.value) == names.TRL_PENALTY:
            call = f"self.{PENALTY_HOOK}(per_token_logps, ref_per_token_logps)"
            node.value = ast.copy_location(ast.parse(call, mode="eval").body, node.value)
            self.count += 1
        return node


def rewritten_loss(loss: types.FunctionType) -> types.FunctionType:
    """`_compute_loss` with the call of `PENALTY_HOOK` in it.

    Raises:
        ContractError: TRL's penalty is missing, occurs twice, or differs.
    """
    place = _PenaltyPlace()
    rewritten = recompile(sys.modules[loss.__module__], loss, place)
    if place.count != 1:
        raise ContractError(
            f"{names.TRL_LOSS} must assign {names.PENALTY} = {names.TRL_PENALTY} once",
            actual=place.count,
            expected=1,
        )
    return rewritten


def recompile(
    module: types.ModuleType, original: Any, transformer: ast.NodeTransformer
) -> types.FunctionType:
    """A function with transformed source, the same globals and the same line numbers."""
    # A closure's cells would be lost, and a decorated function's source is not what is called.
    if not isinstance(original, types.FunctionType) or original.__closure__:
        raise ContractError(
            "what is rewritten must be a plain function",
            actual=repr(original),
            expected="a function",
        )
    tree = transformer.visit(ast.parse(textwrap.dedent(inspect.getsource(original))))
    # The original's line numbers, so that a traceback shows TRL's own source.
    ast.increment_lineno(ast.fix_missing_locations(tree), original.__code__.co_firstlineno - 1)
    compiled = compile(tree, original.__code__.co_filename, "exec")
    # Only the definition is compiled, not run: its code is taken out of it.
    name = original.__name__
    (code,) = (c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == name)
    rewritten = types.FunctionType(code, vars(module), name, original.__defaults__)
    rewritten.__kwdefaults__ = original.__kwdefaults__
    rewritten.__module__ = original.__module__
    return rewritten
