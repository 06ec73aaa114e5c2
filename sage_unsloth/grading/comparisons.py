r"""Compares an answer with a gold by what the gold is: one comparison for each kind of tree."""

import re
from collections.abc import Callable, Sequence

from sage_unsloth.grading.checker import Kind
from sage_unsloth.grading.numerics import equal, proportional, surely_differ
from sage_unsloth.grading.quantities import COMPOUND
from sage_unsloth.grading.sets import as_interval
from sage_unsloth.grading.tree import EXPRESSIONS, INFINITY, Node, exact, has, names, negated
from sage_unsloth.grading.units import PERCENT, Unit


class NeedsDigits(Exception):
    """Two expressions cannot be told apart here."""


class Plainly:
    """Compares expressions at once: exact values, trees that are alike, floats that differ.

    Raises:
        NeedsDigits: none of these decides.
    """

    def __call__(self, gold: Node, answer: Node) -> bool:
        verdict = _without_digits(gold, answer)
        if verdict is None:
            raise NeedsDigits
        return verdict

    def proportional(self, gold: Node, answer: Node) -> bool:
        """Whether the differences of two equations' sides are in a constant ratio."""
        if not names(gold) or names(gold) != names(answer):
            return False
        raise NeedsDigits


class ByDigits(Plainly):
    """Compares expressions by their values to many digits.

    Args:
        seed: what the values of their symbols depend on.
    """

    def __init__(self, seed: str):
        self.seed = seed

    def __call__(self, gold: Node, answer: Node) -> bool:
        verdict = _without_digits(gold, answer)
        return equal(gold, answer, self.seed) if verdict is None else verdict

    def proportional(self, gold: Node, answer: Node) -> bool:
        return proportional(gold, answer, self.seed)


Same = Plainly


def _without_digits(gold: Node, answer: Node) -> bool | None:
    infinite = INFINITY, negated(INFINITY)
    if gold in infinite or answer in infinite:
        return gold == answer
    if has(answer, "infinity"):
        return False
    expected, value = exact(gold), exact(answer)
    if expected is not None and value is not None:
        return expected == value
    if gold == answer:
        return True
    return False if surely_differ(gold, answer) else None


def is_percent(unit: Unit) -> bool:
    return unit.powers == ((PERCENT, 1),)


def same_unit(answer: Unit, gold: Unit) -> bool:
    """Of one dimension; of counted things all that the answer names, one at least."""
    physical = [{p for p in unit.powers if not p[0].startswith("noun ")} for unit in (answer, gold)]
    nouns = [unit.nouns - {COMPOUND} for unit in (answer, gold)]
    if physical[0] != physical[1]:
        return False
    return nouns[0] <= nouns[1] and bool(nouns[0] or not nouns[1] or physical[0])


def with_constant(gold: Node, answer: Node) -> Node:
    """The gold with its constant of integration named as in the answer: `+C` as `+c`."""
    if gold.kind != "sum" or answer.kind != "sum" or Node("symbol", ("C",)) not in gold.args:
        return gold
    for name in ("c", "K", "k"):
        other = Node("symbol", (name,))
        if other in answer.args and "C" not in names(answer) and name not in names(gold):
            return Node(
                "sum", tuple(other if arg == Node("symbol", ("C",)) else arg for arg in gold.args)
            )
    return gold


def _equations(gold: Node, answer: Node, same: Same) -> bool:
    """The same sides, or sides whose differences are in a constant ratio; of `x = 5`, `5` too."""
    left, right = gold.args[0], gold.args[-1]
    if _infinite(gold) or _infinite(answer):
        return gold == answer
    named = _name(left)
    only_names = named is not None and _name(right) is not None
    if answer.kind == "members" and len(answer.args) == 1 and not names(right):
        answer = answer.args[0]
    if answer.kind in ("quantity", *EXPRESSIONS):
        if answer.kind == "quantity":
            answer = answer.args[0]
        return named is not None and not only_names and _same_side(right, answer, same)
    if answer.kind != "equation":
        return False
    first = _name(answer.args[0])
    alike = named is not None and first is not None and _same_name(named, first, right)
    if alike and all(_same_side(right, side, same) for side in answer.args[1:]):
        return True
    if len(answer.args) != 2 or len(gold.args) != 2:
        return False
    sides = [_plain_side(side) for side in (*gold.args, *answer.args)]
    if any(side is None for side in sides):
        return False
    one, other = (
        Node("sum", (a, negated(b)))
        for a, b in (sides[:2], sides[2:])
        if a is not None and b is not None
    )
    return same.proportional(one, other)


def _infinite(node: Node) -> bool:
    return any(
        side.kind in EXPRESSIONS and has(side, "infinity")
        for side in node.args
        if isinstance(side, Node)
    )


def _plain_side(side: Node) -> Node | None:
    return side if side.kind in EXPRESSIONS else None


def _same_side(gold: Node, answer: Node, same: Same) -> bool:
    if gold.kind in EXPRESSIONS and answer.kind in EXPRESSIONS:
        return same(with_constant(gold, answer), answer)
    if gold.kind == "quantity" and answer.kind in ("quantity", *EXPRESSIONS):
        value, unit = answer.args if answer.kind == "quantity" else (answer, gold.args[1])
        return (
            same_unit(unit, gold.args[1])
            and unit.size == gold.args[1].size
            and same(gold.args[0], value)
        )
    if answer.kind == "quantity" and gold.kind in EXPRESSIONS:
        return same(gold, answer.args[0])
    if gold.kind in COMPARISONS and gold.kind != "equation":
        return COMPARISONS[gold.kind][0](gold, answer, same)
    return False


def _name(side: Node) -> str | None:
    """What a left side calls its right one, without a function's variables; None for no name."""
    if side.kind == "symbol":
        return re.sub(r"_.*|[{}]", "", side.args[0]) + ("_" if "_" in side.args[0] else "")
    if side.kind == "apply" and all(arg.kind == "symbol" for arg in side.args[1:]):
        return side.args[0]
    return None


def _same_name(gold: str, answer: str, right: Node) -> bool:
    return gold.rstrip("_") == answer.rstrip("_") or {gold, answer} <= {"y", "f"}


def _elements(gold: Node, answer: Node, same: Same) -> bool:
    """The same elements, each once, in any order."""
    if len(gold.args) == 1 and answer.kind in ("quantity", *EXPRESSIONS):
        answer = Node("members", (answer,))
    if answer.kind != "members" or len(answer.args) != len(gold.args):
        return False
    return _matched(gold.args, answer.args, lambda a, b: _same_side(a, b, same))


def _matched(gold: Sequence, answer: Sequence, equals: Callable[[Node, Node], bool]) -> bool:
    """Whether each of the gold's parts has a part of the answer of its own."""
    left = list(answer)
    for expected in gold:
        match = next((part for part in left if equals(expected, part)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _tuples(gold: Node, answer: Node, same: Same) -> bool:
    """In order; a pair may be told as the open interval that it may be."""
    if answer.kind == "equation" and len(answer.args) == 2:
        left, right = answer.args
        names_of = (
            [arg.args[0] if arg.kind == "symbol" else "" for arg in left.args]
            if left.kind == "tuple"
            else None
        )
        if names_of is not None and (names_of != sorted(set(names_of)) or "" in names_of):
            return False
        answer = right if names_of is not None or _name(left) is not None else answer
    if answer.kind == "apply" and len(answer.args[0]) == 1 and answer.args[0].isupper():
        answer = Node("tuple", answer.args[1:])  # P(3, 4)
    if answer.kind == "assignments":
        pairs = sorted(answer.args)
        answer = Node("tuple", tuple(value for _, value in pairs))
    if answer.kind == "matrix":
        rows = answer.args
        flat = [row.args[0] for row in rows] if all(len(row.args) == 1 for row in rows) else None
        flat = list(rows[0].args) if len(rows) == 1 else flat
        answer = Node("tuple", tuple(flat)) if flat is not None else answer
    if answer.kind == "interval" and len(gold.args) == 2:
        return _intervals_match(as_interval(gold), answer, same)
    if answer.kind == "union" and len(answer.args[0]) == 1 and len(gold.args) == 2:
        piece = answer.args[0][0]
        return _intervals_match(Node("interval", (*gold.args, False, False)), piece, same)
    if answer.kind != "tuple" or len(answer.args) != len(gold.args):
        return False
    return all(_same_side(a, b, same) for a, b in zip(gold.args, answer.args, strict=True))


def _intervals_match(gold: Node, answer: Node, same: Same) -> bool:
    return gold.args[2:4] == answer.args[2:4] and all(
        same(a, b) for a, b in zip(gold.args[:2], answer.args[:2], strict=True)
    )


def _unions(gold: Node, answer: Node, same: Same) -> bool:
    """The same intervals in any order, and the same variable where both name one."""
    parts, variables = [], []
    for node in (gold, answer):
        if node.kind == "equation" and len(node.args) == 2:
            node = node.args[1]
        if node.kind == "tuple" and len(node.args) == 2:
            node = Node("interval", (*node.args, False, False))
        if node.kind not in ("union", "interval"):
            return False
        parts.append(node.args[0] if node.kind == "union" else (node,))
        variables.append(node.args[1] if node.kind == "union" else "")
    if all(variables) and variables[0] != variables[1]:
        return False
    if len(parts[0]) != len(parts[1]):
        return False
    return _matched(parts[0], parts[1], lambda a, b: _intervals_match(a, b, same))


def _matrices(gold: Node, answer: Node, same: Same) -> bool:
    if answer.kind == "equation" and len(answer.args) == 2 and names(answer.args[0]):
        answer = answer.args[1]
    rows = answer.args
    column = all(len(row.args) == 1 for row in gold.args)
    if answer.kind == "tuple" and column:
        rows = tuple(Node("tuple", (entry,)) for entry in answer.args)
    elif (
        answer.kind == "list"
        and answer.args
        and all(row.kind in ("list", "interval") for row in answer.args)
    ):
        rows = tuple(
            Node("tuple", row.args if row.kind == "list" else row.args[:2]) for row in answer.args
        )
    elif (
        answer.kind == "interval" and all(answer.args[2:4]) and not column
    ) or answer.kind != "matrix":
        return False
    if len(rows) != len(gold.args):
        return False
    return all(
        len(a.args) == len(b.args)
        and all(_same_side(x, y, same) for x, y in zip(a.args, b.args, strict=True))
        for a, b in zip(gold.args, rows, strict=True)
    )


def _relations(gold: Node, answer: Node, same: Same) -> bool:
    return answer.kind == "relation" and gold.args[0] == answer.args[0] and all(
        same(a, b) for a, b in zip(gold.args[1:], answer.args[1:], strict=True)
    )  # fmt: skip


def _dimensions(gold: Node, answer: Node, same: Same) -> bool:
    if answer.kind != "dimensions" or len(answer.args) != len(gold.args):
        return False
    units = [any(part.kind == "quantity" for part in node.args) for node in (gold, answer)]
    parts = answer.args
    if units == [True, False]:
        parts = tuple(
            Node("quantity", (part, of.args[1]))
            for part, of in zip(parts, gold.args, strict=True)
            if of.kind == "quantity"
        )
    return len(parts) == len(gold.args) and all(
        _same_side(a, b, same) for a, b in zip(gold.args, parts, strict=True)
    )


def _assigned(gold: Node, answer: Node, same: Same) -> bool:
    """Values of several variables, by name."""
    if answer.kind != "assignments" or len(answer.args) != len(gold.args):
        return False
    found = dict(answer.args)
    return all(name in found and _same_side(value, found[name], same) for name, value in gold.args)


COMPARISONS: dict[str, tuple[Callable[[Node, Node, Same], bool], Kind]] = {
    "equation": (_equations, Kind.EQUATION),
    "members": (lambda gold, answer, same: _elements(gold, _named_set(answer), same), Kind.SET),
    "tuple": (_tuples, Kind.TUPLE),
    "matrix": (_matrices, Kind.TUPLE),
    "interval": (_unions, Kind.INTERVAL),
    "union": (_unions, Kind.INTERVAL),
    "relation": (_relations, Kind.INTERVAL),
    "based": (lambda gold, answer, same: gold == answer, Kind.NUMBER),
    "dimensions": (_dimensions, Kind.TUPLE),
    "assignments": (_assigned, Kind.TUPLE),
}


def _named_set(answer: Node) -> Node:
    """The set of `S = {1, 2}`, or an answer with a name as it is."""
    if answer.kind == "equation" and len(answer.args) == 2 and answer.args[0].kind == "symbol":
        return answer.args[1]
    return answer
