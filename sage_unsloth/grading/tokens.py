"""An answer's tokens: numbers, words, commands and signs.

The cost of a number is bounded here, by its digits and its exponent: no later module converts text
to a number.
"""

import re
from fractions import Fraction
from typing import NamedTuple

LONGEST_NUMBER = 300  # characters
LARGEST_EXPONENT = 400  # of ten, in 1e400
MOST_TOKENS = 300

_SPACED = r"[1-9][0-9]{0,2}(?:(?P<separator>[ ,])[0-9]{3})(?:(?P=separator)[0-9]{3})*(?![0-9])"
_PLAIN = r"[0-9]+"
_POWER = r"(?:[eE][+-]?[0-9]+(?![a-zA-Z0-9^]))?"
_TAIL = rf"(?:\.[0-9]*)?{_POWER}"
_REST = r"""
    |(?P<text>\\text\{(?P<inside>[^{}]*)\})
    |(?P<row>\\\\)
    |(?P<command>\\(?:[a-zA-Z]+|[{}|%$]))
    |(?P<letters>[a-zA-Z]+)
    |(?P<sign>\*\*|\.\.\.|\S)
"""
_BASED = r"(?P<based>0[xX][0-9a-fA-F]+|0[oO][0-7]+|0[bB][01]+)(?![a-zA-Z0-9])|"
# Thousands are separated only outside brackets: (1,234) is a pair.
_OUTSIDE = re.compile(
    rf"(?P<space>\s*)(?:{_BASED}(?P<number>(?:{_SPACED}|{_PLAIN}){_TAIL}|\.[0-9]+{_POWER}){_REST})",
    re.VERBOSE | re.DOTALL,
)
_INSIDE = re.compile(
    rf"(?P<space>\s*)(?:{_BASED}(?P<number>{_PLAIN}{_TAIL}|\.[0-9]+{_POWER}){_REST})",
    re.VERBOSE | re.DOTALL,
)


_KINDS = ("based", "number", "text", "row", "command", "letters", "sign")


class Unreadable(ValueError):
    """The text is no answer of the grammar."""


class Token(NamedTuple):
    r"""One token.

    Attributes:
        kind: "number", "based" (0x1F), "letters", "command" (`\pi`), "text" (`\text{...}`), "row"
            (`\\`) or "sign".
        text: as written; of "text" the inside.
        spaced: white space precedes it.
    """

    kind: str
    text: str
    spaced: bool
    value: Fraction | None = None


def split_tokens(text: str) -> list[Token]:
    """The tokens of a text after `writing.normalise_spelling`.

    Raises:
        Unreadable: a number is too long or too large, or there are too many tokens, or none.
    """
    tokens: list[Token] = []
    at, depth = 0, 0
    text = text.rstrip()
    while at < len(text):
        match = (_INSIDE if depth else _OUTSIDE).match(text, at)
        if match is None:
            raise Unreadable
        kind = next(kind for kind in _KINDS if match[kind] is not None)
        part = match["inside"].strip(" ~") if kind == "text" else match[kind]
        value = None
        if kind == "number":
            value = _value(part)
        elif part in ("(", "[", r"\{"):
            depth += 1
        elif part in (")", "]", r"\}") and depth:
            depth -= 1
        if len(tokens) == MOST_TOKENS:
            raise Unreadable
        tokens.append(Token(kind, part, bool(match["space"]), value))
        at = match.end()
    if not tokens:
        raise Unreadable
    return tokens


def _value(text: str) -> Fraction:
    text = text.replace(",", "").replace(" ", "").lower()
    digits, _, exponent = text.partition("e")
    # Before int(), whose time grows faster than the number of digits.
    if len(digits) > LONGEST_NUMBER or len(exponent) > 4:
        raise Unreadable
    power = int(exponent or 0)
    if abs(power) > LARGEST_EXPONENT:
        raise Unreadable
    whole, _, decimals = digits.partition(".")
    return int((whole + decimals) or 0) * Fraction(10) ** (power - len(decimals))
