"""What Unsloth's source must be for the patch to hold, and the patch's rewriting of it. Nothing is replaced here.

The worst failure is no exception and the wrong loss. Therefore the names, the parameters, the number of matches and, on
small tensors, the numbers themselves are checked before `guided_kl` replaces anything; anything else is a `ContractError`.
"""

import ast
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_unsloth.losses import KL_ESTIMATORS, PENALTIES, UNSLOTH_K3_MAX, grpo_loss
from sage_unsloth.records import package_version

TESTED_VERSIONS = ("2026.10.7", "2026.10.9")
"""Versions of unsloth (with the unsloth_zoo of the same number) that the tests have passed on."""

LOSS = "grpo_accumulated_loss"
FUNCTION = "UnslothEfficientGRPO"
KERNEL = "grpo_compute_loss"
EXPECTED_PARAMETERS = {
    LOSS: ("trainer", "input_ids", "attention_mask", "logits_to_keep", "completion_mask", "advantages", "old_logps",
           "ref_logps"),
    FUNCTION: ("ctx", "_new_logps", "_old_logps", "_ref_logps", "_sampling_per_token_logps", "lm_head", "_input_ids",
               "_mask", "_advantages", "beta"),
    KERNEL: ("ref", "new", "old", "sampling_per_token_logps", "input_ids", "mask", "beta", "advantages"),
}  # fmt: skip
NEEDS_ENTROPIES_HOOK = "_sage_unsloth_needs_entropies"
CALL_HOOK = "_sage_unsloth_apply"
KERNEL_HOOK = "_sage_unsloth_compute_loss"
SCORER_HOOK = "_sage_unsloth_scorer"
SCORER = "_entropy_log_softmax"
SCORER_PARAMETERS = ("hidden_states", "lm_head", "index", "chunks", "logit_scale_multiply", "logit_scale_divide",
                     "logit_softcapping", "temperature")  # fmt: skip
SCORER_OPTIONS = {"max_rows_per_chunk", "lm_head_bias", "return_entropy", "fp32_lm_head"}
POLICY_ONLY = {
    "delta": None,
    "entropy_mask": None,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
}
"""What of the kernel's settings acts on the policy term alone, switched off; the penalty keeps its normaliser."""


class ContractError(RuntimeError):
    """The guided loss cannot be put in place, or was not consulted: Unsloth is not as tested, or is used in another way."""

    def __init__(self, rule: str, *, found: object, expected: object) -> None:
        installed = {
            name: package_version(name) or "not installed"
            for name in ("unsloth", "unsloth_zoo", "trl")
        }
        super().__init__(
            f"{rule}; found {found}, expected {expected}. Installed: "
            + ", ".join(f"{name} {version}" for name, version in installed.items())
            + f". Tested with unsloth and unsloth_zoo {' and '.join(TESTED_VERSIONS)}: install one of these "
            f'(pip install "unsloth=={TESTED_VERSIONS[0]}" "unsloth_zoo=={TESTED_VERSIONS[0]}"), delete the folder '
            "unsloth_compiled_cache, and restart Python."
        )


class Rewritten(NamedTuple):
    """The two of Unsloth's names that are rewritten: what they call instead must be in the module's namespace."""

    loss: types.FunctionType
    function: type


def check_contract(module: types.ModuleType) -> Rewritten:
    """Check everything the patch relies on and return the rewritten loss and function; nothing is replaced.

    Raises:
        ContractError: a name, a parameter, a number of matches or a computed value is not as expected.
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
    for kl_estimator in KL_ESTIMATORS:
        _check_numbers(getattr(module, KERNEL), kl_estimator)
    return Rewritten(_rewritten_loss(module), _rewritten_function(module))


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
        at_ratio_one = torch.zeros_like(new)
        reduced = kernel(
            None, at_ratio_one, at_ratio_one, None, input_ids, mask, 0.0, -values, **settings | POLICY_ONLY
        )[0]  # fmt: skip
        # The logged kl, as Unsloth takes it of k3: mean over completions that have tokens of the token mean.
        tokens = mask.sum(-1)
        per_completion = (values.detach() * mask).sum(-1) / tokens.clamp(min=1)
        mean = per_completion.sum() / (tokens > 0).sum().clamp(min=1)
        return loss + beta * reduced, length, mean, delta, is_ratio, ratio, mask_out

    return compute_loss


class _Seams(ast.NodeTransformer):
    """Rewrites the two expressions, puts our scorer over the imported one, and counts all three."""

    def __init__(self) -> None:
        self.conditions = 0
        self.calls = 0
        self.scorers = 0
        self._unsloth_asks = "False"

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == "_need_entropy":
            self._unsloth_asks = ast.unparse(node.value)
            asks = f"({self._unsloth_asks}) or {NEEDS_ENTROPIES_HOOK}(trainer)"
            node.value = ast.copy_location(ast.parse(asks, mode="eval").body, node.value)
            self.conditions += 1
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        names = [alias.name for alias in node.names if alias.asname == SCORER]
        if not names:
            return node
        _check_scorer(getattr(importlib.import_module(node.module), names[0], None))
        ours = f"{SCORER} = {SCORER_HOOK}({SCORER}, {self._unsloth_asks})"
        self.scorers += 1
        return [node, ast.copy_location(ast.parse(ours).body[0], node)]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == f"{FUNCTION}.apply":
            found = tuple(ast.unparse(argument) for argument in node.args[:9])
            expected = ("new_logprobs", "old_logps", "ref_logps", "sampling_per_token_logps", "lm_head",
                        "completion_input_ids", "completion_mask", "advantages", "trainer.beta")  # fmt: skip
            if found != expected:
                raise ContractError(
                    f"{FUNCTION}.apply must be called with these", found=found, expected=expected
                )
            before = ast.parse("[trainer, new_entropies if _need_entropy else None]", mode="eval")
            node.func = ast.copy_location(ast.Name(CALL_HOOK, ast.Load()), node.func)
            node.args[:0] = [ast.copy_location(new, node.func) for new in before.body.elts]
            self.calls += 1
        return node


class _KernelName(ast.NodeTransformer):
    """Renames the loss kernel and counts it."""

    count = 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == KERNEL:
            self.count += 1
            node = ast.copy_location(ast.Name(KERNEL_HOOK, node.ctx), node)
        return node


def _rewritten_loss(module: types.ModuleType) -> types.FunctionType:
    """`grpo_accumulated_loss` with the two seams in it."""
    seams = _Seams()
    rewritten = _recompiled(module, getattr(module, LOSS), seams)
    found = {
        "_need_entropy = …": seams.conditions,
        f"{FUNCTION}.apply(…)": seams.calls,
        f"import … as {SCORER}": seams.scorers,
    }
    expected = dict.fromkeys(found, 1)
    if found != expected:
        raise ContractError(f"{LOSS} must contain each seam once", found=found, expected=expected)
    return rewritten


def _check_scorer(scorer: Any) -> None:
    """Unsloth's scorer of log-probs and entropies must take what `scoring.scorer` passes on."""
    found = () if scorer is None else tuple(inspect.signature(scorer).parameters)
    expected = SCORER_PARAMETERS
    if found[: len(expected)] != expected or not set(found) >= SCORER_OPTIONS:
        raise ContractError(
            f"what is imported as {SCORER} must have these parameters",
            found=found,
            expected=(*expected, *sorted(SCORER_OPTIONS)),
        )


def _rewritten_function(module: types.ModuleType) -> type:
    """`UnslothEfficientGRPO` over the kernel that `KERNEL_HOOK` names."""
    original = getattr(module, FUNCTION)
    names = _KernelName()
    forward = _recompiled(module, original.forward, names)
    if names.count != 1:
        raise ContractError(
            f"{FUNCTION}.forward must call {KERNEL} once", found=names.count, expected=1
        )
    return type(f"Guided{FUNCTION}", (original,), {"forward": staticmethod(forward)})


def _recompiled(
    module: types.ModuleType, original: Any, seams: ast.NodeTransformer
) -> types.FunctionType:
    """A function with `seams` applied to its source, over the same globals and with the same line numbers."""
    if not isinstance(original, types.FunctionType) or original.__closure__:
        raise ContractError(
            "what is rewritten must be a plain function",
            found=repr(original),
            expected="a function",
        )
    tree = seams.visit(ast.parse(textwrap.dedent(inspect.getsource(original))))
    ast.increment_lineno(ast.fix_missing_locations(tree), original.__code__.co_firstlineno - 1)
    compiled = compile(tree, original.__code__.co_filename, "exec")
    name = original.__name__
    code = next(
        c for c in compiled.co_consts if isinstance(c, types.CodeType) and c.co_name == name
    )
    rewritten = types.FunctionType(code, vars(module), name, original.__defaults__)
    rewritten.__kwdefaults__ = original.__kwdefaults__
    rewritten.__module__ = original.__module__
    return rewritten


def _check_numbers(kernel: Any, kl_estimator: str) -> None:
    """Unsloth's loss and gradient, with the anchor shifted, against the plain-torch reference on a (2, 3) batch."""
    ref = torch.tensor([[-1.0, -2.0, -0.5], [-1.5, -0.3, -4.0]], dtype=torch.float64)
    log_guide = torch.tensor([[0.3, 0.0, -0.4], [0.1, 0.2, 0.0]], dtype=torch.float64)
    start = ref + torch.tensor([[0.2, -0.1, 0.3], [0.0, 0.4, 0.1]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages = torch.tensor([0.7, -0.7], dtype=torch.float64)

    if kl_estimator in PENALTIES:
        kernel = kernel_with(PENALTIES[kl_estimator], kernel)
    theirs = start.clone().requires_grad_()
    result = kernel(ref + log_guide, theirs, None, None, torch.zeros_like(mask), mask, 0.05, advantages, loss_type="grpo",
                   epsilon_low=0.2, epsilon_high=0.2, use_bias_correction_kl=kl_estimator == "k3-is")  # fmt: skip
    if len(result) != 7:
        raise ContractError(f"{KERNEL} must return 7 values", found=len(result), expected=7)
    found = result[0]
    ours = start.clone().requires_grad_()
    expected = grpo_loss(ours, ref, mask, advantages, log_guide=log_guide, beta=0.05, kl_estimator=kl_estimator,
                         k3_max=UNSLOTH_K3_MAX)  # fmt: skip
    found.backward()
    expected.backward()
    if not (
        torch.allclose(found, expected, atol=1e-7)
        and torch.allclose(theirs.grad, ours.grad, atol=1e-7)
    ):
        raise ContractError(
            f"{KERNEL} must compute the loss with the penalty {kl_estimator!r} of d = ref − new, which for 'k3' is "
            "exp(d) − d − 1",
            found=f"loss {found.item():.8f}, gradient {theirs.grad.flatten().tolist()}",
            expected=f"loss {expected.item():.8f}, gradient {ours.grad.flatten().tolist()}",
        )
