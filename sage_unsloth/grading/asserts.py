"""Asserts about a program's functions, evaluated without the program.

`assert add(2, 3) == 5` becomes the call `add(2, 3)`, which the program answers in its own process,
and a comparison, which is made here. So no program sees what is expected of it, or what compares.
Only literals, arithmetic, comparisons and a few functions of Python are understood.
"""

import ast
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FUNCTIONS = {
    function.__name__: function
    for function in (
        abs, all, any, bool, dict, float, frozenset, int, len, list, max, min, round, set, sorted,
        str, sum, tuple,
    )
}  # fmt: skip
_MATH = {name: getattr(math, name) for name in ("isclose", "inf", "pi", "e", "nan", "sqrt")}
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}


@dataclass(frozen=True)
class Call:
    """A call of one of the program's functions."""

    name: str
    arguments: tuple[Any, ...]
    by_name: Mapping[str, Any]


class Assert:
    """One assert.

    Attributes:
        calls: what the program is asked, in order.

    Args:
        text: of the assert.

    Raises:
        ValueError: it is none, or of another form than the module says.
    """

    def __init__(self, text: str) -> None:
        try:
            body = ast.parse(text.strip()).body
            if len(body) != 1 or not isinstance(body[0], ast.Assert):
                raise ValueError("it is no assert")
            self._test = body[0].test
            self._nodes: list[ast.Call] = []
            self.calls: list[Call] = []
            self._collect(self._test)
            if not self.calls:
                raise ValueError("it calls no function of the program")
            self._check(self._test)
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(
                "a test must be an assert of literals, comparisons and calls of the program's "
                f"functions, as `assert add(2, 3) == 5`; got {text!r:.200}: {error}"
            ) from None

    def holds(self, values: list[Any]) -> bool:
        """Whether it holds where the calls have these values."""
        try:
            return bool(_evaluate(self._test, dict(zip(map(id, self._nodes), values, strict=True))))
        except Exception:  # the values may be of any type, as 3 < "a"
            return False

    def _collect(self, node: ast.AST) -> None:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name not in FUNCTIONS:
                arguments = tuple(_evaluate(item, {}) for item in node.args)
                by_name = {str(word.arg): _evaluate(word.value, {}) for word in node.keywords}
                self._nodes.append(node)
                self.calls.append(Call(name, arguments, by_name))
                return
        for child in ast.iter_child_nodes(node):
            self._collect(child)

    def _check(self, node: ast.expr) -> None:
        """Every node is understood; it is evaluated where values do not matter for that."""
        known = (
            ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
            ast.Compare, ast.BoolOp, ast.Call, ast.Subscript, ast.Attribute, ast.Name, ast.keyword,
            ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.Slice,
        )  # fmt: skip
        for found in ast.walk(node):
            if not isinstance(found, known):
                raise ValueError(f"{type(found).__name__} is not understood")
            if isinstance(found, ast.BinOp):
                _operator(_BINARY, found.op)
            if isinstance(found, ast.Attribute):
                _evaluate(found, {})
            if isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute):
                _evaluate(found.func, {})


def _operator(table: Mapping[type, Any], node: ast.AST) -> Any:
    if type(node) not in table:
        raise ValueError(f"{type(node).__name__} is not understood")
    return table[type(node)]


def _evaluate(node: ast.expr | None, values: Mapping[int, Any]) -> Any:
    """The value of an expression; `values` has those of the program's calls, by the node's id."""
    if id(node) in values:
        return values[id(node)]
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List() | ast.Set():
            kind = {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)]
            return kind(_evaluate(item, values) for item in node.elts)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {_evaluate(key, values): _evaluate(value, values) for key, value in pairs}
        case ast.UnaryOp():
            return _operator(_UNARY, node.op)(_evaluate(node.operand, values))
        case ast.BinOp():
            found = _operator(_BINARY, node.op)
            return found(_evaluate(node.left, values), _evaluate(node.right, values))
        case ast.BoolOp():
            results = (_evaluate(item, values) for item in node.values)
            return all(results) if isinstance(node.op, ast.And) else any(results)
        case ast.Compare():
            return _compare(node, values)
        case ast.Subscript():
            return _evaluate(node.value, values)[_evaluate(node.slice, values)]
        case ast.Slice():
            return slice(*(_evaluate(x, values) if x else None for x in _bounds(node)))
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _MATH:
            return _MATH[name]
        case ast.Name(id=name) if name in FUNCTIONS:
            return FUNCTIONS[name]
        case ast.Call(func=ast.Name() | ast.Attribute()):
            function = _evaluate(node.func, {})
            arguments = [_evaluate(item, values) for item in node.args]
            by_name = {str(word.arg): _evaluate(word.value, values) for word in node.keywords}
            return function(*arguments, **by_name)
        case _:
            raise ValueError(f"{ast.unparse(node) if node else '**'} is not understood")


def _bounds(node: ast.Slice) -> tuple[ast.expr | None, ...]:
    return node.lower, node.upper, node.step


def _compare(node: ast.Compare, values: Mapping[int, Any]) -> bool:
    left = _evaluate(node.left, values)
    for kind, item in zip(node.ops, node.comparators, strict=True):
        right = _evaluate(item, values)
        if not _operator(_COMPARE, kind)(left, right):
            return False
        left = right
    return True
