"""Reads units after a number, and the currency before it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from sage_unsloth.grading.expressions import Reader
from sage_unsloth.grading.tokens import Token, Unreadable
from sage_unsloth.grading.tree import Node, exact, number
from sage_unsloth.grading.units import FILLERS, GLUED, JOINS, RATES, SCALES, Unit, unit_of_word

MOST_UNIT_WORDS = 8
COMPOUND = "compound"
"""Marks the unit of a quantity in two units, `2 hours 30 minutes`."""
RELATIONS = {"<": "<", ">": ">", r"\le": "<=", r"\ge": ">=", r"\ne": "!="}
_CURRENCIES = {
    "$": "$", r"\$": "$", "USD": "$", "US": "$", "€": "€", "EUR": "€", "£": "£", "GBP": "£",
    "¥": "¥", "₹": "₹", "Rs": "₹",
}  # fmt: skip
_SIGNS = frozenset((r"\mu", r"\Omega", "Å", "¢", "€", "£", "°", "$", "/"))
_ENDS = frozenset((",", ";", "and", "or", "=", "+", "-", ")", "]", r"\times", *RELATIONS))
_POWERED = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}


MOST_PLACES = 60


class Quantities(Reader):
    """Reads an expression with its unit.

    Args:
        units: a letter after a number may be a unit.
        nouns: counted things in addition to `units.NOUNS`.
    """

    def __init__(self, tokens: Sequence[Token], *, units: bool, nouns: frozenset[str]):
        super().__init__([_as_join(token) for token in tokens])
        self.units, self.nouns = units, nouns
        self.tried = 0  # places at which a unit was looked for

    def at_unit(self) -> bool:
        token = self.token()
        if token is None or token.kind in ("number", "based", "row"):
            return False
        word, text = is_word(token), token.text
        if word and len(text) == 1 and not self.units:
            return False
        if text == "(":  # 9 (apples)
            word = is_word(self.token(1)) and len(self.peek(1)) > 2 and self.peek(2) == ")"
        elif text in ("+", "-"):  # 42-inch
            word = not token.spaced and is_word(self.token(1)) and len(self.peek(1)) > 1
        elif word and self.units and _lower(token) in SCALES:
            return True
        if not word and text not in _SIGNS:
            return False
        self.tried += 1
        # Each try reads ahead, so many tries would make a long answer slow.
        if self.tried > MOST_PLACES:
            raise Unreadable
        start = self.at
        unit = self.read_unit()
        self.at = start
        return unit is not None

    def read_unit(self) -> Unit | None:
        """The unit that starts here and ends the item; otherwise None, and nothing is read."""
        start = self.at
        try:
            unit = self.unit_phrase()
        except Unreadable:
            unit = None
        if unit is None or not self.ends_item():
            self.at = start
            return None
        return unit

    def ends_item(self) -> bool:
        token = self.token()
        return token is None or token.kind == "number" or token.text in _ENDS

    def unit_phrase(self) -> Unit | None:
        """Words of units and counted things up to the end of the item."""
        powers: dict[str, int] = {}
        size, nouns, sign, words = Fraction(1), set(), 1, 0
        self.take("-")
        before = self.token(-1)
        if before is not None and before.text == r"\circ" and self.peek() in ("C", "F"):
            return Unit(((self.dimension(f"°{self.next().text}")[0], 1),))
        while not self.ends_item() or (self.peek() == "and" and is_word(self.token(1))):
            if self.peek() == "in" and self.peek(1) == "total":
                self.at, words = self.at + 2, words + 1
                continue
            if self.take("/", "per"):
                sign = -1
                continue
            parts = self.unit_word(first=not words)
            if parts is None or words == MOST_UNIT_WORDS:
                return None
            words += 1
            for word, power in parts:
                if word in RATES:
                    (length, more), (time, less) = map(self.dimension, RATES[word])
                    powers, size = powers | {length: 1, time: -1}, size * more / less
                elif word == "per":
                    sign = -1
                elif word not in JOINS and word not in FILLERS:
                    dimension, factor = self.dimension(word)
                    if dimension.startswith("noun "):
                        nouns.add(dimension.removeprefix("noun "))
                    powers[dimension] = powers.get(dimension, 0) + sign * power
                    size *= factor ** (sign * power)
            self.take(r"\cdot", "*")
        if not words or self.tokens[self.at - 1].text in ("and", "/", "per", "of"):
            return None
        return Unit(tuple(sorted(powers.items())), size, frozenset(nouns))

    def unit_word(self, *, first: bool) -> list[tuple[str, int]] | None:
        r"""The next words with their powers, from one token or a `\text{}`; None if there is no
        unit.
        """
        start, token = self.at, self.token()
        if token is None:
            return None
        if token.text == "(" and first and self.peek(2) == ")" and is_word(self.token(1)):
            token, self.at = self.tokens[self.at + 1], self.at + 3
        elif token.text in (r"\mu", r"\Omega"):
            self.next()
            name = "Ω" if token.text == r"\Omega" else "μ"
            if name == "μ" and is_word(self.token()):
                name += self.next().text
            token = Token("letters", name, True)
        elif is_word(token) or token.text in _SIGNS:
            self.next()
            self.take(".")  # ft.
        else:
            return None
        text = re.sub(r"\^\s*\{?\s*(-?[0-9])\s*\}?", r"^\1", token.text)
        words, power = [], 1
        for part in re.findall(r"[^\W\d_]+(?:\^-?[0-9])?|°[CF]|\S", text.replace(".", "")):
            word, _, written = part.partition("^")
            if word == "/":
                words.append(("per", 1))
            elif word.lower() in _POWERED:
                power = _POWERED[word.lower()]
            elif self.is_unit(word, token, first=first and not words):
                words.append((word, int(written or 1) * power))
                power = 1
            else:
                self.at = start
                return None
        if power > 1:  # "square" alone
            behind = self.unit_word(first=False)
            if behind is None:
                return None
            words += [(behind[0][0], behind[0][1] * power), *behind[1:]]
        elif words and self.peek() == "^" and self.peek(1) != r"\circ":
            self.next()
            words[-1] = (words[-1][0], words[-1][1] * self.small_power())
        elif words and self.peek() in ("2", "3") and not self.tokens[self.at].spaced:  # m2
            words[-1] = (words[-1][0], int(self.next().text))
        return words or None

    def small_power(self) -> int:
        braces, minus = self.take("{"), self.take("-")
        token = self.next()
        if token.text not in ("1", "2", "3", "4") or (braces and not self.take("}")):
            raise Unreadable
        return -int(token.text) if minus else int(token.text)

    def is_unit(self, word: str, token: Token, *, first: bool) -> bool:
        if word in JOINS or word in FILLERS:
            return token.kind == "text" or token.spaced
        if unit_of_word(word) is None and word.lower() not in self.nouns and word not in RATES:
            return False
        if len(word) > 1 or token.kind == "text" or not word.isascii() or not word.isalpha():
            return True
        # A single letter right after a number may also be a symbol.
        return not first or (self.units and (token.spaced or word in GLUED))

    def dimension(self, word: str) -> tuple[str, Fraction]:
        unit = unit_of_word(word)
        return unit or (f"noun {word.lower().removesuffix('s')}", Fraction(1))

    def currency(self) -> str | None:
        """The currency before a number; moves past it."""
        start, token = self.at, self.token()
        if token is None or token.text not in _CURRENCIES:
            return None
        self.next()
        if token.text == "US" and not self.take("$", r"\$"):
            self.at = start
            return None
        if token.text == "Rs":
            self.take(".")
        behind = self.token()
        if behind is not None and (behind.kind == "number" or behind.text in ("-", r"\frac")):
            return _CURRENCIES[token.text]
        self.at = start
        return None

    def money(self, currency: str, unit: Unit | None, start: int) -> Unit:
        """The unit of an amount after a currency; only `dollars` or `per day` may follow it."""
        if unit is not None and unit.powers:
            texts = {token.text.lower() for token in self.tokens[start:]}
            same = {name for name, _ in unit.powers} == {currency}
            if not same and not texts & {"per", "/", "each", "a", "an", "every"}:
                raise Unreadable
        return Unit(((currency, 1),))

    def apply_scale(self, node: Node) -> Node:
        """Multiplies by the scale words that follow: `1.5 million`."""
        while self.units and (scale := SCALES.get(_lower(self.token()))):
            if exact(node) is None:
                raise Unreadable
            self.next()
            node = Node("product", (node, number(scale)))
        return node

    def compound(self, node: Node) -> Node:
        """`2 hours 30 minutes`, `18 dollars and 0 cents` as one quantity."""
        value, unit = node.args
        size = unit.size
        while True:
            start = self.at
            self.take("and", ",")
            behind = self.token()
            if behind is None or behind.kind != "number":
                break
            self.next()
            smaller = self.read_unit()
            # Units must get smaller: "2 hours 30 minutes", never "30 minutes 2 hours".
            if smaller is None or smaller.powers != unit.powers or smaller.size >= size:
                break
            size = smaller.size
            part = number((behind.value or 0) * smaller.size / unit.size)
            value, unit = Node("sum", (value, part)), replace(unit, nouns=frozenset((COMPOUND,)))
        self.at = start
        return Node("quantity", (value, unit))


def amount(node: Node) -> tuple[Node, Unit | None]:
    """The value and unit of a quantity; any other node has the unit None."""
    return node.args if node.kind == "quantity" else (node, None)


def is_word(token: Token | None) -> bool:
    return token is not None and token.kind in ("letters", "text")


def _lower(token: Token | None) -> str:
    return "" if token is None else token.text.strip().lower()


def _as_join(token: Token) -> Token:
    r"""`\text{ and }` as the word "and"; other texts stay."""
    word = token.text.strip(" ,").lower()
    if token.kind == "text" and word in ("and", "or"):
        return token._replace(kind="letters", text=word)
    return token
