"""The rewriting of Unsloth's source, in memory: three places in its loss, one in its function.

`grpo_accumulated_loss` of the generated trainer (and how it reads afterwards):

    _need_entropy = CONDITION                  ->  … = (CONDITION) or needs_entropies_hook(trainer)
    from … import … as _entropy_log_softmax    ->  followed by: … = scorer_hook(…, CONDITION)
    UnslothEfficientGRPO.apply(new, old, …)    ->  call_hook(trainer, entropies, new, old, …)

`UnslothEfficientGRPO.forward`, only for a penalty that Unsloth's loss does not have:

    grpo_compute_loss                          ->  kernel_hook

Why source and not a wrapper: the entropies are local variables of the loss, and Unsloth copies its
loss as source into the trainer, so there is no other place to take them from without a second
forward pass. Each place is counted; another number than one is a `ContractError`. The hooks are
names of the trainer's module that `guided_kl` sets while it is open.
"""

import ast
import importlib
import inspect
import textwrap
import types
from typing import Any, NamedTuple

from sage_unsloth.patch import unsloth_names as names
from sage_unsloth.patch.unsloth_names import ContractError, check_scorer


class Rewritten(NamedTuple):
    """The rewritten copies; the module has its own until `guided_kl` replaces the loss."""

    loss: types.FunctionType
    function: type


class _LossPlaces(ast.NodeTransformer):
    """Rewrites the three places of the loss, and counts them."""

    def __init__(self) -> None:
        self.conditions = 0
        self.scorers = 0
        self.calls = 0
        self.in_order = False
        self._condition: str | None = None  # Unsloth's own

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id == "_need_entropy":
            self._condition = ast.unparse(node.value)
            asks = f"({self._condition}) or {names.NEEDS_ENTROPIES_HOOK}(trainer)"
            node.value = ast.copy_location(ast.parse(asks, mode="eval").body, node.value)
            self.conditions += 1
        return self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | list[ast.AST]:
        scorer = [alias.name for alias in node.names if alias.asname == names.SCORER]
        if not scorer or node.module is None:
            return node
        check_scorer(getattr(importlib.import_module(node.module), scorer[0], None))
        # Without it, Unsloth's own wish for entropies would be lost: see `rewritten_loss`.
        self.in_order = self._condition is not None
        # Where only we want the entropies, ours takes them in one pass over the logits.
        ours = f"{names.SCORER} = {names.SCORER_HOOK}({names.SCORER}, {self._condition})"
        self.scorers += 1
        return [node, ast.copy_location(ast.parse(ours).body[0], node)]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if ast.unparse(node.func) != f"{names.FUNCTION}.apply":
            return node
        # A swapped pair of arguments would be a wrong loss without an error.
        expected = names.EXPECTED_ARGUMENTS
        found = tuple(ast.unparse(argument) for argument in node.args[: len(expected)])
        if found != expected:
            raise ContractError(
                f"{names.FUNCTION}.apply must be called with these", found=found, expected=expected
            )
        before = ast.parse("[trainer, new_entropies if _need_entropy else None]", mode="eval").body
        assert isinstance(before, ast.List)
        node.func = ast.copy_location(ast.Name(names.CALL_HOOK, ast.Load()), node.func)
        node.args[:0] = [ast.copy_location(argument, node.func) for argument in before.elts]
        self.calls += 1
        return node


class _KernelName(ast.NodeTransformer):
    """Renames the loss kernel, and counts it."""

    count = 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == names.KERNEL:
            self.count += 1
            node = ast.copy_location(ast.Name(names.KERNEL_HOOK, node.ctx), node)
        return node


def rewritten_loss(module: types.ModuleType) -> types.FunctionType:
    """`grpo_accumulated_loss` of the generated trainer's module, with the hooks in it.

    Raises:
        ContractError: a place is missing, is there twice, or has other arguments.
    """
    places = _LossPlaces()
    rewritten = recompiled(module, getattr(module, names.LOSS), places)
    found = {
        "_need_entropy = …": places.conditions,
        f"{names.FUNCTION}.apply(…)": places.calls,
        f"import … as {names.SCORER}": places.scorers,
    }
    expected = dict.fromkeys(found, 1)
    if found != expected:
        raise ContractError(
            f"{names.LOSS} must contain each seam once", found=found, expected=expected
        )
    if not places.in_order:
        raise ContractError(
            "_need_entropy must be assigned before the scorer is imported",
            found="the import first",
            expected="the assignment first",
        )
    return rewritten


def rewritten_function(module: types.ModuleType) -> type:
    """A subclass of `UnslothEfficientGRPO` over the kernel that `KERNEL_HOOK` names.

    Raises:
        ContractError: the kernel is called more or less often than once.
    """
    original, name = getattr(module, names.FUNCTION), _KernelName()
    forward = recompiled(module, original.forward, name)
    if name.count != 1:
        raise ContractError(
            f"{names.FUNCTION}.forward must call {names.KERNEL} once", found=name.count, expected=1
        )
    return type(f"Guided{names.FUNCTION}", (original,), {"forward": staticmethod(forward)})


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
