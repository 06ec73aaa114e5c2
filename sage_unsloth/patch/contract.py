"""What Unsloth's source must be for the patch to hold. Nothing is replaced here.

The worst failure is no exception and the wrong loss. Therefore the names, the parameters, the
number of calls and, on small tensors, the numbers themselves are checked before `guided_kl`
replaces anything; anything else is a `ContractError`. Source is parsed only to be checked.
"""

import ast
import importlib
import inspect
import textwrap
import types
from typing import Any

import torch

from sage_unsloth.objective.kl import KL_ESTIMATORS, PENALTIES, UNSLOTH_K3_MAX
from sage_unsloth.patch.compared_loss import check_loss
from sage_unsloth.patch.kernel import POLICY_ONLY, kernel_with
from sage_unsloth.patch.unsloth_names import (
    ENTROPY_MASK,
    ENTROPY_MASK_ARGUMENTS,
    ENTROPY_QUANTILE,
    EXPECTED_ARGUMENTS,
    EXPECTED_PARAMETERS,
    FUNCTION,
    KERNEL,
    LOSS,
    SCORER,
    SCORER_OPTIONS,
    SCORER_PARAMETERS,
    SCORER_WITH_ENTROPY,
    ZOO,
    ContractError,
)


def check_contract(module: types.ModuleType) -> None:
    """Check everything the patch relies on.

    Raises:
        ContractError: a name, a parameter, a number of calls or a computed value is not as
            expected.
    """
    for name, expected in EXPECTED_PARAMETERS.items():
        target = getattr(module, name, None)
        if target is None:
            raise ContractError(
                f"{module.__name__} must define {name}", found="nothing", expected=name
            )
        function = target.forward if name == FUNCTION else target
        found = tuple(inspect.signature(function).parameters)[: len(expected)]
        if found != expected:
            raise ContractError(
                f"{name} must begin with these parameters", found=found, expected=expected
            )
    _check_switches(getattr(module, KERNEL))
    for kl_estimator in KL_ESTIMATORS:
        _check_numbers(getattr(module, KERNEL), kl_estimator)
    _check_scorer()
    _check_calls(module)


def _check_switches(kernel: Any) -> None:
    """The kernel must read the settings that `kernel_with` switches off by these names: of its
    `**kwargs` an unknown name is dropped without an error, and would switch nothing off.
    """
    read = {name for name in inspect.unwrap(kernel).__code__.co_consts if isinstance(name, str)}
    if missing := sorted(POLICY_ONLY.keys() - read):
        raise ContractError(
            f"{KERNEL} must read these settings of the policy term",
            found=f"none named {', '.join(missing)}",
            expected=sorted(POLICY_ONLY),
        )


def _check_numbers(kernel: Any, kl_estimator: str) -> None:
    """Unsloth's loss and gradient, with the anchor shifted, against the plain-torch reference on a
    (2, 3) batch.
    """
    ref = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -4.0]], dtype=torch.float64)
    log_guide = torch.tensor([[0.3, 0.0, -0.4], [0.1, 0.2, 0.0]], dtype=torch.float64)
    start = ref + torch.tensor([[0.2, -0.1, 0.3], [0.0, 0.4, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([0.7, -0.7], dtype=torch.float64)

    if kl_estimator in PENALTIES:
        kernel = kernel_with(PENALTIES[kl_estimator], kernel)
    theirs = start.clone().requires_grad_()
    result = kernel(
        ref + log_guide,
        theirs,
        None,
        None,
        torch.zeros_like(mask),
        mask,
        0.05,
        advantages,
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.2,
        use_bias_correction_kl=kl_estimator == "k3-is",
        entropy_mask=None,  # what `UnslothHook.mask` returns where nothing is masked
    )
    if len(result) != 7:
        raise ContractError(f"{KERNEL} must return 7 values", found=len(result), expected=7)
    (gradient,) = torch.autograd.grad(result[0], theirs)
    check_loss(
        KERNEL,
        start,
        result[0],
        gradient,
        ref,
        mask,
        advantages,
        kl_estimator=kl_estimator,
        log_guide=log_guide,
        beta=0.05,
        k3_max=UNSLOTH_K3_MAX,
    )


def _check_scorer() -> None:
    """Unsloth's scorer of log-probs and entropies must take what `one_pass.py` is called with."""
    scorer = getattr(importlib.import_module(ZOO), SCORER_WITH_ENTROPY, None)
    parameters = () if scorer is None else tuple(inspect.signature(scorer).parameters)
    expected = SCORER_PARAMETERS
    if parameters[: len(expected)] != expected or not set(parameters) >= SCORER_OPTIONS:
        raise ContractError(
            f"{SCORER_WITH_ENTROPY} must have these parameters",
            found=parameters,
            expected=(*expected, *sorted(SCORER_OPTIONS)),
        )


def _check_calls(module: types.ModuleType) -> None:
    """Each function that is replaced must be looked up where it is replaced, at every call, and
    called once, with these arguments first.
    """
    loss = _syntax_tree(getattr(module, LOSS))
    forward = _syntax_tree(getattr(module, FUNCTION).forward)
    for name, alias in ((ENTROPY_MASK, f"_{ENTROPY_MASK}"), (SCORER_WITH_ENTROPY, SCORER)):
        imports = [
            imported.asname
            for node in ast.walk(loss)
            if isinstance(node, ast.ImportFrom) and node.module == ZOO
            for imported in node.names
            if (imported.name, imported.asname) == (name, alias)
        ]
        if len(imports) != 1:
            raise ContractError(
                f"{LOSS} must import {name} as {alias} once", found=len(imports), expected=1
            )
    for owner, tree, called, expected in (
        (LOSS, loss, f"{FUNCTION}.apply", EXPECTED_ARGUMENTS),
        (LOSS, loss, f"_{ENTROPY_MASK}", ENTROPY_MASK_ARGUMENTS),
        (f"{FUNCTION}.forward", forward, KERNEL, ()),
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
                f"{owner} must call {called} once{with_these}", found=calls, expected=[expected]
            )
    if ENTROPY_QUANTILE not in [n.value for n in ast.walk(loss) if isinstance(n, ast.Constant)]:
        raise ContractError(
            f"{LOSS} must decide by this setting whether it computes entropies",
            found="no such name",
            expected=ENTROPY_QUANTILE,
        )


def _syntax_tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))
