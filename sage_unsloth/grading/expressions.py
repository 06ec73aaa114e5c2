r"""Which LaTeX is given to math-verify, and how each part of it is spelled.

An expression is read in whole, token by token, or it is none: a command that is not listed, words,
two numbers side by side, a relation or a list inside it make it none. What is given on has one
spelling: numbers exact (`0.25` as `\frac{1}{4}`), braces around every argument, and each symbol
with its subscript, prime and case as one `x_{n}`, since the parser behind math-verify reads `R` as
`r` and may drop a subscript.
"""

import functools
import re
from fractions import Fraction

_TOKEN = re.compile(
    r"\s*(?P<token>\\[a-zA-Z]+|\\.|(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+(?![a-zA-Z\d^]))?|[a-zA-Z]+|\*\*|\S)"
)
_NAMED = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp"
_FUNCTIONS = {name: name for name in _NAMED.split()}
_FUNCTIONS |= {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_LETTERS = """
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon
    phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar ell
"""
_GREEK = frozenset(_LETTERS.split())
_ACCENTS = frozenset(("dot", "ddot", "hat", "bar", "vec", "tilde", "overline"))
_OPERATORS = {
    "+": "+", "-": "-", "*": r"\cdot ", r"\cdot": r"\cdot ", r"\times": r"\times ", "/": "/",
    r"\div": r"\div ", r"\ast": r"\cdot ",
}  # fmt: skip
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
# Short words that no product of letters is.
_SHORT = "is or and not the no if of to by at as any all yes odd nor for but"
_WORDS = frozenset(_SHORT.split())
_NAME = r"(?:\\?[a-zA-Z]+(?:_\{?\w+\}?)?)"
_DERIVATIVE = re.compile(
    rf"\\frac\s*\{{\s*d(?:\s*\^\s*\{{?\s*(\d)\s*\}}?)?\s*({_NAME})\s*\}}\s*"
    rf"\{{\s*d\s*({_NAME})\s*(?:\^\s*\{{?\s*\1\s*\}}?)?\s*\}}"
)
_MAX_COUNT = 170  # of what a factorial or binomial is taken


class _Unreadable(ValueError):
    """The text is no expression."""


@functools.lru_cache(maxsize=1024)  # a gold, and an answer in several places of the rules
def canonical(text: str) -> str | None:
    """The expression in one spelling, or None for a text that is none."""
    derivatives: list[str] = []

    def keep(match: re.Match) -> str:
        derivatives.append(f"d{match[1] or ''}{match[2]}/d{match[3]}")
        return rf"\deriv{{{len(derivatives) - 1}}}"

    text = _DERIVATIVE.sub(keep, text.replace("np.", ""))
    reader = _Reader(_tokens(text), derivatives)
    try:
        found = reader.sequence(None)
    except (_Unreadable, RecursionError):
        return None
    return found if reader.position == len(reader.tokens) else None


def _tokens(text: str) -> list[str]:
    tokens = []
    for match in _TOKEN.finditer(text):
        token = match["token"]
        tokens += [token] if not token.isalpha() or not token.isascii() else _letters(token)
    return tokens


def _letters(run: str) -> list[str]:
    """A run of letters: the name of a function, a name in capitals, or a product of up to three."""
    if run in _FUNCTIONS or run in ("sqrt", "pi", "infty", "infinity", "inf") or run in _GREEK:
        return [rf"\{_FUNCTIONS.get(run, run)}"]
    if run.isupper() or len(run) == 1:
        return [run]
    if len(run) > 3 or run in _WORDS:
        return ["?"]  # words are no expression
    return list(run)


def symbol(name: str) -> str:
    """The parser's spelling of a symbol: a subscript that says which one, case included."""
    return f"x_{{{int.from_bytes(name.encode(), 'big')}}}"


class _Reader:
    """Reads tokens from left to right, by recursive descent."""

    def __init__(self, tokens: list[str], derivatives: list[str]):
        self.tokens, self.position, self.derivatives = tokens, 0, derivatives

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        if not token:
            raise _Unreadable
        self.position += 1
        return token

    def sequence(self, end: str | None) -> str:
        """Everything up to the bracket `end`, or to the end of the text; not nothing."""
        parts: list[str] = []
        # What may stand before: "" nothing or an operator, "number", "atom", "function".
        last = ""
        while (token := self.peek()) and token != end:
            part, last = self.part(last)
            parts.append(part)
        if end is not None and self.peek() != end:
            raise _Unreadable
        if not parts or last in ("function", ""):
            raise _Unreadable
        return "".join(parts)

    def part(self, last: str) -> tuple[str, str]:
        """One operator, function or atom with its powers, and which of these it is."""
        token = self.next()
        if token in _OPERATORS:
            if last == "" and token not in "+-":
                raise _Unreadable
            return _OPERATORS[token], ""
        if token.startswith("\\") and token[1:] in _FUNCTIONS:
            return self.function(token)
        if re.match(r"[\d.]", token) and token != ".":
            return self.number(token, last), "number"
        if token == "|":
            inside = self.sequence("|")
            self.next()
            return self.powers(rf"|{inside}|"), "atom"
        if token == r"\frac" and last == "number":
            raise _Unreadable  # a mixed number is read with its number
        return self.powers(self.atom(token)), "atom"

    def number(self, token: str, last: str) -> str:
        if last in ("number", "atom"):
            raise _Unreadable  # "43 42", "x 2"
        value = Fraction(token)
        if self.peek() == r"\frac":
            self.next()
            top, bottom = self.argument(one_digit=True), self.argument(one_digit=True)
            if not (top.isdigit() and bottom.isdigit()):
                return rf"{_plain(value)} \cdot \frac{{{top}}}{{{bottom}}}"
            if value.denominator != 1 or not 0 < int(top) < int(bottom):
                raise _Unreadable  # a mixed number, or a product, which nobody can tell
            value += Fraction(int(top), int(bottom))
        text = _plain(value)
        if value.denominator != 1 and self.peek() in ("^", "**", "!"):
            text = f"({text})"
        return self.powers(text)

    def function(self, token: str) -> tuple[str, str]:
        name = rf"\{_FUNCTIONS[token[1:]]}"
        if self.peek() == "_":
            self.next()
            name += f"_{{{self.argument()}}}"
        if self.peek() in ("^", "**"):
            self.next()
            name += f"^{{{self.exponent()}}}"
        if not self.peek():
            raise _Unreadable
        if self.peek() in ("{", "[", "("):
            return f"{name}({self.bracket(self.next())})", "atom"
        return name + " ", "function"

    def bracket(self, opening: str) -> str:
        inside = self.sequence(_BRACKETS[opening])
        self.next()
        return inside

    def argument(self, *, one_digit: bool = False) -> str:
        """What a command takes: a group, or the next token, of a number its first digit alone."""
        token = self.next()
        if token == "{":
            return self.bracket(token)
        if re.fullmatch(r"\d+", token):
            if one_digit and len(token) > 1:
                self.tokens.insert(self.position, token[1:])
                token = token[0]
            return token
        if token.removeprefix("\\") in _FUNCTIONS or token in _OPERATORS:
            raise _Unreadable
        return self.atom(token)

    def exponent(self) -> str:
        """Behind `^`: a group, or a number or symbol with its sign; `x^12` means x to the 12th."""
        sign = ""
        while self.peek() in ("+", "-"):
            sign += self.next()
        token = self.next()
        if token in ("{", "("):
            return sign + (self.bracket(token) if token == "{" else f"({self.bracket(token)})")
        if re.match(r"\d", token):
            value = Fraction(token)
            return sign + _plain(value)
        return sign + self.atom(token)

    def powers(self, base: str) -> str:
        """The base with the powers and factorials behind it."""
        while self.peek() in ("^", "**", "!"):
            if self.next() == "!":
                if not base.isdigit() or int(base) > _MAX_COUNT:
                    raise _Unreadable
                base = f"({base}!)"
            else:
                base = f"{base}^{{{self.exponent()}}}"
                if self.peek() in ("^", "**"):
                    raise _Unreadable
        return base

    def atom(self, token: str) -> str:
        """One operand, of which `token` is the first."""
        if token in _BRACKETS:
            return f"({self.bracket(token)})"
        if token == r"\deriv":
            return symbol(self.derivatives[int(self.argument())])
        if token == r"\frac":
            top, bottom = self.argument(one_digit=True), self.argument(one_digit=True)
            return rf"\frac{{{top}}}{{{bottom}}}"
        if token == r"\sqrt":
            degree = f"[{self.bracket(self.next())}]" if self.peek() == "[" else ""
            if self.peek() == "(":
                return rf"\sqrt{degree}{{{self.bracket(self.next())}}}"
            return rf"\sqrt{degree}{{{self.argument(one_digit=True)}}}"
        if token == r"\binom":
            counts = self.argument(one_digit=True), self.argument(one_digit=True)
            if not all(count.isdigit() and int(count) <= _MAX_COUNT for count in counts):
                raise _Unreadable
            return r"\binom{{{}}}{{{}}}".format(*counts)
        if token in (r"\lfloor", r"\lceil"):
            end = token.replace(r"\l", r"\r")
            inside = self.sequence(end)
            return f"{token} {inside} {self.next()}"
        if token in (r"\infty", r"\infinity", r"\inf"):
            return r"\infty "
        return self.name(token)

    def name(self, token: str) -> str:
        r"""A symbol with what marks it, or one of the constants e, i and \pi."""
        name = token.removeprefix("\\")
        if name in _ACCENTS and token != name:
            name = f"{name}({self._flat_group()})"
        elif token == r"\text":
            name = self._flat_group()
        elif not (token.isalpha() or name in _GREEK or token == r"\pi"):
            raise _Unreadable
        marked = False
        if self.peek() == "_":
            self.next()
            name, marked = f"{name}_{self._flat_group()}", True
        while self.peek() == "'":
            self.next()
            name, marked = name + "'", True
        if not marked and token in ("e", "i", r"\pi"):
            return {"e": "e", "i": " i ", r"\pi": r"\pi "}[token]
        return symbol(name)

    def _flat_group(self) -> str:
        """The text of a group or of the next token, which names and does not count."""
        token = self.next()
        if token != "{":
            return token
        flat, depth = "", 1
        while depth:
            token = self.next()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if token not in "{}" and token != r"\text":
                flat += token.removeprefix("\\")
        return flat


def _plain(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
