"""The verifier `countdown`: an expression of the given numbers that has the target as its value.

The answer is not compared with a gold expression, so every solution is accepted. The numbers are
counted in its tree, and its value is an exact fraction.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.forms import read
from sage_unsloth.grading.tree import Node, children, exact
from sage_unsloth.grading.writing import normalise_spelling

MOST_NUMBERS = 20
# Allowed characters; a sign before a number and two adjacent numbers are refused.
_WRITTEN = re.compile(r"(?:[0-9+\-*/(){}= ]|\\(?:times|cdot|ast|div|frac)(?![a-zA-Z]))+")
_REFUSED = re.compile(r"\*\*|[0-9]\s+[0-9]|(?:^|[-+*/=({])\s*[-+]|\\[a-z]+\s*[-+]")


@dataclass(frozen=True)
class CountdownTask:
    """A gold: the numbers with how often each may be used, and the target.

    Attributes:
        use_all: every number must be used.
    """

    numbers: Counter[int]
    target: int
    use_all: bool = False


@lru_cache(maxsize=4096)
def read_task(gold: str) -> CountdownTask:
    """Parses a gold, `{"numbers": [2, 3, 5, 8], "target": 29}`, with `"use_all": true` if required.

    Raises:
        ValueError: another form.
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
        f"{MOST_NUMBERS} whole numbers of at least 0, got {gold!r:.200}"
    )


def check_countdown(answer: str | None, gold: str) -> Verdict:
    """CORRECT for an expression of the given numbers, each at most once, that equals the target.

    UNPARSABLE for anything but whole numbers, + - * / and round brackets; a sign in front of a
    number is not allowed. `expression = target` is read as the expression.
    """
    task = read_task(gold)
    text = None if answer is None else normalise_spelling(answer)
    tree = None
    if text is not None and _WRITTEN.fullmatch(text) and not _REFUSED.search(text):
        tree = read(text, units=False)
    if tree is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    expression, stated = _sides(tree)
    used = _numbers(expression)
    if used is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    # On counters <= compares how often each number is used.
    allowed = used == task.numbers if task.use_all else used <= task.numbers
    right = allowed and stated in (None, task.target) and exact(expression) == task.target
    return Verdict(Grade.CORRECT if right else Grade.WRONG, Kind.EXPRESSION)


def _sides(tree: Node) -> tuple[Node, Fraction | None]:
    """The expression, and the number on the other side of an equals sign."""
    if tree.kind == "equation" and len(tree.args) == 2:
        left, right = tree.args
        if right.kind == "number":
            return _as_product(left), right.args[0]
        if left.kind == "number":
            return _as_product(right), left.args[0]
    return _as_product(tree), None


def _as_product(tree: Node) -> Node:
    r"""Mathematics reads `3 \times 5` as the sides of something; here it is a product."""
    return Node("product", tree.args) if tree.kind == "dimensions" else tree


def _numbers(tree: Node) -> Counter[int] | None:
    """How often each number is used; None for anything but whole numbers and + - * /."""
    if tree.kind == "number":
        value = tree.args[0]
        return Counter([int(value)]) if value.denominator == 1 else None
    if tree.kind not in ("sum", "negative", "product", "reciprocal"):
        return None
    total: Counter[int] = Counter()
    for child in children(tree):
        counted = _numbers(child)
        if counted is None:
            return None
        total += counted
    return total


COUNTDOWN = Checker(name="countdown", version=3, plainly=check_countdown, gold_is_answer=False)
