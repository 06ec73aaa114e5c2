r"""Compares two forms part by part; how two parts are compared, the caller says."""

import re
from collections.abc import Callable
from typing import Any

from sage_unsloth.grading.expressions import canonical
from sage_unsloth.grading.forms import (
    Equation,
    Form,
    Interval,
    Intervals,
    Members,
    Ordered,
    Table,
    infinite,
)
from sage_unsloth.grading.quantities import plain_number, read_unit

Same = Callable[[str, str], bool | None]
"""(part of the gold, part of the answer) -> whether they are equal; None if the answer is none."""
Proportional = Callable[[tuple[str, str], tuple[str, str]], bool | None]
"""(sides of an equation, sides of another) -> whether one follows from the other."""

_UNIT_BEHIND = re.compile(
    r"(?P<body>.*\S)\s*(?P<unit>\\text\{[^{}]*\}(?:\s*\^\s*\{?\s*\d\s*\}?)?"
    r"|(?<=[\s\d}])(?:[a-zA-Z]{2,}\s*){1,3}(?:\^\s*\{?\s*\d\s*\}?)?)",
    re.DOTALL,
)


class NeedsAlgebra(Exception):
    """The parts cannot be compared without math-verify."""


def as_text(text: str) -> str:
    """The text without white space and last stop, for what is compared as text."""
    return re.sub(r"\s+", "", text).rstrip(".;")


def same_plainly(gold: str, answer: str) -> bool:
    """Whether two parts are one number, or infinite alike."""
    if infinite(gold) or infinite(answer):
        return infinite(gold) == infinite(answer)
    expected, found = plain_number(gold), plain_number(answer)
    if expected is None or found is None:
        raise NeedsAlgebra
    return expected == found


def parts_of(form: Form) -> list[str]:
    """The texts that a gold of this form is compared by."""
    if isinstance(form, str):
        return [form]
    if isinstance(form, (Members, Ordered)):
        return list(form.parts)
    if isinstance(form, Equation):
        return list(form.sides)
    if isinstance(form, Table):
        return [cell for row in form.rows for cell in row]
    if isinstance(form, Intervals):
        return [end for piece in form.parts for end in (piece.low, piece.high)]
    return []


def without_unit(text: str) -> str:
    """The text without a unit or nouns behind it."""
    match = _UNIT_BEHIND.fullmatch(text)
    if match is None or read_unit(match["unit"]) is None or canonical(match["body"]) is None:
        return text
    return match["body"]


def same_form(gold: Form, answer: Form, same: Same) -> bool:
    if isinstance(gold, Members):
        return isinstance(answer, Members) and _same_members(gold.parts, answer.parts, same)
    if isinstance(gold, Intervals):
        if not isinstance(answer, Intervals) or len(gold.parts) != len(answer.parts):
            return False
        if gold.variable and answer.variable and gold.variable != answer.variable:
            return False
        return _matched(gold.parts, answer.parts, lambda a, b: _same_interval(a, b, same))
    if isinstance(gold, Ordered):
        return _same_ordered(gold.parts, answer, same)
    if isinstance(gold, Table):
        return _same_table(gold, answer, same)
    return gold == answer


def _same_members(gold: tuple[str, ...], answer: tuple[str, ...], same: Same) -> bool:
    """The same elements, each once, in any order."""
    return len(gold) == len(answer) and _matched(gold, answer, lambda a, b: bool(same(a, b)))


def _matched(gold: tuple, answer: tuple, equal: Callable[[Any, Any], bool]) -> bool:
    left = list(answer)
    for expected in gold:
        found = next((part for part in left if equal(expected, part)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _same_interval(gold: Interval, answer: Interval, same: Same) -> bool:
    if (gold.has_low, gold.has_high) != (answer.has_low, answer.has_high):
        return False
    return bool(same(gold.low, answer.low)) and bool(same(gold.high, answer.high))


def _same_ordered(gold: tuple[str, ...], answer: Form, same: Same) -> bool:
    """In order; a column is the same, and of a pair, which may be an open interval, `a < x < b`."""
    if isinstance(answer, Intervals) and len(answer.parts) == 1 and len(gold) == 2:
        return _same_interval(Interval(*gold, False, False), answer.parts[0], same)
    if isinstance(answer, Table) and all(len(row) == 1 for row in answer.rows):
        answer = Ordered(tuple(row[0] for row in answer.rows))
    if not isinstance(answer, Ordered) or len(answer.parts) != len(gold):
        return False
    return all(same(a, b) for a, b in zip(gold, answer.parts, strict=True))


def _same_table(gold: Table, answer: Form, same: Same) -> bool:
    if isinstance(answer, Ordered) and all(len(row) == 1 for row in gold.rows):
        answer = Table(tuple((part,) for part in answer.parts))
    if not isinstance(answer, Table) or list(map(len, gold.rows)) != list(map(len, answer.rows)):
        return False
    cells = zip(parts_of(gold), parts_of(answer), strict=True)
    return all(same(a, b) for a, b in cells)


def same_equation(
    gold: Equation,
    answer: Form,
    same: Same,
    proportional: Proportional | None,
) -> bool:
    """The same sides, or sides whose differences are in a constant ratio; of `x = 5`, `5` too."""
    left, right = gold.sides[0], gold.sides[-1]
    both_names = gold.names_only and Equation((right, left)).names_only
    if isinstance(answer, str):
        return gold.names_only and not both_names and bool(same(right, without_unit(answer)))
    if not isinstance(answer, Equation):
        return False
    if gold.names_only and as_text(answer.sides[0]) == as_text(left):
        try:
            if all(same(right, side) for side in answer.sides[1:]):
                return True
        except NeedsAlgebra:
            if proportional is None:
                raise
    if len(answer.sides) != 2 or len(gold.sides) != 2:
        return False
    if proportional is None:
        raise NeedsAlgebra
    return bool(proportional((left, right), (answer.sides[0], answer.sides[1])))
