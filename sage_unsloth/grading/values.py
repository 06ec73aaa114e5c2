"""Which expressions surely are equal or differ: in microseconds, without SymPy.

Equal are those that are written alike. Others differ where their values at one point do: most
answers that need algebra are wrong, and math-verify takes milliseconds to say so. What is
computed here is an expression in one spelling (`expressions.canonical`), each symbol at a fixed
number of its own, in floats with a bound on their error. Values further apart than the bound are of
different expressions. Values that agree prove nothing, and whatever is not read here (an operator
with two meanings, a branch of a root, a number out of range) has no value: both go to math-verify.
"""

import cmath
import functools
import hashlib
import math
import re

from sage_unsloth.grading.expressions import canonical

EPSILON = 2.0**-50  # relative error of one operation, with room
MARGIN = 1e-9  # relative difference that no bound on rounding is trusted below
LARGEST = 1e100
LONGEST = 400  # characters

Value = tuple[complex, float]
"""A number, and a bound on its error."""

_TOKEN = re.compile(
    r"\s*(?P<token>x_\{\d+\}|\\(?:frac|sqrt|cdot|times|pi|sin|cos|tan|ln|exp)(?![a-zA-Z])|\d+|[-+/^(){}ei])"
)
_FUNCTIONS = {
    r"\sin": (cmath.sin, cmath.cos),
    r"\cos": (cmath.cos, cmath.sin),
    r"\tan": (cmath.tan, lambda z: 1 / cmath.cos(z) ** 2),
    r"\exp": (cmath.exp, cmath.exp),
    r"\ln": (cmath.log, lambda z: 1 / z),
}


class _NoValue(ArithmeticError):
    """Not read, or not computed with a bound."""


def surely_equal(first: str, second: str) -> bool:
    """Whether two expressions are one in one spelling, brackets around the whole aside.

    False for one without a value: math-verify may not read it, and then compares it as text.
    """
    one, other = canonical(first), canonical(second)
    if one is None or other is None or _value_of(first) is None:
        return False
    return _without_brackets(one) == _without_brackets(other)


def surely_differ(first: str, second: str) -> bool:
    """Whether two expressions are certain not to be equal; False where nobody can tell."""
    one, other = _value_of(first), _value_of(second)
    if one is None or other is None:
        return False
    (a, error_a), (b, error_b) = one, other
    return abs(a - b) > 16 * (error_a + error_b) + MARGIN * max(abs(a), abs(b))


def _without_brackets(written: str) -> str:
    """The text without brackets at both ends; of `(a)(b)` it is `a)(b`, which nothing else is."""
    while written.startswith("(") and written.endswith(")"):
        written = written[1:-1]
    return written


@functools.lru_cache(maxsize=1024)
def _value_of(text: str) -> Value | None:
    """The value of an expression, or None; golds come again and again."""
    if len(text) > LONGEST or (written := canonical(text)) is None:
        return None
    try:
        reader = _Evaluator(written)
        found = reader.sum()
        return found if reader.token == "" else None
    except (ArithmeticError, ValueError, RecursionError):
        return None


def _symbol(name: str) -> Value:
    """A number between 1 and 2 for each symbol."""
    digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])
    return complex(1 + digest / 2**48), 0.0


def _checked(value: complex, error: float) -> Value:
    error += abs(value) * EPSILON
    if not (abs(value) < LARGEST and error < LARGEST):
        raise _NoValue
    return value, error


class _Evaluator:
    """Reads an expression in one spelling from left to right, by recursive descent."""

    def __init__(self, text: str):
        self.tokens, end = [], 0
        for match in _TOKEN.finditer(text):
            if match.start() != end:
                raise _NoValue
            self.tokens.append(match["token"])
            end = match.end()
        if text[end:].strip():
            raise _NoValue
        self.position = 0

    @property
    def token(self) -> str:
        """The next token; "" at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.token
        if not token or (expected and token not in expected):
            raise _NoValue
        self.position += 1
        return token

    def sum(self) -> Value:
        sign = self.take() if self.token in ("+", "-") else "+"
        value, error = self.product()
        value = -value if sign == "-" else value
        while self.token in ("+", "-"):
            sign = self.take()
            term, more = self.product()
            value, error = _checked(value + (term if sign == "+" else -term), error + more)
        return value, error

    def product(self) -> Value:
        value = self.power()
        divided = False
        while True:
            if self.token in (r"\cdot", r"\times"):
                self.take()
                value = _times(value, self.power())
            elif self.token == "/":
                self.take()
                value, divided = _over(value, self.power()), True
            elif self.token in ("", "+", "-", ")", "}"):
                return value
            elif divided:
                raise _NoValue  # 1/2x has two meanings
            else:
                value = _times(value, self.power())

    def power(self) -> Value:
        base, whole = self.atom()
        if self.token != "^":
            return base
        self.take()
        self.take("{")
        exponent = self.sum()
        self.take("}")
        if not whole:
            raise _NoValue
        return _to_the(base, exponent)

    def atom(self) -> tuple[Value, bool]:
        """An operand, and whether a power behind it is of all of it."""
        token = self.take()
        if token.isdigit():
            return _checked(complex(int(token)), 0.0), True
        if token == "(":
            inside = self.sum()
            self.take(")")
            return inside, True
        if token in ("e", "i", r"\pi"):
            return _checked({"e": math.e, "i": 1j, r"\pi": math.pi}[token] + 0j, 0.0), True
        if token.startswith("x_"):
            return _symbol(token), True
        if token == r"\frac":
            return _over(self.group(), self.group()), False
        if token == r"\sqrt":
            return _root(self.group()), True
        if token in _FUNCTIONS:
            self.take("(")
            value, error = self.sum()
            self.take(")")
            function, slope = _FUNCTIONS[token]
            if token == r"\ln" and (value.imag or value.real <= 8 * error):
                raise _NoValue
            return _checked(function(value), 2 * error * abs(slope(value))), False
        raise _NoValue

    def group(self) -> Value:
        self.take("{")
        inside = self.sum()
        self.take("}")
        return inside


def _times(first: Value, second: Value) -> Value:
    (a, error_a), (b, error_b) = first, second
    return _checked(a * b, abs(a) * error_b + abs(b) * error_a + error_a * error_b)


def _over(first: Value, second: Value) -> Value:
    (a, error_a), (b, error_b) = first, second
    if abs(b) <= 8 * error_b or not b:
        raise _NoValue
    return _checked(a / b, 2 * (error_a + abs(a / b) * error_b) / abs(b))


def _root(value: Value) -> Value:
    number, error = value
    if number.imag or number.real <= 8 * error:
        raise _NoValue
    root = math.sqrt(number.real)
    return _checked(complex(root), error / root)


def _to_the(base: Value, exponent: Value) -> Value:
    """A power of a positive number, or a small integer power of any but 0."""
    (a, error_a), (n, error_n) = base, exponent
    if n.imag or abs(a) <= 8 * error_a or not a:
        raise _NoValue
    integer = n.real == round(n.real) and abs(n) <= 64 and error_n < 1e-9
    if not integer and (a.imag or a.real <= 0):
        raise _NoValue
    power = a ** round(n.real) if integer else complex(a.real**n.real)
    spread = abs(n) * error_a / abs(a) + (0 if integer else abs(cmath.log(a)) * error_n)
    return _checked(power, 2 * abs(power) * (spread + (abs(n) + 1) * EPSILON))
