"""Compares an answer with a gold: one comparison for each kind of tree."""

import re
from collections.abc import Callable, Sequence

from sage_unsloth.grading.checker import Kind
from sage_unsloth.grading.numerics import equal, proportional, surely_differ
from sage_unsloth.grading.quantities import COMPOUND, amount
from sage_unsloth.grading.sets import as_interval
from sage_unsloth.grading.tree import (
    EXPRESSIONS,
    INFINITE,
    Node,
    children,
    exact,
    has,
    names,
    negated,
)
from sage_unsloth.grading.units import PERCENT, Unit


class NeedsDigits(Exception):
    """Floats cannot tell two expressions apart."""


class Same:
    """Compares expressions: by exact value, then by tree, then in floats, then to many digits.

    Args:
        seed: of the symbols' values; None to compute no digits.

    Raises:
        NeedsDigits: only digits can decide, and there is no seed.
    """

    def __init__(self, seed: str | None = None):
        self.seed = seed

    def __call__(self, gold: Node, answer: Node) -> bool:
        if gold in INFINITE or answer in INFINITE:
            return gold == answer
        if has(answer, "infinity"):
            # Infinity inside an expression has no value to compare.
            return False
        expected, value = exact(gold), exact(answer)
        # Exact numbers need no digits, and no worker.
        if expected is not None and value is not None:
            return expected == value
        if gold == answer:
            return True
        # Floats first: most wrong answers end here, without mpmath.
        return not surely_differ(gold, answer) and equal(gold, answer, self.digits_seed())

    def proportional(self, gold: Node, answer: Node) -> bool:
        """Whether the differences of two equations' sides have a constant ratio."""
        if not names(gold) or names(gold) != names(answer):
            return False
        return proportional(gold, answer, self.digits_seed())

    def digits_seed(self) -> str:
        if self.seed is None:
            raise NeedsDigits
        return self.seed


def is_percent(unit: Unit) -> bool:
    return unit.powers == ((PERCENT, 1),)


def same_unit(answer: Unit, gold: Unit) -> bool:
    """Whether two units have one dimension, and the answer names only nouns of the gold."""
    physical = [{p for p in unit.powers if not p[0].startswith("noun ")} for unit in (answer, gold)]
    nouns = [unit.nouns - {COMPOUND} for unit in (answer, gold)]
    if physical[0] != physical[1]:
        return False
    # "5 apples" for "5 red apples" is enough, but without a physical unit one noun must be named.
    return nouns[0] <= nouns[1] and bool(nouns[0] or not nouns[1] or physical[0])


def with_constant(gold: Node, answer: Node) -> Node:
    """The gold with its constant of integration spelled as in the answer: `+C` as `+c`."""
    constant = Node("symbol", ("C",))
    if gold.kind != "sum" or constant not in gold.args or "C" in names(answer):
        return gold
    # What a constant of integration is called is free, unless the gold uses the letter.
    for name in ("c", "K", "k"):
        renamed = Node("symbol", (name,))
        if answer.kind == "sum" and renamed in answer.args and name not in names(gold):
            return Node("sum", tuple(renamed if arg == constant else arg for arg in gold.args))
    return gold


def matches_gold(gold: Node, answer: Node, same: Same) -> bool:
    """Whether an answer without its name equals a gold of a kind in `COMPARISONS`."""
    return COMPARISONS[gold.kind][0](gold, _right_side(answer, gold.kind), same)


def _right_side(answer: Node, kind: str) -> Node:
    r"""The right side of `S = {1, 2}`, `(x, y) = (3, 4)`, `A^{-1} = M`; else the answer itself."""
    if answer.kind != "equation" or len(answer.args) != 2 or kind == "equation":
        return answer
    left, right = answer.args
    if left.kind == "tuple":
        letters = [arg.args[0] if arg.kind == "symbol" else "" for arg in left.args]
        named = kind == "tuple" and "" not in letters and letters == sorted(set(letters))
    else:
        named = _name(left) or (kind in ("matrix", "interval", "union") and names(left))
    return right if named else answer


def _same_side(gold: Node, answer: Node, same: Same) -> bool:
    """Whether one side or element equals the gold's; a missing unit is taken from the gold."""
    (expected, expected_unit), (value, unit) = amount(gold), amount(answer)
    if expected.kind in EXPRESSIONS and value.kind in EXPRESSIONS:
        # A unit that one side leaves out is not held against it.
        if unit is None or expected_unit is None:
            alike = True
        else:
            alike = same_unit(unit, expected_unit) and unit.size == expected_unit.size
        return alike and same(with_constant(expected, value), value)
    return gold.kind in COMPARISONS and gold.kind != "equation" and matches_gold(gold, answer, same)


def _all_same(gold: Sequence[Node], answer: Sequence[Node], same: Same) -> bool:
    return len(gold) == len(answer) and all(
        _same_side(a, b, same) for a, b in zip(gold, answer, strict=True)
    )


def _parts_match(gold: Sequence, answer: Sequence, equals: Callable[[Node, Node], bool]) -> bool:
    """Whether the parts can be paired one to one."""
    left = list(answer)
    for expected in gold:
        match = next((part for part in left if equals(expected, part)), None)
        if match is None:
            return False
        # Each part once, or {1, 1} would match {1, 2}.
        left.remove(match)
    return not left


def _equations(gold: Node, answer: Node, same: Same) -> bool:
    """The same sides, or differences of sides in a constant ratio; `5` for `x = 5`."""
    left, right = gold.args[0], gold.args[-1]
    if any(
        side.kind in EXPRESSIONS and has(side, "infinity")
        for side in children(gold) + children(answer)
    ):
        return gold == answer
    name = _name(left)
    if answer.kind == "members" and len(answer.args) == 1 and not names(right):
        answer = answer.args[0]
    if amount(answer)[0].kind in EXPRESSIONS:
        return name is not None and _name(right) is None and _same_side(right, answer, same)
    if answer.kind != "equation":
        return False
    answer_name = _name(answer.args[0])
    if (
        name
        and answer_name
        and _same_name(name, answer_name)
        and all(_same_side(right, side, same) for side in answer.args[1:])
    ):
        return True
    if len(answer.args) != 2 or len(gold.args) != 2:
        return False
    if any(side.kind not in EXPRESSIONS for side in gold.args + answer.args):
        return False
    # 2x + 2y = 4 is x + y = 2: the differences of their sides are in a constant ratio.
    return same.proportional(_difference(*gold.args), _difference(*answer.args))


def _difference(left: Node, right: Node) -> Node:
    return Node("sum", (left, negated(right)))


def _name(side: Node) -> str | None:
    """The name on a left side, without a function's variables; None for none."""
    if side.kind == "symbol":
        return re.sub(r"_.*|[{}]", "", side.args[0]) + ("_" if "_" in side.args[0] else "")
    if side.kind == "apply" and all(arg.kind == "symbol" for arg in side.args[1:]):
        return side.args[0]
    return None


def _same_name(gold: str, answer: str) -> bool:
    # x_1 and x may name one value; y = … and f(x) = … are the same function.
    return gold.rstrip("_") == answer.rstrip("_") or {gold, answer} <= {"y", "f"}


def _elements(gold: Node, answer: Node, same: Same) -> bool:
    """The same elements, each once, in any order."""
    # A set of one element may be written without its braces.
    if len(gold.args) == 1 and answer.kind in ("quantity", *EXPRESSIONS):
        answer = Node("members", (answer,))
    if answer.kind != "members" or len(answer.args) != len(gold.args):
        return False
    return _parts_match(gold.args, answer.args, lambda a, b: _same_side(a, b, same))


def _tuples(gold: Node, answer: Node, same: Same) -> bool:
    """Entries in order; a pair may also be written as an open interval."""
    if answer.kind in ("interval", "union") and len(gold.args) == 2:
        return _unions(gold, answer, same)
    entries: Sequence[Node] = ()
    if answer.kind == "tuple":
        entries = answer.args
    elif answer.kind == "apply" and len(answer.args[0]) == 1 and answer.args[0].isupper():
        entries = answer.args[1:]  # P(3, 4)
    elif answer.kind == "assignments":
        entries = [value for _, value in sorted(answer.args)]
    elif answer.kind == "matrix" and 1 in (len(answer.args), len(answer.args[0].args)):
        entries = [entry for row in answer.args for entry in row.args]
    return _all_same(gold.args, entries, same)


def _unions(gold: Node, answer: Node, same: Same) -> bool:
    """The same intervals in any order; if both name a variable, the same one."""
    unions = []
    for node in (as_interval(gold), as_interval(answer)):
        if node.kind not in ("union", "interval"):
            return False
        unions.append(node.args if node.kind == "union" else ((node,), ""))
    (expected, variable), (pieces, answer_variable) = unions
    if variable and answer_variable and variable != answer_variable:
        return False
    return _parts_match(expected, pieces, lambda a, b: _same_interval(a, b, same))


def _same_interval(gold: Node, answer: Node, same: Same) -> bool:
    (low, high, *ends), (answer_low, answer_high, *answer_ends) = gold.args, answer.args
    return ends == answer_ends and same(low, answer_low) and same(high, answer_high)


def _matrices(gold: Node, answer: Node, same: Same) -> bool:
    rows = [row.args for row in answer.args] if answer.kind == "matrix" else []
    # A column vector may be written as a tuple.
    if answer.kind == "tuple" and all(len(row.args) == 1 for row in gold.args):
        rows = [(entry,) for entry in answer.args]
    # Rows in square brackets, of which one of two numbers was read as an interval.
    elif answer.kind == "list" and all(row.kind in ("list", "interval") for row in answer.args):
        rows = [row.args if row.kind == "list" else row.args[:2] for row in answer.args]
    return len(rows) == len(gold.args) and all(
        _all_same(expected.args, row, same) for expected, row in zip(gold.args, rows, strict=True)
    )


def _relations(gold: Node, answer: Node, same: Same) -> bool:
    if answer.kind != "relation" or gold.args[0] != answer.args[0]:
        return False
    return all(same(a, b) for a, b in zip(gold.args[1:], answer.args[1:], strict=True))


def _dimensions(gold: Node, answer: Node, same: Same) -> bool:
    """The same lengths; missing units are the gold's."""
    return answer.kind == "dimensions" and _all_same(gold.args, answer.args, same)


def _values_by_name(gold: Node, answer: Node, same: Same) -> bool:
    if answer.kind != "assignments" or len(answer.args) != len(gold.args):
        return False
    values = dict(answer.args)
    return all(name in values and _same_side(side, values[name], same) for name, side in gold.args)


COMPARISONS: dict[str, tuple[Callable[[Node, Node, Same], bool], Kind]] = {
    "equation": (_equations, Kind.EQUATION),
    "members": (_elements, Kind.SET),
    "tuple": (_tuples, Kind.TUPLE),
    "matrix": (_matrices, Kind.TUPLE),
    "interval": (_unions, Kind.INTERVAL),
    "union": (_unions, Kind.INTERVAL),
    "relation": (_relations, Kind.INTERVAL),
    "based": (lambda gold, answer, same: gold == answer, Kind.NUMBER),
    "dimensions": (_dimensions, Kind.TUPLE),
    "assignments": (_values_by_name, Kind.TUPLE),
}
