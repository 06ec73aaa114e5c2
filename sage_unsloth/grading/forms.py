r"""What an answer is by its form: set, tuple, interval, matrix, equation, or expression.

A form is read from text in one spelling (`writing.spelled`), here and in a worker alike. Its parts
are texts, which are compared one by one.
"""

import functools
import re
from dataclasses import dataclass

from sage_unsloth.grading.quantities import plain_number

_OPEN, _CLOSE = "([{", ")]}"
_RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|[<>]")
_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_INFINITE = re.compile(r"[+-]?\s*(?:\\infty|infinity|infty|inf|oo)\s*")
# What may stand left of "=" and only names what is right of it.
_NAME = re.compile(
    r"(?:\\(?:angle|triangle|overline|vec|dot|ddot|hat|bar|text)\s*)?"
    r"(?:\\?[a-zA-Z]+|\{\s*[a-zA-Z ]+\s*\})(?:_(?:\w|\{[^{}]*\}))?'*"
    r"\s*(?:\(\s*-?\w+(?:\s*,\s*\w+)*\s*\))?\s*",
)


@dataclass(frozen=True)
class Members:
    """Elements without order, each once."""

    parts: tuple[str, ...]


@dataclass(frozen=True)
class Ordered:
    """A point, pair, tuple, or column vector."""

    parts: tuple[str, ...]


@dataclass(frozen=True)
class Interval:
    """One interval; the texts of its ends, and whether each belongs to it."""

    low: str
    high: str
    has_low: bool
    has_high: bool


@dataclass(frozen=True)
class Intervals:
    """Intervals united, and the variable that was named, if one was."""

    parts: tuple[Interval, ...]
    variable: str = ""


@dataclass(frozen=True)
class Table:
    """A matrix by rows."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Equation:
    """Two or more sides with "=" between."""

    sides: tuple[str, ...]

    @property
    def names_only(self) -> bool:
        """Whether the left side only gives the right side a name."""
        return _NAME.fullmatch(self.sides[0]) is not None


@dataclass(frozen=True)
class Based:
    """A number's digits in a base that is written."""

    digits: str
    base: str


Form = Members | Ordered | Intervals | Table | Equation | Based | str
"""A text alone is an expression, or nothing that has a form."""


def split(text: str, separator: str) -> list[str]:
    """The parts of the text between separators that stand in no bracket; a regular expression."""
    parts, start, depth = [], 0, 0
    pattern = re.compile(rf"\\[{{}}]|(?P<cut>{separator})|\\[a-zA-Z]+|.", re.DOTALL)
    for match in pattern.finditer(text):
        token = match.group().removeprefix("\\")
        if match["cut"] is not None:
            if depth == 0:
                parts.append(text[start : match.start()])
                start = match.end()
        elif token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
    return [part.strip() for part in (*parts, text[start:])]


@functools.lru_cache(maxsize=1024)  # a gold, and an answer in several places of the rules
def read(text: str) -> Form:
    """The form of a text in one spelling; see `Form`."""
    for reading in (_based, _table, _equation, _intervals, _ordered, _members):
        form = reading(text)
        if form is not None:
            return form
    return text


def _based(text: str) -> Based | None:
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    match = re.fullmatch(
        r"\(?\s*(?P<digits>\d[0-9A-F]*)\s*\)?\s*"
        r"(?:_\s*(?:(\d+)|\{\s*(\d+)\s*\})|\(?\s*(?:in\s+)?base\s*(\d+)\s*\)?)",
        text,
    )
    if match is None:
        return None
    base = next(group for group in match.groups()[1:] if group)
    return Based(match["digits"].lstrip("0") or "0", str(int(base)))


def _table(text: str) -> Table | None:
    text = re.sub(r"^\[\s*(\\begin\{matrix\}.*\\end\{matrix\})\s*\]$", r"\1", text)
    text = re.sub(r"^\(\s*(\\begin\{matrix\}.*\\end\{matrix\})\s*\)$", r"\1", text)
    match = re.fullmatch(r"\\begin\{([pbB]?matrix)\}(.*)\\end\{\1\}", text, re.DOTALL)
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row for row in match[2].split(r"\\") if row.strip()]
    table = tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows)
    return Table(table) if table and all(all(row) for row in table) else None


def _equation(text: str) -> Equation | None:
    # The comma of thousands makes no list, and two signs make no equation.
    if len(split(text, r",(?!\d{3}(?!\d))|;|\b(?:and|or)\b")) > 1 or r"\pm" in text:
        return None
    sides = split(text, r"=")
    if len(sides) < 2 or not all(sides) or _RELATION.search(text) or r"\ne" in text:
        return None
    return Equation(tuple(sides))


def _intervals(text: str) -> Intervals | None:
    variable = ""
    if named := re.fullmatch(r"([a-zA-Z]|\\[a-z]+)\s*\\in\s*(.*)", text):
        variable, text = named[1], named[2]
    pieces = [_interval(part) for part in split(text, r"\\cup(?![a-zA-Z])|\bU\b")]
    found = [piece for piece in pieces if piece is not None]
    if len(found) == len(pieces):
        plain_pair = (
            len(found) == 1 and not (found[0].has_low or found[0].has_high) and not variable
        )
        infinite = any(_INFINITE.fullmatch(end) for i in found for end in (i.low, i.high))
        return None if plain_pair and not infinite else Intervals(tuple(found), variable)
    told = [_inequality(part) for part in split(text, r",?\s*\bor\b|\\cup(?![a-zA-Z])")]
    ranges = [piece for piece in told if piece is not None]
    if len(ranges) < len(told) or len({name for name, _ in ranges}) > 1:
        return None
    return Intervals(tuple(piece for _, piece in ranges), ranges[0][0])


def _interval(text: str) -> Interval | None:
    if len(text) < 3 or text[0] not in "([" or text[-1] not in ")]":
        return None
    ends = split(text[1:-1], ",")
    if len(ends) != 2 or not all(ends):
        return None
    low, high = ends
    piece = Interval(low, high, text[0] == "[", text[-1] == "]")
    return None if _ends_at_infinity(piece) else piece


def _ends_at_infinity(piece: Interval) -> bool:
    """Whether an infinite end is said to belong to it, or is on the wrong side."""
    low, high = (infinite(end) for end in (piece.low, piece.high))
    return bool((low and piece.has_low) or (high and piece.has_high) or low == "+" or high == "-")


def infinite(text: str) -> str:
    """The sign of an infinite end, or "" for a finite one."""
    return ("-" if text.strip().startswith("-") else "+") if _INFINITE.fullmatch(text) else ""


def _inequality(text: str) -> tuple[str, Interval] | None:
    """`x > 2`, `2 \\ge x`, `-2 \\le x < 7`: the variable and the interval."""
    relations = _RELATION.findall(text)
    sides = [side.strip() for side in _RELATION.split(text)]
    if not 1 <= len(relations) <= 2 or not all(sides) or "=" in text:
        return None
    is_variable = [re.fullmatch(r"[a-zA-Z]|\\[a-z]+", side) is not None for side in sides]
    if len(relations) == 2:
        if not is_variable[1] or relations[0][-1] not in "<e" or relations[0] in (">", r"\ge"):
            if not is_variable[1] or any(r not in (">", r"\ge") for r in relations):
                return None
            sides.reverse()
            relations = [_TURNED[r] for r in reversed(relations)]
        if any(r not in ("<", r"\le") for r in relations):
            return None
        first, second = (r == r"\le" for r in relations)
        piece = Interval(sides[0], sides[2], first, second)
        return None if _ends_at_infinity(piece) else (sides[1], piece)
    if is_variable[1] and not is_variable[0]:
        sides, relations = sides[::-1], [_TURNED[relations[0]]]
    elif not is_variable[0] or is_variable[1]:
        return None
    belongs = relations[0] in (r"\le", r"\ge")
    if relations[0] in ("<", r"\le"):
        return sides[0], Interval(r"-\infty", sides[1], False, belongs)
    return sides[0], Interval(sides[1], r"\infty", belongs, False)


def _ordered(text: str) -> Ordered | None:
    text = re.sub(r"^\(\s*\w(?:\s*,\s*\w)+\s*\)\s*=\s*", "", text)
    if len(text) < 3 or text[0] != "(" or text[-1] != ")":
        return None
    parts = split(text[1:-1], ",")
    return Ordered(tuple(parts)) if len(parts) > 1 and all(parts) else None


def _members(text: str) -> Members | None:
    """Elements in braces, or a bare list with commas, "and", "or", each as `x = 3` or alone."""
    braces = re.fullmatch(r"\\\{(.*)\\\}", text, re.DOTALL)
    inside = braces[1] if braces else text
    parts = split(inside, r",?\s*\b(?:and|or)\b|,|;")
    if plain_number(text) is not None or not all(parts):
        return None
    named = [re.fullmatch(r"([a-zA-Z])(?:_\{?\d\}?)?\s*=\s*([^=]+)", part) for part in parts]
    if all(named) and len({match[1] for match in named if match}) == 1:
        parts = [match[2].strip() for match in named if match]
    parts = [value for part in parts for value in _both_signs(part)]
    return Members(tuple(parts)) if braces or len(parts) > 1 else None


def _both_signs(text: str) -> list[str]:
    r"""`1 \pm \sqrt{19}` as its two values."""
    if len(re.findall(r"\\pm(?![a-zA-Z])", text)) != 1 or r"\mp" in text:
        return [text]
    return [re.sub(r"\\pm(?![a-zA-Z])", sign, text).strip() for sign in "+-"]
