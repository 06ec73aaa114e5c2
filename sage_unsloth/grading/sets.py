"""Reads brackets with lists: sets, tuples, intervals, matrices; and joins intervals."""

from sage_unsloth.grading.quantities import Quantities
from sage_unsloth.grading.tokens import Unreadable
from sage_unsloth.grading.tree import EXPRESSIONS, INFINITY, Node, exact, negated

NUMBER_SETS = frozenset((r"\mathbbR", r"\mathbbZ", r"\mathbbN", r"\mathbbQ"))
_TURNED = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
_MATRICES = frozenset(("matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array"))


class Sets(Quantities):
    """Reads brackets that are not expressions."""

    def at_set(self) -> bool:
        if self.peek() in ("(", "["):
            return self.holds_list()
        return self.peek() in (r"\mathbbR", r"\emptyset", r"\{", "]", r"\begin")

    def holds_list(self) -> bool:
        """Whether the bracket here has a comma at its own depth, or a matrix in it."""
        depth = 0
        for token in self.tokens[self.at :]:
            text = "" if token.kind == "text" else token.text
            if text in ("(", "[", "{", r"\{"):
                depth += 1
            elif text in (")", "]", "}", r"\}"):
                depth -= 1
                if depth == 0:
                    return False
            elif depth == 1 and text in (",", ";", r"\begin"):
                return True
        return False

    def set(self) -> Node:
        """Sets and intervals with unions between them."""
        parts = [self.one_set()]
        while self.take(r"\cup", "U"):
            parts.append(self.one_set())
        if len(parts) == 1:
            return without(parts[0], self.one_set()) if self.take(r"\setminus") else parts[0]
        if all(part.kind == "members" for part in parts):
            return Node("members", tuple(element for part in parts for element in part.args))
        parts = [as_interval(part) for part in parts]
        if any(part.kind != "interval" for part in parts):
            raise Unreadable
        return Node("union", (tuple(parts), ""))

    def one_set(self) -> Node:
        opening = self.next().text
        if opening == r"\mathbbR":
            return REALS
        if opening == r"\emptyset":
            return Node("members", ())
        if opening == r"\begin":
            return self.matrix()
        if opening in (r"\{", "{"):
            with self.nested():
                return self.braces(r"\}" if opening == r"\{" else "}")
        if opening in ("(", "[") and self.take(r"\begin"):
            matrix = self.matrix()
            self.expect(")" if opening == "(" else "]")
            return matrix
        if opening not in ("(", "[", "]"):
            raise Unreadable
        with self.nested():
            return self.brackets(opening)

    def brackets(self, opening: str) -> Node:
        items = [self.element()]
        while self.take(",", ";"):
            items.append(self.element())
        closing = self.next().text
        if (opening, closing) == ("(", ")"):
            return Node("tuple", tuple(items))
        ends = len(items) == 2 and all(item.kind in EXPRESSIONS for item in items)
        # ]2, 3[ is how some countries write the open interval.
        if ends and closing in ("]", ")", "[") and (opening, closing) != ("(", "["):
            return Node("interval", (*items, opening == "[", closing == "]"))
        if (opening, closing) == ("[", "]"):
            return Node("list", tuple(items))
        raise Unreadable

    def element(self) -> Node:
        return self.set() if self.peek() in (r"\{", r"\begin") or self.at_set() else self.sum()

    def braces(self, closing: str) -> Node:
        r"""`\{1, 2\}`, or `\{x \mid 2 < x < 4\}`."""
        if any(token.text in (r"\mid", "|", ":") for token in self.tokens[self.at :]):
            variable = self.next()
            if self.take(r"\in"):
                self.next()
            if variable.kind != "letters" or not self.take(r"\mid", "|", ":"):
                raise Unreadable
            node = self.condition_on(variable.text)
        else:
            items: list[Node] = []
            while self.peek() != closing:
                items.append(self.element())
                if not self.take(",", ";"):
                    break
            node = Node("members", tuple(items))
        self.expect(closing)
        return node

    def condition_on(self, variable: str) -> Node:
        raise Unreadable  # `forms.Statement` reads inequalities

    def matrix(self) -> Node:
        r"""An environment with & and \\, after `\begin`."""
        name = self.environment()
        if name == "array":
            self.expect("{")
            while not self.take("}"):
                if self.next().text.strip("lcr|"):
                    raise Unreadable
        rows: list[list[Node]] = [[]]
        while not self.take(r"\end"):
            rows[-1].append(self.element())
            if self.take(r"\\") and self.peek() != r"\end":
                rows.append([])
            elif not self.take("&") and self.peek() != r"\end":
                raise Unreadable
        if self.environment() != name or len({len(row) for row in rows}) != 1:
            raise Unreadable
        return Node("matrix", tuple(Node("tuple", tuple(row)) for row in rows))

    def environment(self) -> str:
        self.expect("{")
        name = self.next().text
        self.expect("}")
        if name not in _MATRICES:
            raise Unreadable
        return name


# --- intervals ------------------------------------------------------------------------------------


def as_interval(node: Node) -> Node:
    """A pair as an open interval; any other node unchanged."""
    if node.kind == "tuple" and len(node.args) == 2:
        return Node("interval", (*node.args, False, False))
    return node


def ray(low: Node, high: Node, has_low: bool, has_high: bool) -> Node:
    if (low == negated(INFINITY) and has_low) or (high == INFINITY and has_high):
        raise Unreadable
    return Node("interval", (low, high, has_low, has_high))


REALS = Node("union", ((ray(negated(INFINITY), INFINITY, False, False),), ""))


def without(node: Node, points: Node) -> Node:
    """The reals without one number."""
    if node != REALS or points.kind != "members" or len(points.args) != 1:
        raise Unreadable
    return apart(points.args[0], "")


def apart(point: Node, variable: str) -> Node:
    below = ray(negated(INFINITY), point, False, False)
    return Node("union", ((below, ray(point, INFINITY, False, False)), variable))


def inequality(sides: list[Node], operators: list[str]) -> Node:
    r"""`x > 2`, `2 \ge x`, `-2 \le x < 7` as intervals; other relations unchanged."""
    if len(sides) == 3 and sides[1].kind == "symbol":
        if all(operator in (">", ">=") for operator in operators):
            sides, operators = sides[::-1], [_TURNED[operator] for operator in operators[::-1]]
        if any(operator not in ("<", "<=") for operator in operators):
            raise Unreadable
        piece = ray(sides[0], sides[2], operators[0] == "<=", operators[1] == "<=")
        return Node("union", ((piece,), sides[1].args[0]))
    if len(sides) != 2:
        raise Unreadable
    (left, right), (operator,) = sides, operators
    if right.kind == "symbol" and left.kind != "symbol" and operator != "!=":
        left, right, operator = right, left, _TURNED[operator]
    if left.kind != "symbol" or right.kind == "symbol":
        return Node("relation", (operator, left, right))
    name, belongs = left.args[0], operator in ("<=", ">=")
    if operator == "!=":
        return apart(right, name)
    if operator in ("<", "<="):
        return Node("union", ((ray(negated(INFINITY), right, False, belongs),), name))
    return Node("union", ((ray(right, INFINITY, belongs, False),), name))


def both_hold(first: Node, second: Node, variable: str, *, apart: bool) -> Node:
    """The interval of `x > 2` and `x < 4`; the union of `x < 2, x > 4` if `apart`."""
    low, high = sorted((first, second), key=lambda piece: piece.args[0] == negated(INFINITY))
    (bottom, no_top, has_bottom, _), (no_bottom, top, _, has_top) = low.args, high.args
    a, b = exact(bottom), exact(top)
    if no_top != INFINITY or no_bottom != negated(INFINITY) or a is None or b is None:
        raise Unreadable
    if a < b:
        return Node("union", ((ray(bottom, top, has_bottom, has_top),), variable))
    if not apart:
        raise Unreadable
    return Node("union", ((high, low), variable))
