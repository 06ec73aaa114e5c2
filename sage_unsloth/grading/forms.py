r"""Reads an answer: an expression with what may stand around it, and what is no expression.

answer      item, item ... and item            a list, a set, or conditions on one variable
item        [name =] expression [= expression ...] [unit]
            expression < expression            an interval, where one side is a variable
            x \in set, a set, an interval, a union of them, a pair, a matrix, digits in a base
condition   behind an expression: `, n \ge 1`, `(n \in \mathbb N)`, `\text{for all } n`
"""

import re
from fractions import Fraction

from sage_unsloth.grading.numerics import is_near
from sage_unsloth.grading.quantities import COMPOUND, RELATIONS, amount, is_word
from sage_unsloth.grading.sets import (
    NUMBER_SETS,
    REALS,
    Sets,
    as_interval,
    both_hold,
    inequality,
)
from sage_unsloth.grading.tokens import Token, Unreadable, tokens_of
from sage_unsloth.grading.tree import EXPRESSIONS, INFINITE, Node, exact, negated, number
from sage_unsloth.grading.units import (
    ANGLE,
    LABELS,
    PERCENT,
    UNITS,
    Unit,
    number_in_words,
    words_of,
)

_BASES = {"two": 2, "three": 3, "five": 5, "eight": 8, "ten": 10, "hex": 16}
_NAMED_BASE = re.compile(r"(?:_ ?\{?| in base | base )(two|three|five|eight|ten|hex)\}?$")
_EMPTY = re.compile(
    r"(?:the )?empty set|(?:there (?:is|are) )?no (?:real )?solutions?", re.IGNORECASE
)
_ALL_REALS = re.compile(r"(?:all|any) real(?: (?:numbers?|values))?|all reals|the real numbers")
_BEHIND = frozenset(("for", "where", "with", "if", "since", "because"))
_BASED = re.compile(
    r"(-?)\(?([0-9A-Fa-f]+(?:\.[0-9A-Fa-f]+)?)\)?\s?"
    r"(?:_ ?\{?(?:base ?)?\(?([0-9]{1,2})\)?\}?|\(?(?:in )?base[ -]?([0-9]{1,2})\)?)"
)
_ALL = words_of("""
    for all where any every integer integers real with if positive natural nonnegative numbers
    number
""")
_ABOUT = frozenset(("union", "interval", "relation"))
_JOINS = {",": ",", ";": ",", "and": "and", "or": "or", r"\lor": "or", r"\land": "and"}


MOST_NUMERALS = 24  # words and hyphens of a number in words


class Statement(Sets):
    """Reads a whole answer."""

    def answer(self) -> Node:
        """Reads the whole text.

        Raises:
            Unreadable: it is not an answer.
        """
        text = " ".join(token.text for token in self.tokens)
        if _ALL_REALS.fullmatch(text.lower()):
            return REALS
        if _EMPTY.fullmatch(text):
            return Node("members", ())
        # Forms of a whole answer come first; each must use up every token.
        for reading in (self.in_base, self.clock, self.words, self.feet, self.lengths):
            self.at = 0
            node = reading()
            if node is not None and self.token() is None:
                return node
        self.at = 0
        items, joins = [self.item()], []
        while (join := self.separator()) is not None:
            # After a value this is its condition (2n, n ≥ 1); after an inequality it is another
            # one.
            if join != "or" and items[-1].kind not in _ABOUT and self.at_condition():
                self.condition()
            elif self.peek() in ("since", "because"):
                self.reason(items)
            else:
                joins.append(join)
                items.append(self.item())
        if self.token() is not None:
            bracket = self.take("(")
            if self.at_condition(bracket=bracket):
                self.condition()
            else:
                self.reason(items)
            if bracket:
                self.expect(")")
            if self.token() is not None:
                raise Unreadable
        return _join(items, joins)

    def separator(self) -> str | None:
        """Moves past "," "and" or "or" and returns it; `, and` is "and"."""
        join = None
        while (text := self.peek()) in _JOINS:
            if join in ("and", "or") or (join and text in (",", ";")):
                raise Unreadable
            self.next()
            join = _JOINS[text]
        return join

    # --- items ------------------------------------------------------------------------------------

    def item(self) -> Node:
        """One statement: a value with its name, a relation or a set."""
        labelled = self.label()
        sides, operators = [self.side()], []
        while self.peek() in ("=", "is", *RELATIONS):
            token = self.next().text
            operators.append(RELATIONS.get(token, "="))
            sides.append(self.side())
        while self.take(r"\approx"):
            if not _rounds_to(sides[-1], self.next()):
                raise Unreadable
        if self.take(r"\in"):
            if sides[0].kind != "symbol" or operators:
                raise Unreadable
            return _about(self.set(), sides[0].args[0])
        if not operators:
            return sides[0]
        if set(operators) == {"="}:
            return Node("equation", tuple(sides))
        if labelled or "=" in operators:
            raise Unreadable
        return inequality(sides, operators)

    def label(self) -> bool:
        """Whether a name of the value comes here: `Area =`, `Answer:`, `the point`, `all`."""
        start = self.at
        if self.take("the") and self.take("point", "pair", "vector"):
            return True
        self.at = start
        if self.peek() == "all" and self.token(1) is not None:
            self.next()
            return False
        words: list[str] = []
        while (token := self.token()) is not None and is_word(token):
            words += token.text.lower().split()
            self.next()
        named = bool(words) and LABELS.issuperset(words)
        if named and self.take(":", "=") and self.token() is not None:
            return True
        self.at = start
        return False

    def side(self) -> Node:
        """One side: an expression with its unit, a set, a tuple or a matrix."""
        if self.at_set():
            return self.set()
        if self.is_point():
            self.next()
            return self.set()
        start = self.at
        # -$5: the sign stands before the currency.
        negative = self.take("-")
        currency = self.currency()
        if negative and currency is None:
            self.at, negative = start, False
        node = self.scaled(self.named() or self.over_or_choose())
        unit = self.read_unit()
        if currency is not None:
            unit = self.money(currency, unit, start)
        elif unit is None and self.take("%", r"\%"):
            unit = Unit(((PERCENT, 1),))
        elif node.kind == "degrees" and (unit is None or unit.powers):
            node, unit = node.args[0], unit or Unit(((ANGLE, 1),))
        node = negated(node) if negative else node
        return node if unit is None else self.compound(Node("quantity", (node, unit)))

    def is_point(self) -> bool:
        """Whether a named point comes here: `A(2, -1)`."""
        if not re.fullmatch("[ABD-Z]", self.peek()) or self.peek(1) != "(":
            return False
        self.at += 1
        listed = self.holds_list()
        self.at -= 1
        return listed

    def named(self) -> Node | None:
        """A function's name with its variable, left of "=": `f(x)`, `y(x)`, `a(n)`."""
        match self.tokens[self.at : self.at + 5]:
            case [name, Token(text="("), variable, Token(text=")"), Token(text="=")]:
                if name.kind == variable.kind == "letters" and len(name.text + variable.text) == 2:
                    self.at += 4
                    return Node("apply", (name.text, Node("symbol", (variable.text,))))
        return None

    def ends_product(self) -> bool:
        if super().ends_product():
            return True
        token = self.token()
        assert token is not None
        if token.text == "[":
            return self.token(1) is None  # [2, \infty[
        if token.text == "(":
            return self.peek(1) in ("since", "because") or self.at_condition(1, bracket=True)
        return is_word(token) and token.text.split(" ")[0] in _BEHIND

    def condition_on(self, variable: str) -> Node:
        items, joins = [self.item()], []
        while (join := self.separator()) is not None:
            joins.append(join)
            items.append(self.item())
        node = _join(items, joins)
        if node.kind != "union" or node.args[1] != variable:
            raise Unreadable
        return node

    # --- behind the answer ------------------------------------------------------------------------

    def at_condition(self, ahead: int = 0, *, bracket: bool = False) -> bool:
        start = self.at
        self.at += ahead
        try:
            self.condition()
            return self.peek() == ")" if bracket else self.token() is None
        except Unreadable:
            return False
        finally:
            self.at = start

    def condition(self) -> None:
        r"""A condition that narrows nothing: `n \ge 1`, `n \in \mathbb{N}`, `\text{for all } n`."""
        quantified = False
        while (token := self.token()) and is_word(token) and _ALL.issuperset(token.text.split()):
            self.next()
            quantified = True
        variable = self.next()
        if variable.kind != "letters" or len(variable.text) > 1:
            raise Unreadable
        if quantified and self.token() is None:
            return
        if self.take(r"\in"):
            if self.next().text not in NUMBER_SETS:
                raise Unreadable
            return
        relation = self.next().text
        self.take("-")
        bound = self.next()
        # A larger bound could exclude values that the gold has.
        if bound.value is None or bound.value > 2 or relation not in (">", r"\ge", r"\ne"):
            raise Unreadable

    def reason(self, items: list[Node]) -> None:
        """`42 (since 6 * 7 = 42)`: a true equation of numbers that ends in the answer."""
        if not self.take("since", "because") or len(items) != 1:
            raise Unreadable
        if self.at_condition(bracket=self.peek(-2) == "("):
            self.condition()
            return
        equation = self.item()
        values = {exact(side) for side in equation.args} if equation.kind == "equation" else {None}
        if None in values or values != {exact(items[0])}:
            raise Unreadable

    # --- answers of one kind ----------------------------------------------------------------------

    def in_base(self) -> Node | None:
        r"""Digits in a base: `52_8`, `2A_{16}`, `52 \text{ base } 8`, `0x2A`."""
        text = "".join((" " if token.spaced else "") + token.text for token in self.tokens).strip()
        text = re.sub(r"^[A-Za-z] ?= ?", "", text)
        text = _NAMED_BASE.sub(lambda match: f"_{_BASES[match[1]]}", text)
        self.at = len(self.tokens)
        if self.tokens[0].kind == "based":
            base = {"x": 16, "o": 8, "b": 2}[text[1].lower()]
            return Node("based", ("", text[2:].upper().lstrip("0") or "0", base))
        match = _BASED.fullmatch(text)
        if match is None:
            return None
        digits, base = match[2].upper().lstrip("0") or "0", int(match[3] or match[4])
        if digits[0].isalpha() and (base <= 10 or len(digits) == 1):
            return None  # a symbol, F_{10}
        return Node("based", (match[1], digits, base))

    def clock(self) -> Node | None:
        """`2:00 pm` is 2 o'clock; other times are text."""
        hour, *rest = (token.text.lower() for token in self.tokens)
        self.at = len(self.tokens)
        if hour.isdecimal() and re.fullmatch(r":00[ap]\.?m\.?", "".join(rest)):
            return number(int(hour))
        return None

    def words(self) -> Node | None:
        words = []
        for token in self.tokens[:MOST_NUMERALS]:
            if token.kind != "letters" and token.text != "-":
                break
            words.append(token.text)
        # The longest run that is a number; the rest must be its unit.
        for self.at in range(len(words), 0, -1):
            value = number_in_words(" ".join(words[: self.at]).replace(" - ", "-"))
            if value is not None:
                return _quantity(number(value), self.read_unit())
        return None

    def feet(self) -> Node | None:
        match self.tokens:
            case [feet, Token(text="'"), inches, Token(text='"')]:
                if feet.value is not None and inches.value is not None:
                    self.at = len(self.tokens)
                    unit = Unit((("length", 1),), UNITS["ft"][1], frozenset((COMPOUND,)))
                    return Node(
                        "quantity", (number(feet.value + inches.value / Fraction(12)), unit)
                    )
        return None

    def lengths(self) -> Node | None:
        r"""Dimensions in their order: `7 \times 9`, `4 \text{ ft} \times 12 \text{ ft}`."""
        parts: list[Node] = []
        while (token := self.token()) is not None and token.value is not None:
            self.next()
            parts.append(_quantity(number(token.value), self.read_unit()))
            if self.token() is None:
                return Node("dimensions", tuple(parts)) if len(parts) > 1 else None
            if not self.take(r"\times", "x"):
                return None
        return None


def _quantity(value: Node, unit: Unit | None) -> Node:
    return value if unit is None else Node("quantity", (value, unit))


# --- several items --------------------------------------------------------------------------------


def _about(node: Node, variable: str) -> Node:
    """A set with the variable that is in it."""
    node = as_interval(node)
    if node.kind == "interval":
        return Node("union", ((node,), variable))
    return Node("union", (node.args[0], variable)) if node.kind == "union" else node


def _join(items: list[Node], joins: list[str]) -> Node:
    """Combines items into conditions on one variable, values of variables, or a set."""
    if len(items) == 1:
        return items[0]
    # A pair with an infinite end is an interval: (−∞, 2) or (3, ∞).
    if set(joins) == {"or"} and any(
        INFINITE & set(item.args) for item in items if item.kind == "tuple"
    ):
        items = [Node("union", ((as_interval(item),), "x")) for item in items]
    if all(item.kind == "union" for item in items):
        variables = {item.args[1] for item in items}
        if len(variables) != 1 or variables == {""}:
            raise Unreadable
        pieces = [piece for item in items for piece in item.args[0]]
        if set(joins) == {"or"}:
            return Node("union", (tuple(pieces), *variables))
        if "or" in joins or len(items) != len(pieces) or len(pieces) != 2:
            raise Unreadable
        return both_hold(pieces[0], pieces[1], variables.pop(), apart=set(joins) == {","})
    names = [item.args[0].args[0] if _is_named(item) else "" for item in items]
    values = [item.args[1] if _is_named(item) else item for item in items]
    letters = {name.split("_")[0] for name in names if name}
    if len(letters) > 1 and "" not in names and len(set(names)) == len(names):
        return Node("assignments", tuple(zip(names, values, strict=True)))
    # One name for all of them, or one before the first: `x = 1 or 2`.
    if len(letters) > 1 or (letters and "" in names and any(names[1:])):
        raise Unreadable
    return Node("members", tuple(values))


def _rounds_to(side: Node, decimal: Token) -> bool:
    """Whether a decimal is the rounded value of the side before it."""
    value, _ = amount(side)
    if decimal.value is None or value.kind not in EXPRESSIONS:
        return False
    unit = Fraction(1, 10 ** len(decimal.text.partition(".")[2]))
    return is_near(value, number(decimal.value), 0.6 * unit)


def _is_named(item: Node) -> bool:
    return item.kind == "equation" and len(item.args) == 2 and item.args[0].kind == "symbol"


def read(text: str, *, units: bool, nouns: frozenset[str] = frozenset()) -> Node | None:
    """The tree of a text after `writing.normalise_spelling`, or None if it is not an answer.

    Args:
        units, nouns: of `Quantities`.
    """
    try:
        tokens = tokens_of(text)
        signed = [i for i, token in enumerate(tokens) if token.text in (r"\pm", r"\mp")]
        if not signed:
            return Statement(tokens, units=units, nouns=nouns).answer()
        # One ± is two values; two of them could be two or four.
        if len(signed) > 1:
            return None
        both = []
        for sign in "+-":
            tokens[signed[0]] = Token("sign", sign, True)
            both.append(Statement(tokens, units=units, nouns=nouns).answer())
        return _merge_signs(both)
    except (Unreadable, RecursionError, ArithmeticError):
        return None


def _merge_signs(both: list[Node]) -> Node:
    r"""The values for both signs of \pm, as a set."""
    parts: list[Node] = []
    for node in both:
        if node.kind == "equation" and len(node.args) == 2:
            node = node.args[1] if node.args[0].kind in ("symbol", "apply") else node
        parts += node.args if node.kind == "members" else (node,)
    if any(part.kind not in EXPRESSIONS for part in parts):
        raise Unreadable
    return Node("members", tuple(dict.fromkeys(parts)))
