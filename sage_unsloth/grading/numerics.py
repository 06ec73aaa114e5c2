"""Whether two expressions are equal, by their values at points, each with a bound on its error.

Values further apart than their bounds are of different expressions: in floats, in microseconds,
that settles most wrong answers. Expressions are taken for equal where their values agree to `CLOSE`
digits at three points (each symbol positive, negative, complex). The points depend on the answer
and its gold, so nobody can write an expression for them. What has no value (division by zero,
infinity, a branch of a root that rounding decides) equals nothing.
"""

import cmath
import functools
import hashlib
import math
from fractions import Fraction
from typing import Any

from sage_unsloth.grading.tree import EXPRESSIONS, Node, NoValue, children, names, negated, number

DIGITS, CLOSE = 150, 60  # of the arithmetic, and those that must agree at least
LARGEST = 5_000  # decimal exponent of a value
POINTS = ("positive", "negative", "complex")

Value = tuple[Any, Any]
"""A number, and a bound on its error."""


class Floats:
    """Arithmetic of complex floats."""

    epsilon, largest = 2.0**-50, 1e100
    pi, e = math.pi, math.e
    functions = {
        "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "exp": cmath.exp, "ln": cmath.log,
        "sqrt": cmath.sqrt, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
        "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    }  # fmt: skip

    def number(self, value: Fraction) -> complex:
        return complex(value)

    def gamma(self, value: complex) -> complex:
        if value.imag:
            raise NoValue
        return complex(math.gamma(value.real))


class Digits:
    """Arithmetic of `DIGITS` digits."""

    def __init__(self) -> None:
        from mpmath import MPContext  # pyright: ignore[reportMissingTypeStubs]

        self.context = context = MPContext()
        context.dps = DIGITS
        self.epsilon, self.largest = context.mpf(10) ** (3 - DIGITS), context.mpf(10) ** LARGEST
        self.pi, self.e = +context.pi, +context.e
        named = {"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        self.functions = {
            name: getattr(context, named.get(name, name)) for name in Floats.functions
        }

    def number(self, value: Fraction) -> Any:
        return self.context.mpc(self.context.mpf(value.numerator) / value.denominator)

    def gamma(self, value: Any) -> Any:
        return self.context.gamma(value)


@functools.cache
def digits() -> Digits:
    return Digits()


class Evaluation:
    """Values of expressions at one point.

    Args:
        arithmetic: `Floats` or `Digits`.
        point: one of `POINTS`.
        seed: what the values of the symbols depend on.
    """

    def __init__(self, arithmetic: Any, point: str, seed: str):
        self.arithmetic, self.point, self.seed = arithmetic, point, seed

    def value(self, node: Node) -> Value:
        """The value of an expression.

        Raises:
            NoValue: it has none here.
        """
        kind, args = node
        if kind not in EXPRESSIONS:
            raise NoValue  # a bound with a unit, `x > 5 cm`
        if kind == "number":
            return self.checked(self.arithmetic.number(args[0]), 0)
        if kind == "symbol":
            return self.arithmetic.number(Fraction(0)) + self.symbol(args[0]), 0
        if kind == "constant":
            if args[0] == "i":
                return self.arithmetic.number(Fraction(0)) + 1j, 0
            constant = self.arithmetic.pi if args[0] == "pi" else self.arithmetic.e
            return self.checked(self.arithmetic.number(Fraction(0)) + constant, 0)
        if kind == "apply":
            return self.applied(args)
        if kind == "call":
            return self.call(args)
        parts = [self.value(arg) for arg in args]
        if kind == "negative":
            return self.checked(-parts[0][0], parts[0][1])
        if kind == "sum":
            return self.added(parts)
        if kind == "product":
            return functools.reduce(self.times, parts)
        if kind == "reciprocal":
            return self.over(parts[0])
        if kind == "power":
            return self.power(*parts)
        if kind == "root":
            return self.root(*parts)
        if kind == "degrees":
            return self.times(
                parts[0],
                self.checked(self.arithmetic.number(Fraction(1, 180)) * self.arithmetic.pi, 0),
            )
        if kind == "factorial":
            return self.factorial(parts[0])
        if kind == "binomial":
            n, k = parts
            rest = self.factorial((n[0] - k[0], n[1] + k[1]))
            return self.times(self.factorial(n), self.over(self.times(self.factorial(k), rest)))
        raise NoValue

    def checked(self, value: Any, error: Any) -> Value:
        if value.imag == 0:  # -0.0 is on the other side of a root's branch
            value = value.real + self.arithmetic.number(Fraction(0))
        error = error + abs(value) * self.arithmetic.epsilon
        if not (abs(value) < self.arithmetic.largest and error < self.arithmetic.largest):
            raise NoValue
        return value, error

    def symbol(self, name: str) -> Any:
        seed = f"{self.seed}\0{self.point}\0{name}".encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(seed).digest()
        size = 1 + Fraction(int.from_bytes(digest[:6]), 2**48)
        real = self.arithmetic.number(-size if self.point == "negative" else size)
        if self.point != "complex":
            return real
        return (
            real
            + self.arithmetic.number(Fraction(int.from_bytes(digest[6:12]), 2**48) - Fraction(1, 2))
            * 1j
        )

    def applied(self, args: tuple) -> Value:
        """A function without a value: a number that depends on its name and arguments alone."""
        if isinstance(self.arithmetic, Floats):
            raise NoValue
        texts = [self.arithmetic.context.nstr(self.value(arg)[0], 40) for arg in args[1:]]
        return self.arithmetic.number(Fraction(0)) + self.symbol("\0".join((args[0], *texts))), 0

    def added(self, parts: list[Value]) -> Value:
        total, size, error = parts[0][0], abs(parts[0][0]), parts[0][1]
        for value, more in parts[1:]:
            total, size, error = total + value, size + abs(value), error + more
        return self.checked(total, error + size * self.arithmetic.epsilon)

    def times(self, first: Value, second: Value) -> Value:
        (a, error_a), (b, error_b) = first, second
        return self.checked(a * b, abs(a) * error_b + abs(b) * error_a + error_a * error_b)

    def over(self, part: Value) -> Value:
        value, error = part
        if abs(value) <= 8 * error or not value:
            raise NoValue
        return self.checked(1 / value, 2 * error / abs(value) ** 2)

    def call(self, args: tuple) -> Value:
        name, value = args[0], self.value(args[1])
        z, error = value
        if name == "log":
            base = (
                self.value(args[2])
                if len(args) > 2
                else self.checked(self.arithmetic.number(Fraction(10)), 0)
            )
            return self.times(self.function("ln", value), self.over(self.function("ln", base)))
        if len(args) > 2:
            raise NoValue
        if name == "abs":
            return self.checked(abs(z) + self.arithmetic.number(Fraction(0)), error)
        if name in ("floor", "ceil"):
            nearest = round(float(z.real)) if abs(z.real) < 1e15 else 0
            if z.imag or abs(z.real) >= 1e15 or 0 < abs(z.real - nearest) <= 8 * error:
                raise NoValue
            return self.checked(self.arithmetic.number(Fraction(getattr(math, name)(z.real))), 0)
        if name == "cis":
            return self.function(
                "exp", self.times(value, (self.arithmetic.number(Fraction(0)) + 1j, 0))
            )
        if name in ("cot", "sec", "csc"):
            return self.over(self.function({"cot": "tan", "sec": "cos", "csc": "sin"}[name], value))
        return self.function(name, value)

    def function(self, name: str, part: Value) -> Value:
        z, error = part
        if abs(z) > 1_000 * (1 if name in ("exp", "sinh", "cosh") or z.imag else 10**12):
            raise NoValue
        if name in ("ln", "sqrt") and (abs(z) <= 8 * error or not z):
            raise NoValue
        if name in ("ln", "sqrt", "arcsin", "arccos") and z.imag and abs(z.imag) <= 8 * error:
            raise NoValue  # rounding decides the branch
        value = self.arithmetic.functions[name](z)
        slope = _SLOPES[name](z, value, self.arithmetic.functions)
        return self.checked(value, 2 * error * abs(slope) + abs(value) * self.arithmetic.epsilon)

    def root(self, base: Value, degree: Value) -> Value:
        """The principal root; of a negative number an odd root is the real one."""
        if degree[0] == 2:
            return base if not base[0] and not base[1] else self.function("sqrt", base)
        n = degree[0]
        odd = not n.imag and n.real == round(float(n.real)) and int(n.real) % 2
        if odd and not base[0].imag and base[0].real < 0:
            value, error = self.power((-base[0], base[1]), self.over(degree))
            return -value, error
        return self.power(base, self.over(degree))

    def power(self, base: Value, exponent: Value) -> Value:
        (a, error_a), (n, error_n) = base, exponent
        whole = (
            not n.imag
            and not error_n * 1e9 > 1
            and n.real == round(float(n.real))
            and abs(n.real) <= 1_000
        )
        if abs(a) <= 8 * error_a or not a:
            if whole and n.real > 0 and not a and not error_a:
                return base
            raise NoValue
        if abs(n) * (1 + abs(math.log(float(abs(a))))) > LARGEST:
            raise NoValue
        if whole:
            power = a ** int(n.real)
            return self.checked(
                power,
                2
                * abs(power)
                * (abs(n) * error_a / abs(a) + (abs(n) + 1) * self.arithmetic.epsilon),
            )
        return self.function("exp", self.times(exponent, self.function("ln", base)))

    def factorial(self, part: Value) -> Value:
        z, error = part[0] + 1, part[1]
        pole = not z.imag and z.real < 0.5 and abs(z.real - round(float(z.real))) <= 8 * error
        if abs(z) > 300 or pole:
            raise NoValue
        value = self.arithmetic.gamma(z)
        return self.checked(value, 20 * (error + abs(z) * self.arithmetic.epsilon) * abs(value))


_SLOPES = {
    "sin": lambda z, v, f: f["cos"](z),
    "cos": lambda z, v, f: f["sin"](z),
    "tan": lambda z, v, f: 1 + v * v,
    "exp": lambda z, v, f: v,
    "ln": lambda z, v, f: 1 / z,
    "sqrt": lambda z, v, f: 1 / v,
    "arcsin": lambda z, v, f: 1 / f["sqrt"](1 - z * z) if z not in (1, -1) else 0,
    "arccos": lambda z, v, f: 1 / f["sqrt"](1 - z * z) if z not in (1, -1) else 0,
    "arctan": lambda z, v, f: 1 / (1 + z * z),
    "sinh": lambda z, v, f: f["cosh"](z),
    "cosh": lambda z, v, f: f["sinh"](z),
    "tanh": lambda z, v, f: 1 - v * v,
}
_ERRORS = (ArithmeticError, ValueError, RecursionError, KeyError)
_FLOATS = Floats()


def surely_differ(first: Node, second: Node) -> bool:
    """Whether two expressions are certain not to be equal, by floats; False if nobody can tell."""
    at = Evaluation(_FLOATS, "positive", "")
    try:
        (a, error_a), (b, error_b) = at.value(first), at.value(second)
    except _ERRORS:
        return False
    return abs(a - b) > 16 * (error_a + error_b) + 1e-9 * max(abs(a), abs(b))


def is_near(first: Node, second: Node, distance: Fraction | float) -> bool:
    """Whether the values of two expressions of numbers differ by less, in floats."""
    at = Evaluation(_FLOATS, POINTS[0], "")
    try:
        return not names(first) and abs(at.value(first)[0] - at.value(second)[0]) < distance
    except _ERRORS:
        return False


def equal(first: Node, second: Node, seed: str) -> bool:
    """Whether two expressions have the same value at all points where the first has one."""
    return _agree_at_points(first, second, seed, ratio=False)


def proportional(first: Node, second: Node, seed: str) -> bool:
    """Whether two expressions differ by a constant factor that is neither zero nor infinite."""
    return _agree_at_points(first, second, seed, ratio=True)


def _agree_at_points(one: Node, other: Node, seed: str, *, ratio: bool) -> bool:
    bound = names(one) | names(other) | names(one, "apply") | names(other, "apply")
    factor: Value | None = None
    compared = 0
    for point in POINTS if bound else POINTS[:1]:
        at = Evaluation(digits(), point, seed)
        try:
            a = at.value(one)
        except _ERRORS:
            continue
        try:
            b = at.value(other)
            if ratio and factor is None:
                factor = at.times(b, at.over(a))
                if abs(factor[0]) <= 8 * factor[1]:
                    return False
                compared += 1
                continue
            if ratio and factor is not None:
                a = at.times(a, factor)
        except _ERRORS:
            return False
        if not _agree(a, b):
            return False
        compared += 1
    return compared >= (2 if bound else 1)


def _agree(first: Value, second: Value) -> bool:
    (a, error_a), (b, error_b) = first, second
    error, close = error_a + error_b, digits().context.mpf(10) ** -CLOSE
    if abs(a - b) > 16 * error:
        return False
    return error <= close * max(abs(a), abs(b)) or error <= close


def is_of_matrices(node: Node) -> bool:
    """Whether capital letters of a gold must be matrices: an inverse or a transpose beside another
    one, or a product in which one cancels that is there (P D P^-1, AB - BA).
    """
    if _does_not_commute(node):
        return True
    capitals = {name for name in names(node) if len(name.split("_")[0]) == 1 and name[:1].isupper()}
    if len(capitals - {"T"}) < 2:
        return False
    at = Evaluation(digits(), "positive", "")
    for name in capitals:
        try:
            if _agree(at.value(node), at.value(_renamed(node, name))):
                return True
        except _ERRORS:
            return False
    return False


def _does_not_commute(node: Node) -> bool:
    """Whether a product has an inverse before a letter, a transpose, or an operator (a hat)."""
    if node.kind == "power" and node.args[1] == Node("symbol", ("T",)):
        return True
    if node.kind == "product":
        letters = [bool(names(factor)) for factor in node.args]
        for place, factor in enumerate(node.args):
            inverse = factor.kind == "power" and factor.args[1] == negated(number(1))
            if inverse and letters[place]:
                around = factor.args[0] in node.args[: max(0, place - 1)]
                if any(letters[place + 1 :]) or around:
                    return True
            operator = factor.kind == "symbol" and factor.args[0].startswith("hat(")
            if operator and sum(letters) > 1:
                return True
    return any(map(_does_not_commute, children(node)))


def _renamed(node: Node, name: str) -> Node:
    if node == Node("symbol", (name,)):
        return Node("symbol", (name + "*",))
    parts = (_renamed(arg, name) if isinstance(arg, Node) else arg for arg in node.args)
    return Node(node.kind, tuple(parts))
