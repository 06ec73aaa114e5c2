r"""The tree of an answer, and its exact value.

Expressions:

    number (Fraction)      symbol (name)         constant ("pi", "e" or "i")   infinity ()
    sum (terms)            negative (term)       product (factors)             reciprocal (factor)
    power (base, exponent) root (term, degree)   call (name, arguments)        apply (name, ...)
    factorial (term)       binomial (n, k)       degrees (term)

`call` is a function with a known value, `apply` one without (f, a cross product). Division is a
product with a reciprocal, so the tree is only as deep as the brackets of the text.

Answers that are not a single expression:

    quantity (expression, Unit)        members (elements)          tuple (elements)
    list (elements)                    matrix (rows)               based (digits, base)
    interval (low, high, has_low, has_high, ...)                   union (intervals, variable)
    equation (sides)                   relation (operator, left, right)
    assignments ((name, value), ...)   dimensions (lengths)
"""

import functools
import math
import operator
from fractions import Fraction
from typing import Any, NamedTuple

EXPRESSIONS = frozenset(
    (
        "number", "symbol", "constant", "infinity", "sum", "negative", "product", "reciprocal",
        "power", "root", "call", "apply", "factorial", "binomial", "degrees",
    )
)  # fmt: skip
MAX_BITS = 4_000  # of an exact value's numerator and denominator
MAX_COUNT = 300  # of which a factorial or binomial is taken


class Node(NamedTuple):
    """A node; the arguments of each kind are listed above."""

    kind: str
    args: tuple[Any, ...]


INFINITY = Node("infinity", ())
INFINITE = frozenset((INFINITY, Node("negative", (INFINITY,))))


class NoValue(ArithmeticError):
    """Not finite, not defined, or too large to compute."""


def number(value: Fraction | int) -> Node:
    return Node("number", (Fraction(value),))


def product(*factors: Node) -> Node:
    return factors[0] if len(factors) == 1 else Node("product", factors)


def quotient(top: Node, bottom: Node) -> Node:
    return Node("product", (top, Node("reciprocal", (bottom,))))


def negate(node: Node) -> Node:
    return node.args[0] if node.kind == "negative" else Node("negative", (node,))


def children(node: Node) -> list[Node]:
    return [arg for arg in node.args if isinstance(arg, Node)]


def names(node: Node, kind: str = "symbol") -> set[str]:
    """The names of a tree's symbols, or of its functions without a value (`apply`)."""
    own = {node.args[0]} if node.kind == kind else set()
    return own.union(*(names(child, kind) for child in children(node)))


def has(node: Node, *kinds: str) -> bool:
    return node.kind in kinds or any(has(child, *kinds) for child in children(node))


def is_plain_number(node: Node) -> bool:
    """Whether a tree is a number as people write one: 42, -3/4, 1.5 × 10^8, 10^-3."""
    if node.kind in ("negative", "reciprocal"):
        return is_plain_number(node.args[0])
    if node.kind == "product" and len(node.args) == 2:
        first, second = node.args
        below = second.kind == "reciprocal" and second.args[0].kind == "number"
        return first.kind == "number" and (below or _is_power_of_ten(second))
    return node.kind == "number" or _is_power_of_ten(node)


def _is_power_of_ten(node: Node) -> bool:
    if node.kind != "power" or node.args[0] != number(10):
        return False
    exponent = node.args[1]
    return (exponent.args[0] if exponent.kind == "negative" else exponent).kind == "number"


def exact(node: Node) -> Fraction | None:
    """The rational value of an expression, or None if it has none or is too large."""
    try:
        return _exact(node)
    except (NoValue, ArithmeticError):
        return None


def _exact(node: Node) -> Fraction:
    kind, args = node
    if kind == "number":
        return args[0]
    if kind in ("sum", "product"):
        values = [_exact(arg) for arg in args]
        operation = operator.add if kind == "sum" else operator.mul
        return functools.reduce(lambda a, b: _small(operation(a, b)), values)
    if kind == "negative":
        return -_exact(args[0])
    if kind == "reciprocal":
        return 1 / _exact(args[0])
    if kind == "power":
        return _power(_exact(args[0]), _exact(args[1]))
    if kind == "root":
        return _root(_exact(args[0]), _count(args[1], 64))
    if kind == "factorial":
        return _small(Fraction(math.factorial(_count(args[0], MAX_COUNT))))
    if kind == "binomial":
        return _small(Fraction(math.comb(*(_count(arg, MAX_COUNT) for arg in args))))
    if kind == "call" and args[0] in ("abs", "floor", "ceil"):
        function = {"abs": abs, "floor": math.floor, "ceil": math.ceil}[args[0]]
        return Fraction(function(_exact(args[1])))
    raise NoValue


def _small(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise NoValue
    return value


def _count(node: Node, most: int) -> int:
    value = _exact(node)
    if value.denominator != 1 or not 0 <= value <= most:
        raise NoValue
    return int(value)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        return _power(_root(base, exponent.denominator), Fraction(exponent.numerator))
    # Checked before computing: 10^10^10 would take all memory.
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (base in (0, 1, -1) and abs(exponent) > MAX_BITS) or bits * abs(exponent) > MAX_BITS + 1:
        raise NoValue
    if base == 0 and exponent <= 0:
        raise NoValue  # 0^0 too: it has no value that everybody agrees on
    return base ** int(exponent)


def _root(value: Fraction, degree: int) -> Fraction:
    """The root if it is rational."""
    if value < 0 or not 1 <= degree <= 64:
        raise NoValue
    parts = []
    for part in (value.numerator, value.denominator):
        if degree == 2:
            root = math.isqrt(part)
        else:
            # A guess from floats is enough, because the next line checks it.
            root = round(part ** (1 / degree)) if part < 2**200 else 0
        if root**degree != part:
            raise NoValue
        parts.append(root)
    return Fraction(*parts)
