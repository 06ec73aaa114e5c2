"""The rewriting of Unsloth's source: two expressions of its loss, and the name of its kernel."""

import ast
import importlib
import inspect
import textwrap
import types
from typing import Any, NamedTuple

from sage_unsloth.patch.unsloth_names import (
    CALL_HOOK,
    FUNCTION,
    KERNEL,
    KERNEL_HOOK,
    LOSS,
    NEEDS_ENTROPIES_HOOK,
    SCORER,
    SCORER_HOOK,
    SCORER_OPTIONS,
    SCORER_PARAMETERS,
    ContractError,
)


class Rewritten(NamedTuple):
    """The two of Unsloth's names that are rewritten: what they call instead must be in the module's
    namespace.
    """

    loss: types.FunctionType
    function: type


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
        check_scorer(getattr(importlib.import_module(node.module), names[0], None))
        ours = f"{SCORER} = {SCORER_HOOK}({SCORER}, {self._unsloth_asks})"
        self.scorers += 1
        return [node, ast.copy_location(ast.parse(ours).body[0], node)]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) == f"{FUNCTION}.apply":
            found = tuple(ast.unparse(argument) for argument in node.args[:9])
            expected = (
                "new_logprobs",
                "old_logps",
                "ref_logps",
                "sampling_per_token_logps",
                "lm_head",
                "completion_input_ids",
                "completion_mask",
                "advantages",
                "trainer.beta",
            )
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


def rewritten_loss(module: types.ModuleType) -> types.FunctionType:
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


def check_scorer(scorer: Any) -> None:
    """Unsloth's scorer of log-probs and entropies must take what `scoring.scorer` passes on."""
    found = () if scorer is None else tuple(inspect.signature(scorer).parameters)
    expected = SCORER_PARAMETERS
    if found[: len(expected)] != expected or not set(found) >= SCORER_OPTIONS:
        raise ContractError(
            f"what is imported as {SCORER} must have these parameters",
            found=found,
            expected=(*expected, *sorted(SCORER_OPTIONS)),
        )


def rewritten_function(module: types.ModuleType) -> type:
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
    """A function with `seams` applied to its source, over the same globals and with the same line
    numbers.
    """
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
