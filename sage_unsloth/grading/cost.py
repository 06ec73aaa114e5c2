r"""Which answers are refused before a worker sees them, because computing them may take for ever.

Operators such as integrals, sums, determinants, `\bmod` and large factorials are no part of an
expression at all (`expressions`). What is left can still be written so that it never ends, in a few
characters: powers of powers, and nesting. An answer may have as much of it as its gold has, and a
little more.
"""

import functools
import re

from sage_unsloth.grading.extraction import closing_brace

EXPONENT = 1_000  # the largest number in an exponent
BRACKET_EXPONENT = 30  # of a bracket, which is multiplied out
TOWER = 2  # powers in an exponent, `e^{x^2}`
NESTING = 25  # brackets and braces inside each other
FUNCTIONS = 8  # functions and roots
SIGNS = 8  # in a row

_EXPONENT = re.compile(r"\^\s*")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e\+?\d+)?")
# A number, e or π as the base of a power inside an exponent.
_NUMBER_TO_A_POWER = re.compile(r"(?:\d\s*|(?<![a-zA-Z\\])e\s*|\\pi\s*|\}\s*|\)\s*|!\s*)\^|!")
_FUNCTION = re.compile(r"\\?(?:sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|l?[fc](?:loor|eil))")
_SIGN_RUN = re.compile(r"(?:[-+]\s*)+")


def costs_too_much(answer: str, gold: str) -> bool:
    """Whether an answer could take for ever, by powers and nesting that its gold does not have."""
    allowed = _demands(gold)
    limits = {
        "exponent": EXPONENT,
        "bracket exponent": BRACKET_EXPONENT,
        "tower": TOWER,
        "tower of numbers": 0,
        "nesting": NESTING,
        "functions": FUNCTIONS,
        "signs": SIGNS,
    }
    return any(found > max(limits[what], allowed[what]) for what, found in _demands(answer).items())


@functools.lru_cache(maxsize=1024)  # golds come again and again
def _demands(text: str) -> dict[str, float]:
    """How much there is of each thing that a parser or SymPy can be lost in."""
    exponents = _exponents(text)
    numbers = [max((float(n) for n in _NUMBER.findall(inner)), default=0) for _, inner in exponents]
    signs = [len(re.sub(r"\s", "", run)) for run in _SIGN_RUN.findall(text)]
    return {
        "exponent": max(numbers, default=0),
        "bracket exponent": max(
            (n for n, (base, _) in zip(numbers, exponents, strict=True) if base in ")]}"), default=0
        ),
        "tower": max((_height(inner) for _, inner in exponents), default=0),
        "tower of numbers": sum(bool(_NUMBER_TO_A_POWER.search(inner)) for _, inner in exponents),
        "nesting": _depth(text),
        "functions": len(_FUNCTION.findall(text)),
        "signs": max(signs, default=0),
    }


def _exponents(text: str) -> list[tuple[str, str]]:
    """(last character of the base, text of the exponent) of each power, inner ones as well."""
    found = []
    for match in _EXPONENT.finditer(text):
        start = match.end()
        end = closing_brace(text, start) if text[start : start + 1] == "{" else None
        inner = text[start : end or start + 1]
        found.append((text[: match.start()].rstrip()[-1:] or " ", inner))
    return found


def _height(exponent: str) -> int:
    """How many powers are on top of each other, this one included."""
    heights, highest = [0], 1
    for i, character in enumerate(exponent):
        if character == "{":
            power = exponent[:i].rstrip().endswith("^")
            heights.append(heights[-1] + power)
            highest = max(highest, 1 + heights[-1])
        elif character == "}" and len(heights) > 1:
            heights.pop()
        elif character == "^":
            highest = max(highest, 2 + heights[-1])
    return highest


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest
