"""Evaluates asserts about a program's functions without running them next to the program.

`assert add(2, 3) == 5` becomes the call `add(2, 3)`, which the program answers in its own process,
and a comparison, which is made here. So no program sees the expected value or the comparison.
Only literals, arithmetic, comparisons and a few functions of Python are supported.

The values come from a model and this process is the trainer's, so time and memory of each operator
must be bounded by the size of its operands: `%` takes only numbers (`'%600000000d' % 2` is a
gigabyte), products have a largest size, sums take only numbers, and values are ordered only down to
`ORDERED` levels of nesting.
"""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sage_unsloth.grading.program_results import NUMBER_TYPES, DictValue, SetValue

MAX_SIZE = 100_000  # items, characters or bits of a product
ORDERED = 3  # levels of lists that `<`, `sorted`, `min` and `max` look into
MAX_DIGITS = 400  # of a text that becomes a number, and of what `round` rounds to

_SEQUENCES = (str, bytes, list, tuple)
_ITERABLES = (*_SEQUENCES, SetValue, DictValue)


def _take(value: Any, kinds: tuple[type, ...]) -> Any:
    """The value if its type is exactly one of these, else TypeError."""
    if type(value) not in kinds:
        raise TypeError(f"{type(value).__name__} is not taken here")
    return value


def _on_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: function(*(_take(number, NUMBER_TYPES) for number in numbers))


def _add(left: Any, right: Any) -> Any:
    kinds = (type(left),) if type(left) in _SEQUENCES else NUMBER_TYPES
    return _take(left, kinds) + _take(right, kinds)


def _subtract(left: Any, right: Any) -> Any:
    kinds = (SetValue,) if type(left) is SetValue else NUMBER_TYPES
    return _take(left, kinds) - _take(right, kinds)


def _multiply(left: Any, right: Any) -> Any:
    if type(right) in _SEQUENCES:
        left, right = right, left
    if type(left) in _SEQUENCES:
        # Checked first: making the product would already take the memory.
        if _size(left) * abs(_take(right, (bool, int))) > MAX_SIZE:
            raise ValueError("too long a product")
        return left * right
    if sum(number.bit_length() for number in (left, right) if isinstance(number, int)) > MAX_SIZE:
        raise ValueError("too large a product")
    return _take(left, NUMBER_TYPES) * _take(right, NUMBER_TYPES)


def _size(value: Any) -> int:
    """Items and characters of a value, including those of its items."""
    if isinstance(value, (str, bytes)):
        return 1 + len(value)
    if isinstance(value, DictValue):
        return 1 + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple, SetValue)):
        return 1 + sum(map(_size, value))
    return 1


def _check_depth(value: Any, depth: int = ORDERED) -> Any:
    """The value, if its nesting is shallow: ordering compares each level twice."""
    if isinstance(value, (list, tuple)):
        if depth == 0:
            raise ValueError("nested too deep to be ordered")
        for item in value:
            _check_depth(item, depth - 1)
    return value


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda left, right: compare(_check_depth(left), _check_depth(right))


def _contains(items: Any, item: Any) -> bool:
    return item in _take(items, _ITERABLES)


def _items(value: Any) -> Iterable[Any]:
    return _take(value, _ITERABLES)


def _extreme(function: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(first: Any, *others: Any, **options: Any) -> Any:
        values = [first, *others] if others else list(_items(first))
        return function(_check_depth(values, ORDERED + 1), **options)

    return extreme


def _sort(items: Any, **options: Any) -> list[Any]:
    return sorted(_check_depth(list(_items(items)), ORDERED + 1), **options)


def _sum(items: Any, start: Any = 0) -> Any:
    return sum((_take(item, NUMBER_TYPES) for item in _items(items)), _take(start, NUMBER_TYPES))


def _short(value: Any, kinds: tuple[type, ...]) -> Any:
    if type(value) is str and len(value) > MAX_DIGITS:
        raise ValueError("too long a number")
    return _take(value, (str, *kinds))


def _round(number: Any, digits: Any = None) -> Any:
    if digits is not None and abs(_take(digits, (bool, int))) > MAX_DIGITS:
        raise ValueError("too many digits")
    return round(_take(number, NUMBER_TYPES), digits)


def _to_int(value: Any = 0, *base: Any) -> int:
    return int(_short(value, (bool, int, float)), *base)


def _to_float(value: Any = 0.0) -> float:
    return float(_short(value, (bool, int, float)))


def _to_dict(items: Any = (), **by_name: Any) -> DictValue:
    pairs = items.items() if isinstance(items, DictValue) else _items(items)
    return DictValue([*pairs, *by_name.items()])


BUILTINS: dict[str, Callable[..., Any]] = {
    "abs": _on_numbers(abs),
    "all": lambda items: all(_items(items)),
    "any": lambda items: any(_items(items)),
    "bool": lambda value=False: bool(value),
    "dict": _to_dict,
    "float": _to_float,
    "frozenset": lambda items=(): SetValue(_items(items), frozenset),
    "int": _to_int,
    "len": lambda items: len(_take(items, _ITERABLES)),
    "list": lambda items=(): list(_items(items)),
    "max": _extreme(max),
    "min": _extreme(min),
    "round": _round,
    "set": lambda items=(): SetValue(_items(items)),
    "sorted": _sort,
    "str": lambda value="": value if isinstance(value, str) else repr(value),
    "sum": _sum,
    "tuple": lambda items=(): tuple(_items(items)),
}
_MATH: dict[str, Any] = {name: getattr(math, name) for name in ("inf", "pi", "e", "nan")}
_MATH |= {"sqrt": _on_numbers(math.sqrt), "isclose": math.isclose}
_BINARY = {
    ast.Add: _add,
    ast.Sub: _subtract,
    ast.Mult: _multiply,
    ast.Div: _on_numbers(operator.truediv),
    ast.FloorDiv: _on_numbers(operator.floordiv),
    ast.Mod: _on_numbers(operator.mod),
}
_UNARY = {
    ast.Not: operator.not_,
    ast.USub: _on_numbers(operator.neg),
    ast.UAdd: _on_numbers(operator.pos),
}
_COMPARE = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: _ordered(operator.lt),
    ast.LtE: _ordered(operator.le),
    ast.Gt: _ordered(operator.gt),
    ast.GtE: _ordered(operator.ge),
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, items: _contains(items, item),
    ast.NotIn: lambda item, items: not _contains(items, item),
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
        calls: calls of the program's functions, in order.

    Raises:
        ValueError: the text is not an assert, or not of a supported form.
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
                "a test must be an assert of literals, comparisons and calls, as `assert add(2, 3) "
                f"== 5`, got {text!r:.200}: {error}"
            ) from None

    def holds(self, values: list[Any]) -> bool:
        """Whether the assert holds for these results of its calls (`program_results` values)."""
        try:
            # By id, because two calls that are written alike are two nodes.
            return bool(_evaluate(self._test, dict(zip(map(id, self._nodes), values, strict=True))))
        except Exception:  # the values may be of any type, as 3 < "a"
            return False

    def _collect(self, node: ast.AST) -> None:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name not in BUILTINS:
                arguments = tuple(_literal(item) for item in node.args)
                by_name = {str(word.arg): _literal(word.value) for word in node.keywords}
                self._nodes.append(node)
                self.calls.append(Call(name, arguments, by_name))
                return
        for child in ast.iter_child_nodes(node):
            self._collect(child)

    def _check(self, node: ast.expr) -> None:
        """Checks that every node is supported, and evaluates the parts without calls."""
        known = (
            ast.Constant, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp,
            ast.Compare, ast.BoolOp, ast.Call, ast.Subscript, ast.Attribute, ast.Name, ast.keyword,
            ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context, ast.Slice,
        )  # fmt: skip
        for result in ast.walk(node):
            if not isinstance(result, known):
                raise ValueError(f"{type(result).__name__} is not understood")
            if isinstance(result, ast.BinOp):
                _operator(_BINARY, result.op)
                if not any(child in self._nodes for child in ast.walk(result)):
                    _evaluate(result, {})  # one that is refused for its types would never hold
            if isinstance(result, ast.Attribute):
                _evaluate(result, {})
            if isinstance(result, ast.Call) and isinstance(result.func, ast.Attribute):
                _evaluate(result.func, {})


def _operator(table: Mapping[type, Any], node: ast.AST) -> Any:
    if type(node) not in table:
        raise ValueError(f"{type(node).__name__} is not understood")
    return table[type(node)]


def _literal(node: ast.expr) -> Any:
    """An argument's value with Python's own sets and dicts, as the program gets it."""
    return _python(_evaluate(node, {}))


def _python(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(map(_python, value))
    if isinstance(value, SetValue):
        return value.kind(map(_python, value))
    if isinstance(value, DictValue):
        return {_python(key): _python(item) for key, item in value.items()}
    return value


def _evaluate(node: ast.expr | None, values: Mapping[int, Any]) -> Any:
    """The value of an expression; `values` maps a node's id to the result of that call."""
    if id(node) in values:
        return values[id(node)]
    match node:
        case ast.Constant():
            return node.value
        case ast.Tuple() | ast.List() | ast.Set():
            kind = {ast.Tuple: tuple, ast.List: list, ast.Set: SetValue}[type(node)]
            return kind(_evaluate(item, values) for item in node.elts)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return DictValue(
                (_evaluate(key, values), _evaluate(item, values)) for key, item in pairs
            )
        case ast.UnaryOp():
            return _operator(_UNARY, node.op)(_evaluate(node.operand, values))
        case ast.BinOp():
            apply = _operator(_BINARY, node.op)
            return apply(_evaluate(node.left, values), _evaluate(node.right, values))
        case ast.BoolOp():
            results = (_evaluate(item, values) for item in node.values)
            return all(results) if isinstance(node.op, ast.And) else any(results)
        case ast.Compare():
            return _compare(node, values)
        case ast.Subscript():
            items = _take(_evaluate(node.value, values), (*_SEQUENCES, DictValue))
            return items[_evaluate(node.slice, values)]
        case ast.Slice():
            return slice(*(_evaluate(x, values) if x else None for x in _bounds(node)))
        case ast.Attribute(value=ast.Name(id="math"), attr=name) if name in _MATH:
            return _MATH[name]
        case ast.Name(id=name) if name in BUILTINS:
            return BUILTINS[name]
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
