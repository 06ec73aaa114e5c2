"""Answers in mathematics: the kind of the gold decides how an answer is compared with it.

One grammar reads both into a tree (`forms.read`), and each kind of gold has one comparison
(`comparisons`). Comparisons without evaluation run in the caller's process; expressions that floats
cannot tell apart are compared in a worker, to many digits. `docs/grading.md` has each rule with an
example.
"""

import functools
import re
from collections.abc import Sequence
from fractions import Fraction

from sage_unsloth.grading.checker import LONGEST_ANSWER, Checker, Grade, Kind, Verdict
from sage_unsloth.grading.comparisons import (
    COMPARISONS,
    NeedsDigits,
    Same,
    is_percent,
    matches_gold,
    same_unit,
    with_constant,
)
from sage_unsloth.grading.forms import read
from sage_unsloth.grading.numerics import is_of_matrices
from sage_unsloth.grading.options import is_choice
from sage_unsloth.grading.quantities import COMPOUND, amount
from sage_unsloth.grading.sets import as_interval
from sage_unsloth.grading.tree import (
    EXPRESSIONS,
    INFINITE,
    Node,
    exact,
    has,
    is_plain_number,
    names,
    number,
)
from sage_unsloth.grading.units import ANGLE, Unit, unit_of_word, words_of
from sage_unsloth.grading.writing import (
    as_text,
    as_words,
    is_formula,
    normalise_spelling,
    unwrap,
    without_lead,
)

__all__ = ["MATH", "compare_math", "grade_plainly", "normalise", "plain_number", "unwrap"]

_CHOICE = re.compile(r"\(?\s*([A-E])\s*\)?|\\text\{\s*\(?\s*([A-E])\s*\)?\s*\}")
# A time of day; a date, a range or a telephone number; a statement of logic.
_TEXTS = re.compile(
    r"\d{1,2}(?::\d\d)?\s*(?i:[ap]\.?\s?m)\.?|\d+(?:[-\u2013]\d+)+|.*\\l(?:and|or)(?![a-zA-Z]).*",
    re.ASCII | re.DOTALL,
)
_COUNT = re.compile(r"-?[\d.,/]+\s+\(?[A-Za-z][A-Za-z -]{0,80}[A-Za-z]\)?", re.ASCII)
_JOINED = re.compile(r"(?<=[a-zA-Z])-(?=[a-zA-Z])")
_STATEMENTS = words_of("""
    not nor never less more fewer greater least most than minus plus without except half third
    quarter thousand million billion trillion hundred wrong false incorrect untrue squared cubed
    doubled tripled halved percent times and or but either both twice double triple power root
    inverse negative
""")
# A left side that is not parsed, before its value.
_LABELLED = re.compile(
    r"\\(?:gcd|lcm|det|max|min|lim|int|sum|prod|Pr|mathbb\s?\{?P|text\{\s*(?:lcm|gcd))(?![a-zA-Z])"
    r"(?:(?!\\n(?:e|ot|eq|eg)(?![a-zA-Z]))[^=<>~])*=(?P<value>[^=]+)"
)
_NUMERAL = re.compile(r"\s*[-+]?\s*(?:[0-9.]|\\frac)")
_PRIVATE = re.compile(r"(?:\\text|\\mathrm)\s*\{\s*[A-Z][a-z]?\s*\}\s*_")


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of a plainly written number, or None for any other text.

    Integers, decimals, fractions `3/4` and `\frac{3}{4}`, mixed numbers `1 3/4`, powers of ten
    `1e3`, and groups of thousands `1,000`.
    """
    if len(text) > LONGEST_ANSWER or not _NUMERAL.match(text):
        return None
    node = read(text, units=False)
    return exact(node) if node is not None and is_plain_number(node) else None


def normalise(text: str) -> str | None:
    """The text in one spelling, numbers as "42" or "7/4"; None if it is not an answer."""
    spelling = normalise_spelling(text)
    value = None if spelling is None else plain_number(spelling)
    return spelling if value is None else str(value)


class Gold:
    """A gold answer, parsed for comparison.

    Attributes:
        kind: "choice", "words", "text", or the kind of its tree.
        text: the letter of a choice; words or text as they are.
        letters: it has no symbols, so a letter after an answer's number may be a unit.
        nouns: the words after its number.
        lone_letter: its unit is one letter, which the answer must have too.
    """

    def __init__(self, gold: str):
        text = normalise_spelling(gold)
        self.kind, self.text, self.node = "text", gold, Node("text", ())
        self.value: Fraction | None = None
        self.letters, self.lone_letter, self.matrices = False, False, False
        self.nouns: frozenset[str] = frozenset()
        if text is None:
            return
        self.text = text
        if choice := _CHOICE.fullmatch(text):
            self.kind, self.text = "choice", choice[1] or choice[2]
            return
        # In quotes, the text itself is the answer.
        if gold.strip()[0] in "'\"" or _TEXTS.fullmatch(text) or is_formula(text):
            return
        # "5 m" has a unit; without the space, "5m" is a product.
        unit = re.fullmatch(r"-?[0-9./]+ [mgsLhNJVW](?P<rest>/.*)?", text)
        self.lone_letter = unit is not None and unit["rest"] is None
        if _COUNT.fullmatch(text):
            text = _JOINED.sub("", text)  # push-ups
            words = frozenset(re.findall(r"[a-z]{2,}", text.lower()))
            self.nouns = words if words - _STATEMENTS else frozenset()
        units = unit is not None or bool(re.search(r"[0-9}]\s*\\text\s*\{", text))
        node = read(text, units=units, nouns=self.nouns)
        quantity = node is not None and node.kind == "quantity"
        if not quantity and (words := as_words(text)) is not None:
            self.kind, self.text = "words", words
            return
        if node is None:
            return
        infinite = node.kind in EXPRESSIONS and has(node, "infinity") and node not in INFINITE
        if node.kind == "list" or _PRIVATE.search(gold) or infinite:
            return
        value, behind = amount(node)
        if behind is not None and not behind.powers:
            node = value  # its words count nothing: "42 in total"
        if node.kind == "tuple" and INFINITE.intersection(node.args):
            node = as_interval(node)
        self.kind = "expression" if node.kind in EXPRESSIONS else node.kind
        self.node = node
        self.letters = not names(node)
        if self.kind == "expression":
            self.value = exact(node)
            self.matrices = self.value is None and is_of_matrices(node)


# Golds repeat, so they are cached; answers of a model are not.
read_gold = functools.lru_cache(maxsize=4096)(Gold)


def grade_plainly(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    """The verdict if no digits are needed, else the answer and gold that a worker compares."""
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(
            f"a gold answer must be text with a character in it, got {gold!r:.200}. Write numbers "
            "as text (str)"
        )
    try:
        return _judge(answer, read_gold(gold), Same())
    except NeedsDigits:
        text = normalise_spelling(answer or "")
        assert text is not None
        return text, gold


def compare_math(answer: str, gold: str) -> Verdict:
    """Compares two texts in a worker, expressions by their values to many digits."""
    return _judge(answer, read_gold(gold), Same(f"{answer}\0{gold}"))


def only_its_text(gold: str, verdict: Verdict) -> bool:
    """Whether a gold was not parsed at all, so that only the same text matches.

    Args:
        verdict: of the gold against itself.
    """
    return verdict.kind is Kind.TEXT and as_words(gold) is None


# --- by what the gold is --------------------------------------------------------------------------


def _judge(answer: str | None, gold: Gold, same: Same) -> Verdict:
    text = None if answer is None or len(answer) > LONGEST_ANSWER else normalise_spelling(answer)
    if gold.kind == "text":
        if answer is None or len(answer) > LONGEST_ANSWER:
            return _NOTHING
        return _verdict(as_text(text or answer) == as_text(gold.text), Kind.TEXT)
    if text is None:
        return _NOTHING
    bare = without_lead(text)
    bare = _JOINED.sub("", bare) if gold.nouns else bare
    if gold.kind == "choice":
        return _verdict(is_choice(text, gold.text) or is_choice(bare, gold.text), Kind.CHOICE)
    if gold.kind == "words":
        return _verdict(gold.text in (as_words(text), as_words(bare)), Kind.TEXT)
    node = read(bare, units=gold.letters, nouns=gold.nouns)
    if node is None and gold.letters and (labelled := _LABELLED.fullmatch(bare)):
        node = read(labelled["value"], units=True, nouns=gold.nouns)
    if node is None:
        return _NOTHING
    if gold.kind in ("expression", "quantity"):
        return _judge_value(node, gold, same)
    return _verdict(matches_gold(gold.node, node, same), COMPARISONS[gold.kind][1])


_NOTHING = Verdict(Grade.UNPARSABLE, Kind.NONE)


def _verdict(right: bool, kind: Kind) -> Verdict:
    return Verdict(Grade.CORRECT if right else Grade.WRONG, kind)


def _judge_value(answer: Node, gold: Gold, same: Same) -> Verdict:
    """Compares with one expression, with or without a unit; every side of an answer counts."""
    if answer.kind == "members" and len(answer.args) == 1 and gold.kind == "expression":
        return _verdict(False, Kind.SET)
    kind = Kind.MATHEMATICS
    for side in _values(answer, gold):
        value, unit = amount(side)
        if value.kind == "dimensions" and gold.value is not None:
            value = Node("product", value.args)
        if value.kind not in EXPRESSIONS:
            return _verdict(False, kind)
        if exact(value) is not None and gold.letters:
            kind = Kind.NUMBER if kind is not Kind.QUANTITY else kind
        if unit is not None or gold.kind == "quantity":
            kind = Kind.QUANTITY
        if not _same_quantity(value, unit, gold, same):
            return _verdict(False, kind)
    return _verdict(True, kind)


def _values(answer: Node, gold: Gold) -> Sequence[Node]:
    """The sides that give the value; a name or a left side with symbols is skipped."""
    if answer.kind != "equation":
        return [answer]
    first = answer.args[0]
    symbols = gold.letters and first.kind in EXPRESSIONS and names(first)
    return answer.args[1:] if symbols or first.kind in ("symbol", "apply") else answer.args


def _same_quantity(value: Node, unit: Unit | None, gold: Gold, same: Same) -> bool:
    expected, expected_unit = amount(gold.node)
    if expected_unit is not None:
        return _same_amount(value, unit, expected, expected_unit, gold, same)
    if gold.letters and names(value) | names(value, "apply"):
        return False  # a number has no symbols
    if gold.matrices:
        return unit is None and value == expected
    if unit is not None and is_percent(unit):
        # Gold 0.25: 25 % is correct. Gold 25: so is 25 %.
        share = 100 if gold.value is not None and 0 < abs(gold.value) < 1 else 1
        return gold.value is not None and exact(value) == gold.value * share
    if unit is not None and gold.value is None and unit.powers == ((ANGLE, 1),):
        return False
    return same(with_constant(expected, value), value)


def _same_amount(
    value: Node, unit: Unit | None, expected: Node, expected_unit: Unit, gold: Gold, same: Same
) -> bool:
    if is_percent(expected_unit):
        if unit is not None:
            return is_percent(unit) and same(expected, value)
        # Gold 25 %: 25 and 0.25 are correct.
        share = exact(expected)
        return share is not None and exact(value) in (share, share / 100)
    if unit is None:
        # A bare number could be in either unit of "2 hours 30 minutes".
        in_two = COMPOUND in expected_unit.nouns
        return not in_two and not gold.lone_letter and same(expected, value)
    if is_percent(unit) or not same_unit(unit, expected_unit):
        return False
    ratio = unit.size / expected_unit.size
    return same(expected, value if ratio == 1 else Node("product", (value, number(ratio))))


# --- the problem's own words ----------------------------------------------------------------------

_TRAILING = re.compile(
    r"[^a-zA-Z]*[\d}°)$]\s*(?P<words>(?:(?:\\text\{)?[ -]?[A-Za-z]{3,}[ }]*){1,4}\.?)", re.DOTALL
)


def counted_words(answer: str, gold: str, problem: str) -> str:
    """The end of an answer that names what its problem counts: `dozens` of `7 dozens`, or "".

    Args:
        gold: only for a plain number are words removed.
        problem: the question, which must contain each of the words.
    """
    expected = read_gold(gold)
    if expected.kind != "expression" or expected.value is None or len(answer) > LONGEST_ANSWER:
        return ""
    match = _TRAILING.fullmatch(answer.strip())
    if match is None:
        return ""
    words = re.findall(r"[a-z]+", match["words"].replace(r"\text", "").lower())
    known = set(re.findall(r"[a-z]{3,}", problem.lower()))
    known |= {word + "s" for word in known} | {word.removesuffix("s") for word in known}
    counted = [word for word in words if word in known - _STATEMENTS or unit_of_word(word)]
    return match["words"] if words and counted == words else ""


TYPICAL = (
    ("2x + y", "y+2x"),
    (r"\sqrt{117}", r"3\sqrt{13}"),
    (r"( 3, \frac{\pi}{2} )", r"(3, \pi/2)"),
    ("2x - y + 3 = 0", "y = 2x + 3"),
    (r"2 \sin(x) + \log_2 3", r"\log_{2}{3}+2\sin x"),
    (r"e^{2 \pi i / 3}", r"\frac{-1+i\sqrt{3}}{2}"),
)

MATH = Checker(
    name="math",
    version=4,
    packages=("mpmath",),
    plainly=grade_plainly,
    compare="sage_unsloth.grading.mathematics:compare_math",
    typical=TYPICAL,
    counted=counted_words,
)
