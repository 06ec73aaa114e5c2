"""Reads expressions: tokens to a tree, by recursive descent.

An expression is read completely or not at all: an unlisted command, words, two adjacent numbers or
an operator without an operand raise `Unreadable`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction

from sage_unsloth.grading.tokens import Token, Unreadable, split_tokens
from sage_unsloth.grading.tree import Node, negate, number, product, quotient
from sage_unsloth.grading.units import split_words

DEEPEST = 40  # brackets inside each other
_NAMED = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp cis"
FUNCTIONS = {name: name for name in _NAMED.split()}
FUNCTIONS |= {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log"}
_INVERSE = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
_GREEK = split_words("""
    alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega hbar
    ell
""")
_ACCENTS = split_words("""
    dot ddot hat bar vec tilde overline
""")
_APPLIED = split_words(r"""
    f g h F G H O W \phi \psi \Phi \Psi \Theta \zeta \delta \Delta
""")
"""Letters that are functions before a bracket; `x(x+1)` is a product."""
_PREFIXES = frozenset((r"\Delta", r"\delta", r"\partial"))
"""These form one symbol with the next letter."""
_DIFFERENTIAL = frozenset("xyztruvspqwVPTSUQAEW")
# Short words that are not read as a product of their letters.
_WORDS = split_words("""
    is or and not the no if of to by at as any all yes odd nor for but nay red one two six ten
""")
_TIMES = frozenset(("*", r"\cdot", r"\times", r"\ast"))
_OVER = frozenset(("/", r"\div"))
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_STOPS = split_words(r"""
    ) ] } \} \rfloor \rceil
    , ; = < > : & \\ \le \ge \ne \in \cup \cap \setminus \mid \pm \mp \over \choose \of \end \% %
    \lor \land \approx and or is + -
""")


class Reader:
    """Reads one answer's tokens from left to right; `forms.Statement` adds the other forms."""

    def __init__(self, tokens: Sequence[Token]):
        self.tokens, self.at = list(tokens), 0
        self.depth, self.in_bars = 0, False

    # --- tokens -----------------------------------------------------------------------------------

    def peek(self, ahead: int = 0) -> str:
        r"""The text of a token; "" after the last one and for `\text{}`."""
        token = self.token(ahead)
        return "" if token is None or token.kind == "text" else token.text

    def token(self, ahead: int = 0) -> Token | None:
        place = self.at + ahead
        return self.tokens[place] if 0 <= place < len(self.tokens) else None

    def next(self) -> Token:
        token = self.token()
        if token is None:
            raise Unreadable
        self.at += 1
        return token

    def take(self, *texts: str) -> bool:
        """Whether the next token is one of these; if so, moves past it."""
        if self.peek() in texts:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise Unreadable

    def first_letter(self, token: Token) -> Token:
        """The first letter of a run; the others are read next."""
        if len(token.text) > 1:
            self.tokens.insert(self.at, Token("letters", token.text[1:], False))
        return token._replace(text=token.text[0])

    @contextmanager
    def nest(self, *, bars: bool = False) -> Iterator[None]:
        """Inside a bracket or bars. A bracket hides bars outside it."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable
        # |a(b|c|)| : a bracket hides the bars outside of it, so they are put back after it.
        outer, self.in_bars = self.in_bars, bars
        yield
        self.depth -= 1
        self.in_bars = outer

    # --- sums and products ------------------------------------------------------------------------

    def sum(self) -> Node:
        terms = [self.product()]
        # What is left may be a unit, which the caller reads.
        while self.peek() in ("+", "-") and not self.at_unit():
            minus = self.next().text == "-"
            term = self.product()
            terms.append(negate(term) if minus else term)
        return terms[0] if len(terms) == 1 else Node("sum", tuple(terms))

    def signs(self) -> bool:
        """Whether an odd number of minus signs comes next."""
        negative = False
        while self.peek() in ("+", "-"):
            # "--3" is 3, as in a model's "x - -3".
            negative ^= self.next().text == "-"
        return negative

    def product(self) -> Node:
        negative = self.signs()
        factors, slashed = [self.factor()], False
        while not self.ends_product():
            token, before = self.token(), self.tokens[self.at - 1]
            assert token is not None
            if token.text == "x" and self.is_times():
                self.next()
                factors.append(self.operand())
            elif token.kind != "text" and token.text in _TIMES:
                self.next()
                operand = self.operand()
                factors = self.multiply(token.text, factors, operand)
            elif token.kind != "text" and token.text in _OVER:
                self.next()
                # 3/4x is read as (3/4)·x by some and 3/(4x) by others, so nothing may follow such a
                # slash. Two numbers are one fraction.
                plain = factors[-1].kind == "number" and before.kind == "number"
                factors.append(Node("reciprocal", (self.operand(),)))
                slashed = not (plain and factors[-1].args[0].kind == "number")
            else:
                juxtaposed = token.kind in ("number", "based") and before.text not in ("!", "i")
                if juxtaposed or (slashed and not self.is_function(token)):
                    raise Unreadable  # "43 42", "x 2"; "a/2b" has two meanings
                # 2\frac{1}{2} in the middle of a product: a mixed number or a product.
                if token.text == r"\frac" and before.kind == "number":
                    raise Unreadable
                factors.append(self.factor())
        flat: list[Node] = []
        for factor in factors:
            flat += factor.args if factor.kind == "product" else (factor,)
        return negate(product(*flat)) if negative else product(*flat)

    def multiply(self, sign: str, factors: list[Node], operand: Node) -> list[Node]:
        """The factors; a cross or dot product of vectors becomes one factor."""
        name = {r"\times": "cross", r"\cdot": "dot"}.get(sign)
        pair = [factors[-1], operand]
        if name is None or not any(map(_is_vector, pair)):
            return [*factors, operand]
        # A dot product commutes, a cross product does not.
        pair = sorted(pair, key=repr) if name == "dot" else pair
        return [*factors[:-1], Node("apply", (name, *pair))]

    def ends_product(self) -> bool:
        token = self.token()
        if token is None or (token.kind != "text" and token.text in _STOPS) or self.at_unit():
            return True
        return token.text == "|" and self.in_bars and self.closes_bar()

    def at_unit(self) -> bool:
        """Whether a unit follows; overridden where units are read."""
        return False

    def closes_bar(self) -> bool:
        """Whether a bar inside bars closes them: it does after an operand."""
        before = self.tokens[self.at - 1]
        return before.text not in ("|", *_TIMES, *_OVER, "+", "-", "(", "{", "[")

    def is_times(self) -> bool:
        """Whether the letter x is between two numbers, as in 1.5 x 10^8."""
        around = self.token(-1), self.token(1)
        return all(token is not None and token.kind == "number" for token in around)

    def is_function(self, token: Token) -> bool:
        return token.text.removeprefix("\\") in FUNCTIONS

    def operand(self) -> Node:
        return negate(self.factor()) if self.signs() else self.factor()

    # --- factors ----------------------------------------------------------------------------------

    def factor(self) -> Node:
        token = self.next()
        name = token.text.removeprefix("\\")
        if token.kind == "letters":
            return self.letters(token)
        if token.kind in ("text", "command") and name in FUNCTIONS:
            return self.function(FUNCTIONS[name])
        if token.kind == "number":
            return self.number(token)
        if token.kind == "based":
            return number(int(token.text, 0))
        return self.powers(self.atom(token))

    def letters(self, token: Token) -> Node:
        """A run of letters: a function, a Greek name, a name in capitals, or a product."""
        run = token.text
        if run in FUNCTIONS:
            return self.function(FUNCTIONS[run])
        if run in _GREEK or run in ("sqrt", "pi", "infty", "infinity", "inf", "oo"):
            name = {"infinity": "infty", "inf": "infty", "oo": "infty"}.get(run, run)
            return self.powers(self.atom(Token("command", rf"\{name}", token.spaced)))
        # dx, dy: one symbol, not d·x.
        differential = run[0] == "d" and len(run) == 2 and run[1] in _DIFFERENTIAL
        if len(run) == 1 or differential or self.is_name(run):
            return self.powers(self.symbol(token))
        # A word of the answer's text is no product of its letters.
        words = (len(run) > 3 and not run.isupper()) or run.lower() in _WORDS
        if words or run in ("CP", "nCr", "nPr"):
            raise Unreadable
        # Letters in a row are a product: "ab" is a·b. They are put back as tokens of their own.
        split = [Token("letters", letter, False) for letter in run]
        self.tokens[self.at : self.at] = split
        return product(*(self.powers(self.atom(self.next())) for _ in split[:-1]), self.factor())

    def is_name(self, run: str) -> bool:
        """Whether capitals are one name: alone on their side, `MR`, or with a subscript."""
        if not run.isupper():
            return False
        # The token before this run, of which the reader is one past the end.
        alone = self.at == 1 or self.tokens[self.at - 2].text in ("=", ",", "+", "-", "(")
        return self.peek() == "_" or (alone and (self.token() is None or self.peek() in _STOPS))

    def number(self, token: Token) -> Node:
        value = token.value
        assert value is not None
        if " " in token.text and self.peek() == "/":
            raise Unreadable  # 1 234/5
        if "." in token.text and (repeating := self.repeating_decimal(token)) is not None:
            return self.powers(repeating)
        match self.tokens[self.at : self.at + 3]:
            # "2 1/2" is a mixed number only if a space stands before the 1.
            case [Token("number", spaced=True) as top, Token(text="/"), Token("number") as bottom]:
                if value.denominator == 1:
                    self.at += 3
                    return self.mixed_number(value, top, bottom)
        if self.peek() == r"\frac":
            self.next()
            top, bottom = self.argument(one_digit=True), self.argument(one_digit=True)
            if not (_is_whole(top) and _is_whole(bottom)):
                return product(number(value), self.powers(quotient(top, bottom)))
            a, b = top.args[0], bottom.args[0]
            if value.denominator != 1 or not 0 < a < b:
                raise Unreadable  # a mixed number or a product, which nobody can tell
            value += a / b
        return self.powers(number(value))

    def mixed_number(self, whole: Fraction, top: Token, bottom: Token) -> Node:
        a, b = top.value, bottom.value
        if not (_is_int(top) and _is_int(bottom) and a is not None and b is not None and 0 < a < b):
            raise Unreadable
        return number(whole + a / b)

    def repeating_decimal(self, token: Token) -> Node | None:
        r"""A repeating decimal: `0.\overline{72}`, `0.(72)`, `0.7272...`, `0.72 repeating`."""
        whole, _, decimals = token.text.partition(".")
        if self.peek() in (r"\overline", r"\bar", r"\dot"):
            braces = self.peek(1) == "{"
            block = self.token(1 + braces)
            if block is None or not _is_int(block) or (braces and self.peek(3) != "}"):
                raise Unreadable
            if not braces and len(block.text) > 1:
                raise Unreadable
            self.at += 2 + 2 * braces
            self.take("...", r"\ldots", r"\dots")
            return number(_repeating_decimal(whole, decimals, block.text))
        if self.peek() == "(" and not self.token().spaced and self.peek(2) == ")":  # pyright: ignore
            block = self.token(1)
            if block is not None and _is_int(block) and self.token(3) is None:
                self.at += 3
                return number(_repeating_decimal(whole, decimals, block.text))
        if self.take("...", r"\ldots", r"\dots", r"\cdots"):
            for size in range(1, len(decimals) // 2 + 1):
                block = decimals[-size:]
                # 0.33... could go on otherwise. One digit must stand three times, a block twice.
                times = 3 if size == 1 else 2
                if decimals.endswith(block * times):
                    start = decimals[: -size * times]
                    return number(_repeating_decimal(whole, start, block))
            raise Unreadable
        if decimals and self.take("repeating", "recurring"):
            return number(_repeating_decimal(whole, "", decimals))
        return None

    def function(self, name: str) -> Node:
        """A function's call; without brackets its argument ends at a sign or the next function."""
        base = power = None
        token = self.token()
        attached = token is not None and token.text.isdecimal() and not token.spaced
        if self.take("_"):
            base = self.argument()
        elif name == "log" and attached and self.peek(1) == "(":
            base = number(self.next().value or 0)  # log2(3)
        if self.take("^", "**"):
            power = self.exponent()
        # sin^{-1} is the inverse function, sin^2 the square of its value.
        if power is not None and name in _INVERSE and power == negate(number(1)):
            name, power = _INVERSE[name], None
        if self.peek() in _CLOSING:
            inside = self.bracket(self.next().text)
        else:
            inside = self.operand()
            # "sin 2x + 1" ends at the sign: the argument is 2x.
            while not self.ends_product() and not self.ends_argument():
                if self.token().kind == "number":  # pyright: ignore
                    raise Unreadable
                inside = product(inside, self.factor())
        call = Node("call", (name, inside) if base is None else (name, inside, base))
        return self.powers(call) if power is None else Node("power", (call, power))

    def ends_argument(self) -> bool:
        token = self.token()
        return token is None or token.text in _TIMES | _OVER or self.is_function(token)

    # --- brackets and atoms -----------------------------------------------------------------------

    def bracket(self, opening: str) -> Node:
        """One expression inside a bracket that is already open."""
        with self.nest():
            inside = self.over_or_choose() if opening == "{" else self.sum()
            self.expect(_CLOSING[opening])
        return inside

    def over_or_choose(self) -> Node:
        r"""A sum, or two with `\over` or `\choose` between them."""
        node = self.sum()
        if self.take(r"\over"):
            return quotient(node, self.sum())
        if self.take(r"\choose"):
            return Node("binomial", (node, self.sum()))
        return node

    def argument(self, *, one_digit: bool = False) -> Node:
        """A command's argument: a group or the next token, of a number one digit if asked."""
        token = self.next()
        if token.text == "{":
            return self.bracket("{")
        if token.kind == "number" and _is_int(token):
            if one_digit and len(token.text) > 1:
                # TeX takes a single digit: \frac12 is 1/2 and \frac123 is 1/2 · 3.
                self.tokens[self.at : self.at] = split_tokens(token.text[1:])
                return number(int(token.text[0]))
            return number(token.value or 0)
        if token.kind == "letters":
            return self.atom(self.first_letter(token))
        if self.is_function(token) or token.kind not in ("command", "text"):
            raise Unreadable
        return self.atom(token)

    def exponent(self) -> Node:
        """The exponent after `^`: a group, or a signed number or letter; `x^12` has 12."""
        negative = self.signs()
        token = self.next()
        if token.kind == "number":
            exponent = number(token.value or 0)
        else:
            exponent = self.atom(self.first_letter(token) if token.kind == "letters" else token)
        return negate(exponent) if negative else exponent

    def powers(self, base: Node) -> Node:
        while self.peek() in ("^", "**", "!"):
            if self.take("!"):
                # n!! is the double factorial, which is not read.
                if self.peek() == "!":
                    raise Unreadable
                base = Node("factorial", (base,))
            elif self.peek(1) == r"\circ":
                self.at += 2
                base = Node("degrees", (base,))
            else:
                self.next()
                base = Node("power", (base, self.exponent()))
                # a^b^c has two meanings where it is written in one line.
                if self.peek() in ("^", "**"):
                    raise Unreadable
        return base

    def atom(self, token: Token) -> Node:
        """One operand that starts with `token`, without its powers."""
        text = token.text
        if token.kind == "text":
            return self.symbol(token)
        if text in _CLOSING:
            return self.bracket(text)
        if text == "|":
            return self.bars()
        if text == r"\frac":
            if self.peek() == "{" and self.peek(1) == "d" and self.peek(2) == "}":
                raise Unreadable  # an operator, not a fraction
            return quotient(self.argument(one_digit=True), self.argument(one_digit=True))
        if text == r"\sqrt":
            degree = self.bracket(self.next().text) if self.peek() == "[" else number(2)
            inside = self.bracket(self.next().text) if self.peek() == "(" else self.argument()
            return Node("root", (inside, degree))
        if text == r"\root":
            degree = self.argument()
            self.expect(r"\of")
            return Node("root", (self.argument(), degree))
        if text == r"\binom":
            return Node("binomial", (self.argument(one_digit=True), self.argument(one_digit=True)))
        if text in ("_", "^"):  # _{10}C_3
            return self.choose(self.argument())
        if text in (r"\lfloor", r"\lceil"):
            inside = self.sum()
            self.expect(text.replace(r"\l", r"\r"))
            return Node("call", (text[2:], inside))
        if text == r"\infty":
            return Node("infinity", ())
        return self.symbol(token)

    def bars(self) -> Node:
        with self.nest(bars=True):
            inside = self.sum()
            self.expect("|")
        return Node("call", ("abs", inside))

    def choose(self, count: Node) -> Node:
        kind = self.next().text
        self.expect("_")
        chosen = self.argument()
        if kind == "C":
            return Node("binomial", (count, chosen))
        if kind != "P":
            raise Unreadable
        # nPk = n! / (n − k)!
        left = Node("factorial", (Node("sum", (count, negate(chosen))),))
        return quotient(Node("factorial", (count,)), left)

    def symbol(self, token: Token) -> Node:
        r"""A symbol with its marks, a function without a value, or one of e, i and \pi."""
        text, name = token.text, token.text.removeprefix("\\")
        if token.kind == "command" and name in _ACCENTS:
            name = f"{name}({self.flat()})"
        elif text in (r"\angle", r"\triangle", r"\measuredangle"):
            name += self.next().text
        elif token.kind == "command" and text in _PREFIXES and self.peek() != "(":
            letter = self.next()
            if letter.kind == "letters":
                letter = self.first_letter(letter)
            name += self.symbol(letter).args[0]
        elif token.kind == "text":
            name = re.sub(r"\s+", " ", text)
            if not name:
                raise Unreadable
        elif not (token.kind == "letters" or name in _GREEK or text == r"\pi"):
            raise Unreadable
        marked = False
        if self.take("_"):
            name, marked = f"{name}_{self.flat()}", True
        while self.take("'"):
            name, marked = name + "'", True
        if not marked and token.kind != "text" and text in ("e", "i", r"\pi"):
            return Node("constant", (name,))
        applied = text in _APPLIED or text in (r"\Gamma", "C", "P") or "'" in name
        if self.peek() == "(" and (applied or self.is_argument(text)):
            return self.apply_function(name, text)
        # Expectation and variance take square brackets.
        if text in ("E", "Var") and self.take("["):
            return Node("apply", (name, self.bracket("[")))
        inverse = [self.peek(ahead) for ahead in range(6)]
        if text in _APPLIED and inverse == ["^", "{", "-", "1", "}", "("]:
            self.at += 5
            return self.apply_function(name + "^-1", text)
        return Node("symbol", (name,))

    def is_argument(self, text: str) -> bool:
        """Whether a bracket holds one letter or number, which makes the letter before it a
        function.
        """
        token = self.token(1)
        shifted = self.peek(2) in ("+", "-") and self.peek(4) == ")"  # u(t - 2)
        if shifted and text in ("u", "T", "x", "y", "X", "Y") and self.peek(1) in ("t", "n", "x"):
            return True
        if self.peek(2) != ")" or token is None or token.text == text:
            return False
        return token.kind == "number" or (token.kind == "letters" and len(token.text) == 1)

    def apply_function(self, name: str, text: str) -> Node:
        start = self.at
        self.expect("(")
        with self.nest():
            arguments = [self.sum()]
            while self.take(","):
                arguments.append(self.sum())
            self.expect(")")
        if text == r"\Gamma" and len(arguments) == 1:
            # Γ(n) = (n − 1)!
            return Node("factorial", (Node("sum", (arguments[0], negate(number(1)))),))
        if text == "C" and len(arguments) == 2:
            return Node("binomial", tuple(arguments))
        # C(x) with one argument is a product with a constant C, so the bracket is read again.
        if text in ("C", "P", r"\Gamma") and len(arguments) == 1 and name == text:
            self.at = start
            return Node("symbol", (name,))
        return Node("apply", (name, *arguments))

    def flat(self) -> str:
        """The text of a group or of the next token: a name, not a value."""
        token = self.next()
        if token.text != "{" or token.kind == "text":
            return token.text
        flat, depth = [], 1
        while depth:
            token = self.next()
            depth += {"{": 1, "}": -1}.get(token.text, 0)
            if token.text not in ("{", "}"):
                flat.append(token.text.removeprefix("\\"))
        return "".join(flat)


def _is_vector(node: Node) -> bool:
    if node.kind == "apply":
        return node.args[0] == "cross"
    if node.kind in ("sum", "negative"):
        return all(_is_vector(term) for term in node.args)
    return node.kind == "symbol" and node.args[0].startswith(("vec(", "hat("))


def _is_int(token: Token) -> bool:
    return token.kind == "number" and token.text.isdecimal()


def _is_whole(node: Node) -> bool:
    return node.kind == "number" and node.args[0].denominator == 1


def _repeating_decimal(whole: str, decimals: str, block: str) -> Fraction:
    """The value of whole.decimals followed by the block for ever."""
    # 0.1(6) = (16 − 1) / 90
    start = int((whole or "0") + decimals)
    top = int((whole or "0") + decimals + block) - start
    return Fraction(top, 10 ** len(decimals) * (10 ** len(block) - 1))
