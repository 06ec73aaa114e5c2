"""The verifier `countdown`: an expression of the given numbers, each at most once, with the target.

The answer is read, not compared with a gold expression, so every right one is accepted. Its numbers
are counted before anything is computed, and all values are exact fractions: an answer of n given
numbers costs n - 1 operations, whatever its text is.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from sage_unsloth.grading.checker import LONGEST_ANSWER, Checker, Grade, Kind, Verdict
from sage_unsloth.grading.writing import spelled

MOST_NUMBERS = 20
_PLAIN = re.compile(r"[0-9+\-*/() ]+")
_SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\times(?![a-zA-Z])|\\cdot(?![a-zA-Z])|\\ast(?![a-zA-Z])", "*"),
        (r"\\div(?![a-zA-Z])", "/"),
    )
]
_WHOLE = re.compile(r"\s*([0-9]{1,30})\s*")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_TOKEN = re.compile(r"\s*(?:([0-9]{1,30})|([-+*/()]))")
_BESIDE = re.compile(r"([0-9)])\s*(?=\()")  # 3(8+2) is a product
_BINDS = {"+": 1, "-": 1, "*": 2, "/": 2}
_COMPUTE = {
    "+": Fraction.__add__, "-": Fraction.__sub__, "*": Fraction.__mul__, "/": Fraction.__truediv__
}  # fmt: skip


@dataclass(frozen=True)
class CountdownTask:
    """What a gold says.

    Attributes:
        numbers: how often each may be used.
        target: of the expression.
        use_all: every number must be used.
    """

    numbers: Counter[int]
    target: int
    use_all: bool = False


@lru_cache(maxsize=4096)
def read_task(gold: str) -> CountdownTask:
    """The task that a gold is, `{"numbers": [2, 3, 5, 8], "target": 29}`.

    `"use_all": true` beside them asks that every number be used.

    Raises:
        ValueError: it is none.
    """
    try:
        item = json.loads(gold)
    except (ValueError, TypeError, RecursionError):
        item = None
    if isinstance(item, dict) and {"numbers", "target"} <= item.keys():
        numbers, target, use_all = item["numbers"], item["target"], item.get("use_all", False)
        listed = isinstance(numbers, list) and 1 <= len(numbers) <= MOST_NUMBERS
        if (
            listed
            and all(type(number) is int and number >= 0 for number in numbers)
            and type(target) is int
            and type(use_all) is bool
        ):
            return CountdownTask(Counter(numbers), target, use_all)
    raise ValueError(
        'a gold of countdown must be JSON text, {"numbers": [2, 3, 5, 8], "target": 29}, with 1 to '
        f"{MOST_NUMBERS} whole numbers of at least 0; got {gold!r:.200}; repair the row"
    )


def check_countdown(answer: str | None, gold: str) -> Verdict:
    """CORRECT for an expression of the given numbers, each at most once, that is the target.

    UNPARSABLE for text that is no expression of whole numbers, + - * / and round brackets; a sign
    in front of a number is not among these. `expression = target` is read as the expression.
    """
    task = read_task(gold)
    text = None if answer is None else _written(answer)
    if text is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    text, stated = _sides(text)
    postfix = _postfix(text)
    if postfix is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    used = Counter(item for item in postfix if isinstance(item, int))
    allowed = used == task.numbers if task.use_all else used <= task.numbers
    right = allowed and stated in (None, task.target) and _value(postfix) == task.target
    return Verdict(Grade.CORRECT if right else Grade.WRONG, Kind.EXPRESSION)


def _sides(text: str) -> tuple[str, int | None]:
    """The expression, and the number on the other side of an equals sign."""
    left, equals, right = text.partition("=")
    if equals and (number := _WHOLE.fullmatch(right)):
        return left, int(number[1])
    if equals and (number := _WHOLE.fullmatch(left)):
        return right, int(number[1])
    return text, None


def _written(answer: str) -> str | None:
    """The answer with + - * / and brackets alone, of the other ways to write them."""
    if len(answer) > LONGEST_ANSWER:
        return None
    if _PLAIN.fullmatch(answer) and "**" not in answer:
        return answer
    text = spelled(answer)
    if text is None:
        return None
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    while (shorter := _FRACTION.sub(r"((\1)/(\2))", text)) != text:
        text = shorter
    return text


def _postfix(text: str) -> list[int | str] | None:
    """The expression with each operation behind its operands; None if it is none."""
    text = _BESIDE.sub(r"\1*", text.strip())
    output: list[int | str] = []
    waiting: list[str] = []
    wants_value, at = True, 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            return None
        number, sign = found.groups()
        at = found.end()
        if (number is not None or sign == "(") != wants_value:
            return None  # a value where an operation belongs, or the other way round
        if number is not None:
            output.append(int(number))
            wants_value = False
        elif sign == "(":
            waiting.append(sign)
        elif sign == ")":
            while waiting and waiting[-1] != "(":
                output.append(waiting.pop())
            if not waiting:
                return None
            waiting.pop()
        else:
            while waiting and waiting[-1] != "(" and _BINDS[waiting[-1]] >= _BINDS[sign]:
                output.append(waiting.pop())
            waiting.append(sign)
            wants_value = True
    if wants_value or "(" in waiting:
        return None
    return output + waiting[::-1]


def _value(postfix: list[int | str]) -> Fraction | None:
    """The value, exactly; None where it divides by 0."""
    values: list[Fraction] = []
    for item in postfix:
        if isinstance(item, int):
            values.append(Fraction(item))
            continue
        right, left = values.pop(), values.pop()
        if item == "/" and right == 0:
            return None
        values.append(_COMPUTE[item](left, right))
    return values[0]


COUNTDOWN = Checker(name="countdown", version=1, plainly=check_countdown, gold_is_answer=False)
