r"""Answers in mathematics: what the gold is decides how an answer is compared with it.

A number, alone or with a unit, exactly; words and choices as text; sets, tuples, intervals and
equations part by part; and what is left as an expression, by math-verify in a worker. The page
`docs/grading.md` has each rule with an example.
"""

import functools
import re

from sage_unsloth.grading.checker import LONGEST_ANSWER, Checker, Grade, Kind, Verdict
from sage_unsloth.grading.comparison import (
    NeedsAlgebra,
    Proportional,
    Same,
    as_text,
    parts_of,
    same_equation,
    same_form,
    same_plainly,
    without_unit,
)
from sage_unsloth.grading.cost import costs_too_much
from sage_unsloth.grading.expressions import canonical
from sage_unsloth.grading.forms import (
    Based,
    Equation,
    Intervals,
    Members,
    Ordered,
    Table,
    infinite,
    read,
)
from sage_unsloth.grading.quantities import (
    NAMES,
    Quantity,
    plain_number,
    read_quantity,
    same_quantity,
)
from sage_unsloth.grading.values import surely_differ, surely_equal
from sage_unsloth.grading.writing import as_words, spelled, unwrap

__all__ = ["MATH", "compare_math", "grade_plainly", "normalise", "plain_number", "unwrap"]

_CHOICE = re.compile(r"\(?\s*([A-E])\s*\)?|\\text\{\s*\(?\s*([A-E])\s*\)?\s*\}")
_CHOSEN = re.compile(
    r"(?:(?:option|choice)\s+)?(?:\\text\{\s*)?[(\[]?\s*(?:\\text\{\s*)?([A-Z])(?![a-zA-Z])\s*\}?\s*[)\]]?"
    r"\s*\}?\s*(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_TAKES_BACK = re.compile(
    r"\b(?:or|and|not|wrong|nor|but|no|false|incorrect|isn't)\b|[=+,;&|]", re.IGNORECASE
)


def normalise(text: str) -> str | None:
    """The text in one spelling, numbers as "42" or "7/4"; None if it is no answer."""
    found = spelled(text)
    number = None if found is None else plain_number(found)
    return found if number is None else str(number)


def grade_plainly(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    """The verdict where it takes no algebra, else the answer and gold that a worker compares."""
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(
            f"a gold answer must be text with a character in it; got {gold!r:.200}; write "
            "a number as text (str), drop or repair the row"
        )
    expected = _spelled_gold(gold)
    if expected is None and answer and len(answer) <= LONGEST_ANSWER:
        return _judged(as_text(answer) == as_text(gold), Kind.TEXT)
    found = None if answer is None else spelled(answer)
    if found is None or expected is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)

    def same_without_algebra(part: str, other: str) -> bool:
        try:
            return same_plainly(part, other)
        except NeedsAlgebra:
            if not costs_too_much(found, expected):
                if surely_equal(part, other):
                    return True
                if surely_differ(part, other):
                    return False
            raise

    try:
        return judge(found, expected, same_without_algebra)
    except NeedsAlgebra:
        if costs_too_much(found, expected):
            return Verdict(Grade.WRONG, Kind.REFUSED)
        return found, expected


@functools.lru_cache(maxsize=1024)  # golds come again and again
def _spelled_gold(gold: str) -> str | None:
    return spelled(_LETTER_UNIT.sub(_named, gold))


# A unit that a gold sets as text, which in one spelling would look like a variable.
_LETTER_UNIT = re.compile(r"(?<=[\d}])[\s~]*\\(?:text|mathrm|mbox|textrm)\s*\{\s*([A-Za-z])\s*\}")


def _named(match: re.Match) -> str:
    name = NAMES.get(match[1])
    return match[0] if name is None else f" {name}"


def only_its_text(gold: str, verdict: Verdict) -> bool:
    """Whether a gold is neither words nor anything that is read, so that only its own text matches.

    Args:
        gold: the gold answer.
        verdict: on it, against itself.
    """
    return verdict.kind is Kind.TEXT and as_words(gold) is None


def compare_math(answer: str, gold: str) -> Verdict:
    """Compares two texts in one spelling, in a worker, with math-verify for their parts.

    A gold that it cannot read is compared as text.
    """
    from sage_unsloth.grading import algebra

    def same_by_algebra(expected: str, found: str) -> bool | None:
        try:
            return same_plainly(expected, found)
        except NeedsAlgebra:
            return algebra.same(expected, found)

    form = read(gold)
    parts = [part for part in parts_of(form) if plain_number(part) is None and not infinite(part)]
    if not all(map(algebra.readable, parts)):
        return _judged(as_text(answer) == as_text(gold), Kind.TEXT)
    return judge(answer, gold, same_by_algebra, algebra.proportional)


def judge(
    answer: str,
    gold: str,
    same: Same,
    proportional: Proportional | None = None,
) -> Verdict:
    """The verdict on an answer, both texts in one spelling, by what the gold is.

    Args:
        answer, gold: of `writing.spelled`.
        same: compares two parts.
        proportional: compares two equations, where `same` can do algebra.

    Raises:
        NeedsAlgebra: `same` cannot tell.
    """
    if (quantity := gold_quantity(gold)) is not None:
        return _judge_number(answer, gold, quantity, same)
    if choice := _CHOICE.fullmatch(gold):
        return _judged(_is_choice(answer, choice[1] or choice[2]), Kind.CHOICE)
    if (words := as_words(gold)) is not None:
        return _judged(as_words(answer) == words, Kind.TEXT)
    form = read(gold)
    if any(canonical(part) is None for part in parts_of(form) if not infinite(part)):
        return _judged(as_text(answer) == as_text(gold), Kind.TEXT)
    if isinstance(form, str):
        return _judge_expression(answer, gold, same)
    if isinstance(form, Equation):
        if proportional is None and not form.names_only:
            raise NeedsAlgebra
        return _judged(same_equation(form, read(answer), same, proportional), Kind.EQUATION)
    return _judged(same_form(form, read(answer), same), _KINDS[type(form)])


_KINDS = {
    Members: Kind.SET,
    Ordered: Kind.TUPLE,
    Table: Kind.TUPLE,
    Intervals: Kind.INTERVAL,
    Based: Kind.NUMBER,
}


@functools.lru_cache(maxsize=1024)
def gold_quantity(gold: str) -> Quantity | None:
    """The number, with its unit, that a gold is; a letter behind it is a variable, not a unit."""
    found = read_quantity(gold)
    if found is None or found.unit in ("", "%", "$", "°") or r"\text" in gold:
        return found
    return found if re.search(r"\d[)}]?\s+(?:[a-zA-Z]{2,}|[a-zA-Z]/[a-zA-Z])", gold) else None


def _judged(right: bool | None, kind: Kind) -> Verdict:
    return Verdict(Grade.CORRECT if right else Grade.WRONG, kind)


def _sides(answer: str) -> list[str]:
    """What an answer says that it is: itself, or behind a name each side of its equation."""
    form = read(answer)
    if not isinstance(form, Equation):
        return [answer]
    return list(form.sides[1:] if form.names_only else form.sides)


def _judge_number(answer: str, gold: str, quantity: Quantity, same: Same) -> Verdict:
    kind = Kind.NUMBER
    for side in _sides(answer):
        found = read_quantity(side)
        if found is not None:
            if found.unit or quantity.unit:
                kind = Kind.QUANTITY
            if not same_quantity(found, quantity):
                return Verdict(Grade.WRONG, kind)
            continue
        if not isinstance(read(side), str):
            return Verdict(Grade.WRONG, kind)
        side = without_unit(side) if not quantity.unit else side
        written = canonical(side)
        if written is None:
            return Verdict(Grade.UNPARSABLE, Kind.NONE)
        if "x_{" in written:  # a number has no symbols
            return Verdict(Grade.WRONG, Kind.MATHEMATICS)
        kind = Kind.MATHEMATICS
        equal = same(str(quantity.value), side)
        if equal is None:
            return Verdict(Grade.UNPARSABLE, Kind.NONE)
        if not equal:
            return Verdict(Grade.WRONG, kind)
    return Verdict(Grade.CORRECT, kind)


def _judge_expression(answer: str, gold: str, same: Same) -> Verdict:
    for side in _sides(answer):
        if not isinstance(read(side), str):
            return Verdict(Grade.WRONG, Kind.MATHEMATICS)
        if r"\text" not in gold:
            side = without_unit(side)
        if canonical(side) is None:
            return Verdict(Grade.UNPARSABLE, Kind.NONE)
        equal = same(gold, side)
        if equal is None:
            return Verdict(Grade.UNPARSABLE, Kind.NONE)
        if not equal:
            return Verdict(Grade.WRONG, Kind.MATHEMATICS)
    return Verdict(Grade.CORRECT, Kind.MATHEMATICS)


def _is_choice(answer: str, letter: str) -> bool:
    match = _CHOSEN.fullmatch(answer)
    if match is None or match[1] != letter:
        return False
    rest = match["rest"].strip(" .:)")
    return not _TAKES_BACK.search(rest) and not re.search(r"(?<![a-zA-Z\\])[A-E](?![a-zA-Z])", rest)


TYPICAL = (
    ("2x + y", "y+2x"),
    (r"\sqrt{117}", r"3\sqrt{13}"),
    (r"\frac{1 + \sqrt{3}}{2}", r"\frac{\sqrt{3}+1}{2}"),
    (r"( 3, \frac{\pi}{2} )", r"(3, \pi/2)"),
    ("(x-1)(x-2)^2", "x^3-5x^2+8x-4"),
    (r"\{1, \sqrt{4}\}", r"\{2,1\}"),
    (r"(-\infty, 0) \cup [2, \sqrt{25}]", r"(-\infty,0)\cup[2,5]"),
    ("2x - y + 3 = 0", "y = 2x + 3"),
    (r"2 \sin(x) + \log_2 3", r"\log_{2}{3}+2\sin x"),
    (r"e^{2 \pi i / 3}", "1+2i"),
)

MATH = Checker(
    name="math",
    version=3,
    packages=("math-verify",),
    plainly=grade_plainly,
    compare="sage_unsloth.grading.mathematics:compare_math",
    typical=TYPICAL,
)
