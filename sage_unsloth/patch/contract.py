"""What the trainers must be for the patch to work. Nothing is replaced here.

The worst failure is a wrong loss without an exception. So names, parameters, numbers of calls and,
on one small batch, the loss itself are checked before `guided_kl` replaces anything. A difference
is a `ContractError`. Source is parsed only for these checks.
"""

import ast
import importlib
import inspect
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.kl import UNSLOTH_K3_MAX, k3
from sage_unsloth.objective.loss import Penalty, grpo_loss
from sage_unsloth.patch.hook import HookOutput
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.trainer_names import ContractError

BETA = 0.05
LossFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(new_logps, anchor_logps, mask, advantages) → the trainer's loss, with β = `BETA`."""


def check_parameters(name: str, function: Any, expected: tuple[str, ...]) -> None:
    """Raises ContractError unless the function exists and begins with these parameters."""
    if not callable(function):
        raise ContractError(f"{name} must be a function", actual=repr(function), expected=name)
    result = tuple(inspect.signature(function).parameters)
    if result[: len(expected)] != expected:
        raise ContractError(
            f"{name} must begin with these parameters", actual=result, expected=expected
        )


def check_numbers(
    name: str, run: LossFunction, kl_estimator: str | Penalty = "k3", *, k3_max: float | None
) -> None:
    """Compares a trainer's loss and gradient, with a shifted anchor, with the plain-torch loss.

    The batch is (2, 3), with one token far from the reference.

    Args:
        name: of the trainer's function, for the message.
        kl_estimator, k3_max: as for `grpo_loss`.

    Raises:
        ContractError: they differ, or the function does not run on such a batch.
    """
    # float64, so that a difference of 1e-7 is another formula and no rounding.
    ref = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -4.0]], dtype=torch.float64)
    log_guide = torch.tensor([[0.3, 0.0, -0.4], [0.1, 0.2, 0.0]], dtype=torch.float64)
    # −3.1 puts one token's k3 beyond Unsloth's bound of 10, so the bound is checked too.
    start = ref + torch.tensor([[0.2, -3.1, 0.3], [0.0, 0.4, 0.1]], dtype=torch.float64)
    # Rows of different length, or "grpo" and "dapo" would reduce to the same number.
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([[0.7, -0.2, 0.4], [-0.7, 0.1, 0.3]], dtype=torch.float64)
    trainer_logps, own_logps = start.clone().requires_grad_(), start.clone().requires_grad_()
    try:
        result = run(trainer_logps, ref + log_guide, mask, advantages)
        (trainer_gradient,) = torch.autograd.grad(result, trainer_logps)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        # Raised by `run` itself, with a more precise message.
        if isinstance(error, ContractError):
            raise
        raise ContractError(
            f"{name} must run on a batch of this form",
            actual=f"{type(error).__name__}: {error!s:.200}",
            expected="a loss and its gradient",
        ) from error
    expected = grpo_loss(
        own_logps,
        ref,
        mask,
        advantages,
        log_guide=log_guide,
        beta=BETA,
        kl_estimator=kl_estimator,
        k3_max=k3_max,
    )
    (gradient,) = torch.autograd.grad(expected, own_logps)
    if not (
        torch.allclose(result, expected, atol=1e-7)
        and torch.allclose(trainer_gradient, gradient, atol=1e-7)
    ):
        raise ContractError(
            f"{name} must compute the loss with the penalty {kl_estimator!r} of d = ref − new, "
            "which for 'k3' is exp(d) − d − 1",
            actual=f"loss {result.item():.8f}, gradient {trainer_gradient.flatten().tolist()}",
            expected=f"loss {expected.item():.8f}, gradient {gradient.flatten().tolist()}",
        )


def check_unsloth(module: types.ModuleType) -> None:
    """Raises ContractError unless Unsloth's generated module has all that the patch relies on."""
    for name, expected in names.EXPECTED_PARAMETERS.items():
        target = getattr(module, name, None)
        if target is None:
            raise ContractError(
                f"{module.__name__} must define {name}", actual="nothing", expected=name
            )
        # An autograd function's own signature is that of `apply`: *args.
        check_parameters(name, target.forward if name == names.FUNCTION else target, expected)
    kernel = getattr(module, names.KERNEL)
    check_numbers(names.KERNEL, run_of_unsloth(kernel), k3_max=UNSLOTH_K3_MAX)
    check_ratio(kernel)
    _check_scorer()
    _check_calls(module)


def check_ratio(kernel: Callable[..., tuple]) -> None:
    """Raises ContractError unless the kernel's "k3-is" is that of a tested version.

    It is bounded before the ratio (2026.10.7), or after it, which leaves a bounded token without a
    gradient of the ratio.
    """

    def bounded_after(logps: Tensor, anchor: Tensor) -> Tensor:
        return (k3(logps, anchor) * (logps - logps.detach()).exp()).clamp(max=UNSLOTH_K3_MAX)

    run = run_of_unsloth(kernel, with_ratio=True)
    try:
        check_numbers(names.KERNEL, run, "k3-is", k3_max=UNSLOTH_K3_MAX)
    except ContractError as error:
        try:
            check_numbers(names.KERNEL, run, bounded_after, k3_max=None)
        # Neither: the difference to the first formula is reported.
        except ContractError:
            raise error from None


def run_of_unsloth(kernel: Callable[..., tuple], *, with_ratio: bool = False) -> LossFunction:
    """Wraps Unsloth's loss kernel, or one with its parameters and seven values."""

    def run(new_logps: Tensor, anchor: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        result = kernel(
            anchor,
            new_logps,
            # Neither old nor sampling log-probs: ρ is 1 in value and keeps its gradient.
            None,
            None,
            torch.zeros_like(mask),
            mask,
            BETA,
            advantages,
            loss_type="grpo",
            epsilon_low=0.2,
            epsilon_high=0.2,
            use_bias_correction_kl=with_ratio,
            entropy_mask=None,  # as `UnslothHook` returns if nothing is masked
        )
        # The trainer unpacks them, so another number is another version.
        if len(result) != 7:
            raise ContractError(
                f"{names.KERNEL} must return 7 values", actual=len(result), expected=7
            )
        return result[0]

    return run


def _check_scorer() -> None:
    """Checks that Unsloth's scorer has the parameters that `one_pass.py` uses."""
    scorer = getattr(importlib.import_module(names.ZOO), names.SCORER_WITH_ENTROPY, None)
    parameters = () if scorer is None else tuple(inspect.signature(scorer).parameters)
    expected = names.SCORER_PARAMETERS
    if parameters[: len(expected)] != expected or not set(parameters) >= names.SCORER_OPTIONS:
        raise ContractError(
            f"{names.SCORER_WITH_ENTROPY} must have these parameters",
            actual=parameters,
            expected=(*expected, *sorted(names.SCORER_OPTIONS)),
        )


def _check_calls(module: types.ModuleType) -> None:
    """Checks where Unsloth's loss looks up each replaced function, and how it calls it.

    Each must be looked up at every call and called once, with these arguments first.
    """
    # Numbers cannot show where Unsloth looks a function up, so its source is read for that.
    loss = _syntax_tree(getattr(module, names.LOSS))
    forward = _syntax_tree(getattr(module, names.FUNCTION).forward)
    mask = f"_{names.ENTROPY_MASK}"
    for name, alias in ((names.ENTROPY_MASK, mask), (names.SCORER_WITH_ENTROPY, names.SCORER)):
        imports = [
            imported.asname
            for node in ast.walk(loss)
            if isinstance(node, ast.ImportFrom) and node.module == names.ZOO
            for imported in node.names
            if (imported.name, imported.asname) == (name, alias)
        ]
        if len(imports) != 1:
            raise ContractError(
                f"{names.LOSS} must import {name} as {alias} once", actual=len(imports), expected=1
            )
    for owner, tree, called, expected in (
        (names.LOSS, loss, f"{names.FUNCTION}.apply", names.EXPECTED_ARGUMENTS),
        (names.LOSS, loss, mask, names.ENTROPY_MASK_ARGUMENTS),
        (f"{names.FUNCTION}.forward", forward, names.KERNEL, ()),
    ):
        # A swapped pair of arguments would be a wrong loss without an error.
        calls = [
            tuple(ast.unparse(argument) for argument in node.args[: len(expected)])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == called
        ]
        if calls != [expected]:
            with_these = ", with these arguments first" if expected else ""
            raise ContractError(
                f"{owner} must call {called} once{with_these}", actual=calls, expected=[expected]
            )
    constants = [node.value for node in ast.walk(loss) if isinstance(node, ast.Constant)]
    if names.ENTROPY_QUANTILE not in constants:
        raise ContractError(
            f"{names.LOSS} must decide by this setting whether it computes entropies",
            actual="no such name",
            expected=names.ENTROPY_QUANTILE,
        )


def _syntax_tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def check_trl(trainer_class: type, loss_with_hook: Callable[..., Tensor]) -> None:
    """Checks everything that the patch relies on in TRL's trainer.

    A loss that reads the reference or the advantages before they are replaced, or elsewhere, gives
    other numbers.

    Args:
        loss_with_hook: calls its loss (`trl_seam.py`).

    Raises:
        ContractError: a name, a parameter or a computed value differs.
    """
    loss = getattr(trainer_class, names.TRL_LOSS, None)
    if not isinstance(loss, types.FunctionType):
        raise ContractError(
            f"{trainer_class.__module__}.{trainer_class.__qualname__} must have a method "
            f"{names.TRL_LOSS}",
            actual=repr(loss),
            expected="a function",
        )
    result = tuple(inspect.signature(loss).parameters)
    if result != names.TRL_LOSS_PARAMETERS:
        raise ContractError(
            f"{names.TRL_LOSS} must have these parameters",
            actual=result,
            expected=names.TRL_LOSS_PARAMETERS,
        )
    check_parameters(names.SCORE, getattr(trainer_class, names.SCORE), names.SCORE_PARAMETERS)
    for kl_estimator in ("k3", "k3-is"):
        run = run_of_trl(loss, loss_with_hook, with_ratio=kl_estimator == "k3-is")
        check_numbers(names.TRL_LOSS, run, kl_estimator, k3_max=None)


def run_of_trl(
    loss: Callable[..., Tensor],
    loss_with_hook: Callable[..., Tensor],
    *,
    with_ratio: bool = False,
    **attributes: Any,
) -> LossFunction:
    """Wraps TRL's `_compute_loss` with a stand-in for a trainer, which has these attributes."""

    def run(new_logps: Tensor, anchor: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
        trainer = _stand_in(new_logps, with_ratio, attributes)
        inputs = {
            # One prompt token, since TRL concatenates prompt and completion and then slices.
            "prompt_ids": torch.zeros(2, 1, dtype=torch.long),
            "prompt_mask": torch.ones(2, 1, dtype=torch.long),
            "completion_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            # What the hook must replace.
            "advantages": torch.full((2,), 9.0, dtype=torch.float64),
            "ref_per_token_logps": torch.full_like(anchor, 9.0),
        }
        apply_hook = lambda *_: HookOutput(anchor, advantages)  # noqa: E731
        of_trainer = types.MethodType(loss, trainer)
        return loss_with_hook(trainer, of_trainer, None, inputs, apply_hook)

    return run


def _stand_in(new_logps: Tensor, with_ratio: bool, attributes: dict[str, Any]) -> Any:
    """The attributes that `_compute_loss` reads from a trainer, for one process."""

    def score(*args: Any, **kwargs: Any) -> tuple:
        return new_logps, torch.zeros_like(new_logps), None

    def same(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return values

    return types.SimpleNamespace(
        accelerator=types.SimpleNamespace(
            gather=same, gather_for_metrics=same, reduce=same, num_processes=1, sync_gradients=True
        ),
        args=types.SimpleNamespace(
            delta=None, use_bias_correction_kl=with_ratio, steps_per_generation=1
        ),
        model=types.SimpleNamespace(training=True),
        beta=BETA,
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
        **{
            names.METRICS_ATTRIBUTE: defaultdict(lambda: defaultdict(list)),
            names.SCORE: score,
            **attributes,
        },
    )
