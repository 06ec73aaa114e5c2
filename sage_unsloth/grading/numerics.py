"""Decides whether two expressions are equal, by their values at points, each with an error bound.

Values further apart than their bounds belong to different expressions: floats settle most wrong
answers so, in microseconds. Expressions count as equal if their values agree in
`AGREEING_DIGITS` digits at three points (each symbol positive, negative, complex). The points
depend on the answer and its gold, so an expression cannot be built for them. An expression without
a value (division by zero, infinity, a branch of a root that rounding decides) equals nothing.
"""

import cmath
import functools
import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from sage_unsloth.grading.tree import EXPRESSIONS, Node, NoValue, children, names, negated, number

DIGITS, AGREEING_DIGITS = 150, 60  # of the arithmetic, and those that must agree at least
MAX_EXPONENT = 5_000  # decimal exponent of a value
POINTS = ("positive", "negative", "complex")

Value = tuple[Any, Any]
"""A number and its error bound."""


class Arithmetic(NamedTuple):
    """Complex numbers of one precision.

    Attributes:
        library: `cmath` or mpmath: its functions and constants.
        number: converts a fraction.
        epsilon: relative error of an operation.
        largest: bound on the size of a value.
    """

    library: Any
    number: Callable[[Fraction], Any]
    gamma: Callable[[Any], Any]
    epsilon: Any
    largest: Any


def _gamma(value: complex) -> complex:
    if value.imag:
        raise NoValue
    return complex(math.gamma(value.real))


FLOATS = Arithmetic(cmath, complex, _gamma, 2.0**-50, 1e100)


@functools.cache
def digits() -> Arithmetic:
    from mpmath import MPContext  # pyright: ignore[reportMissingTypeStubs]

    context = MPContext()
    context.dps = DIGITS
    ten = context.mpf(10)

    def of_fraction(value: Fraction) -> Any:
        return context.mpc(context.mpf(value.numerator) / value.denominator)

    return Arithmetic(context, of_fraction, context.gamma, ten ** (3 - DIGITS), ten**MAX_EXPONENT)


class Evaluation:
    """Values of expressions at one point.

    Args:
        arithmetic: `FLOATS` or `digits()`.
        point: one of `POINTS`.
        seed: determines the values of the symbols.
    """

    def __init__(self, arithmetic: Arithmetic, point: str, seed: str):
        self.arithmetic, self.point, self.seed = arithmetic, point, seed
        self.epsilon = arithmetic.epsilon
        self.zero = arithmetic.number(Fraction(0))

    def value(self, node: Node) -> Value:
        """The value of an expression.

        Raises:
            NoValue: it has none at this point.
        """
        kind, args = node
        if kind not in EXPRESSIONS:
            # Only kinds with a value; equations and sets are compared part by part.
            raise NoValue  # a bound with a unit, `x > 5 cm`
        if kind == "number":
            return self.number(args[0])
        if kind == "symbol":
            return self.symbol(args[0]), 0
        if kind == "constant":
            if args[0] == "i":
                return self.zero + 1j, 0
            return self.checked(self.zero + getattr(self.arithmetic.library, args[0]), 0)
        if kind == "apply":
            return self.applied(*args)
        if kind == "call":
            return self.call(args[0], *map(self.value, args[1:]))
        parts = [self.value(arg) for arg in args]
        if kind == "sum":
            return self.added(parts)
        if kind == "product":
            return functools.reduce(self.times, parts)
        if kind == "negative":
            return self.checked(-parts[0][0], parts[0][1])
        if kind == "degrees":
            pi = self.checked(self.zero + self.arithmetic.library.pi, 0)
            return self.times(parts[0], self.times(pi, self.number(Fraction(1, 180))))
        if kind == "binomial":
            (n, error_n), (k, error_k) = parts
            rest = self.factorial((n - k, error_n + error_k))
            below = self.times(self.factorial(parts[1]), rest)
            return self.times(self.factorial(parts[0]), self.reciprocal(below))
        if kind == "infinity":
            raise NoValue
        return getattr(self, kind)(*parts)  # reciprocal, power, root, factorial

    def checked(self, value: Any, error: Any) -> Value:
        if value.imag == 0:  # -0.0 is on the other side of a root's branch
            value = value.real + self.zero
        # Every operation adds its own rounding, so the bound holds for the whole expression.
        error = error + abs(value) * self.epsilon
        if not (abs(value) < self.arithmetic.largest and error < self.arithmetic.largest):
            raise NoValue
        return value, error

    def number(self, value: Fraction) -> Value:
        return self.checked(self.arithmetic.number(value), 0)

    def symbol(self, name: str) -> Any:
        # A hash and no generator: a symbol has one value in gold and answer, in any order of
        # reading.
        seed = f"{self.seed}\0{self.point}\0{name}".encode("utf-8", "surrogatepass")
        digest = hashlib.sha256(seed).digest()
        real, imaginary = (
            Fraction(int.from_bytes(part), 2**48) for part in (digest[:6], digest[6:12])
        )
        # Of a size from 1 to 2, where powers neither vanish nor explode.
        size = self.arithmetic.number(-1 - real if self.point == "negative" else 1 + real)
        if self.point != "complex":
            return size
        return size + self.arithmetic.number(imaginary - Fraction(1, 2)) * 1j

    def applied(self, name: str, *args: Node) -> Value:
        """A function without a known value: a number that depends on its name and arguments."""
        # Floats are too coarse to tell arguments apart by their text.
        if self.arithmetic is FLOATS:
            raise NoValue
        texts = [self.arithmetic.library.nstr(self.value(arg)[0], 40) for arg in args]
        return self.symbol("\0".join((name, *texts))), 0

    def added(self, parts: list[Value]) -> Value:
        total, size, error = parts[0][0], abs(parts[0][0]), parts[0][1]
        for value, more in parts[1:]:
            total, size, error = total + value, size + abs(value), error + more
        return self.checked(total, error + size * self.epsilon)

    def times(self, first: Value, second: Value) -> Value:
        (a, error_a), (b, error_b) = first, second
        return self.checked(a * b, abs(a) * error_b + abs(b) * error_a + error_a * error_b)

    def reciprocal(self, part: Value) -> Value:
        value, error = part
        # A value that may be 0 has no reciprocal. 8 leaves room for the bound being a first order
        # one.
        if abs(value) <= 8 * error or not value:
            raise NoValue
        return self.checked(1 / value, 2 * error / abs(value) ** 2)

    def call(self, name: str, argument: Value, base: Value | None = None) -> Value:
        if name == "log":
            base = base or self.number(Fraction(10))
            return self.times(
                self.function("ln", argument), self.reciprocal(self.function("ln", base))
            )
        z, error = argument
        if base is not None:
            raise NoValue
        if name == "abs":
            return self.checked(abs(z) + self.zero, error)
        if name in ("floor", "ceil"):
            # Just below a whole number floor would be decided by rounding.
            if z.imag or abs(z.real) >= 1e15 or 0 < abs(z.real - round(z.real)) <= 8 * error:
                raise NoValue
            return self.number(Fraction(getattr(math, name)(z.real)))
        if name == "cis":
            return self.function("exp", self.times(argument, (self.zero + 1j, 0)))
        if name in ("cot", "sec", "csc"):
            below = {"cot": "tan", "sec": "cos", "csc": "sin"}[name]
            return self.reciprocal(self.function(below, argument))
        return self.function(name, argument)

    def function(self, name: str, argument: Value) -> Value:
        z, error = argument
        # mpmath would compute with as many digits as the argument has.
        if abs(z) > 1_000 * (1 if name in ("exp", "sinh", "cosh") or z.imag else 10**12):
            raise NoValue
        if name in ("ln", "sqrt") and (abs(z) <= 8 * error or not z):
            raise NoValue
        if name in ("ln", "sqrt", "arcsin", "arccos") and z.imag and abs(z.imag) <= 8 * error:
            raise NoValue  # rounding decides the branch
        library = self.arithmetic.library
        named, slope = _FUNCTIONS[name]
        value = getattr(library, named)(z)
        more = 2 * error * abs(slope(z, value, library)) + abs(value) * self.epsilon
        return self.checked(value, more)

    def root(self, base: Value, degree: Value) -> Value:
        """The principal root; of a negative number an odd root is the real one."""
        (a, error), (n, _) = base, degree
        if n == 2:
            return base if not a and not error else self.function("sqrt", base)
        # The cube root of −8 is −2 to a reader, though the principal one is complex.
        odd = not n.imag and n.real == round(n.real) and int(n.real) % 2
        if odd and not a.imag and a.real < 0:
            value, error = self.power((-a, error), self.reciprocal(degree))
            return -value, error
        return self.power(base, self.reciprocal(degree))

    def power(self, base: Value, exponent: Value) -> Value:
        (a, error), (n, error_n) = base, exponent
        # A whole exponent is multiplied out: exp(n ln a) has no value for a negative base's branch.
        whole = not n.imag and n.real == round(n.real) and abs(n) <= 1_000 and error_n * 1e9 <= 1
        if abs(a) <= 8 * error or not a:
            if whole and n.real > 0 and not a and not error:
                return base
            raise NoValue
        # Before computing: 10^10^10 would take all memory.
        if abs(n) * (1 + abs(math.log(float(abs(a))))) > MAX_EXPONENT:
            raise NoValue
        if not whole:
            return self.function("exp", self.times(exponent, self.function("ln", base)))
        power = a ** int(n.real)
        relative = abs(n) * error / abs(a) + (abs(n) + 1) * self.epsilon
        return self.checked(power, 2 * abs(power) * relative)

    def factorial(self, part: Value) -> Value:
        z, error = part[0] + 1, part[1]
        # Γ has poles at 0, −1, −2, …
        pole = not z.imag and z.real < 0.5 and abs(z.real - round(z.real)) <= 8 * error
        if abs(z) > 300 or pole:
            raise NoValue
        value = self.arithmetic.gamma(z)
        return self.checked(value, 20 * (error + abs(z) * self.epsilon) * abs(value))


def _arc_slope(z: Any, value: Any, library: Any) -> Any:
    return 1 / library.sqrt(1 - z * z) if z not in (1, -1) else 0


# What `cmath` and mpmath call a function, and its slope up to the sign.
_FUNCTIONS: dict[str, tuple[str, Callable[[Any, Any, Any], Any]]] = {
    "sin": ("sin", lambda z, value, library: library.cos(z)),
    "cos": ("cos", lambda z, value, library: library.sin(z)),
    "tan": ("tan", lambda z, value, library: 1 + value * value),
    "exp": ("exp", lambda z, value, library: value),
    "ln": ("log", lambda z, value, library: 1 / z),
    "sqrt": ("sqrt", lambda z, value, library: 1 / value),
    "arcsin": ("asin", _arc_slope),
    "arccos": ("acos", _arc_slope),
    "arctan": ("atan", lambda z, value, library: 1 / (1 + z * z)),
    "sinh": ("sinh", lambda z, value, library: library.cosh(z)),
    "cosh": ("cosh", lambda z, value, library: library.sinh(z)),
    "tanh": ("tanh", lambda z, value, library: 1 - value * value),
}
_ERRORS = (ArithmeticError, ValueError, RecursionError, KeyError)


def surely_differ(first: Node, second: Node) -> bool:
    """Whether floats prove that two expressions differ; False if they cannot tell."""
    at = Evaluation(FLOATS, "positive", "")
    try:
        (a, error_a), (b, error_b) = at.value(first), at.value(second)
    except _ERRORS:
        return False
    # Certain only: a wrong "differs" would mark a right answer as wrong.
    return abs(a - b) > 16 * (error_a + error_b) + 1e-9 * max(abs(a), abs(b))


def is_near(first: Node, second: Node, distance: Fraction | float) -> bool:
    """Whether two expressions of numbers differ by less than `distance`, in floats."""
    at = Evaluation(FLOATS, POINTS[0], "")
    try:
        return not names(first) and abs(at.value(first)[0] - at.value(second)[0]) < distance
    except _ERRORS:
        return False


def equal(gold: Node, answer: Node, seed: str) -> bool:
    """Whether two expressions have the same value at all points where the first has one."""
    return _agree_at_points(gold, answer, seed, ratio=False)


def proportional(gold: Node, answer: Node, seed: str) -> bool:
    """Whether two expressions differ by a constant factor, neither zero nor infinite."""
    return _agree_at_points(gold, answer, seed, ratio=True)


def _agree_at_points(gold: Node, answer: Node, seed: str, *, ratio: bool) -> bool:
    varies = any(names(node, kind) for node in (gold, answer) for kind in ("symbol", "apply"))
    factor: Value | None = None
    compared = 0
    # Several points, since two different expressions can agree at one.
    for point in POINTS if varies else POINTS[:1]:
        at = Evaluation(digits(), point, seed)
        try:
            a = at.value(gold)
        except _ERRORS:
            continue
        try:
            b = at.value(answer)
            if ratio:
                # The factor of the first point must hold at the others.
                factor = factor or at.times(b, at.reciprocal(a))
                if abs(factor[0]) <= 8 * factor[1]:
                    return False
                a = at.times(a, factor)
        except _ERRORS:
            return False
        if not _agree(a, b):
            return False
        compared += 1
    # Agreement at a single point proves nothing of an expression with symbols.
    return compared >= (2 if varies else 1)


def _agree(first: Value, second: Value) -> bool:
    (a, error_a), (b, error_b) = first, second
    error, close = error_a + error_b, digits().library.mpf(10) ** -AGREEING_DIGITS
    if abs(a - b) > 16 * error:
        return False
    # Two values with large errors always overlap, so they count as equal only if they are sharp.
    return error <= close * max(abs(a), abs(b)) or error <= close


def is_of_matrices(node: Node) -> bool:
    """Whether capital letters of a gold must be matrices.

    They are if an inverse or a transpose is multiplied, or if a letter cancels that would not
    cancel for matrices (P D P^-1, AB - BA).
    """
    if _does_not_commute(node):
        return True
    capitals = {name for name in names(node) if len(name.split("_")[0]) == 1 and name[:1].isupper()}
    if len(capitals - {"T"}) < 2:
        return False
    at = Evaluation(digits(), "positive", "")
    for name in capitals:
        try:
            if _agree(at.value(node), at.value(_rename(node, name))):
                return True
        except _ERRORS:
            return False
    return False


def _does_not_commute(node: Node) -> bool:
    """Whether a product has an inverse before a letter, a transpose, or an operator (a hat)."""
    if node.kind == "power" and node.args[1] == Node("symbol", ("T",)):
        return True
    factors = node.args if node.kind == "product" else ()
    letters = [bool(names(factor)) for factor in factors]
    for place, factor in enumerate(factors):
        if factor.kind == "symbol" and factor.args[0].startswith("hat(") and sum(letters) > 1:
            return True
        if factor.kind == "power" and factor.args[1] == negated(number(1)) and letters[place]:
            around = factor.args[0] in factors[: max(0, place - 1)]
            if around or any(letters[place + 1 :]):
                return True
    return any(map(_does_not_commute, children(node)))


def _rename(node: Node, name: str) -> Node:
    if node == Node("symbol", (name,)):
        return Node("symbol", (name + "*",))
    parts = (_rename(arg, name) if isinstance(arg, Node) else arg for arg in node.args)
    return Node(node.kind, tuple(parts))
