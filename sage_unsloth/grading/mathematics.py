"""Answers in mathematics: numbers compared exactly, everything else by math-verify in a worker."""

import functools
import re
from fractions import Fraction

from sage_unsloth.grading.checker import LONGEST_ANSWER, Checker, Grade, Kind, Verdict
from sage_unsloth.grading.extraction import closing_brace

# Each rule of normalising has tests of what it must not accept.
_CHARACTERS = str.maketrans(
    {"\u2212": "-", "\u2013": "-", "\uff0d": "-", "\u00d7": r"\times "}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")  # no-break and thin spaces
)
# Bold, dollars, a box, a full stop: each with one group, the text inside.
_WRAPPER = re.compile(
    r"\*\*([^*]*)\*\*|\$\$?([^$]*)\$\$?|\\boxed\{([^{}]*)\}|(.*[^.])(?<!\\right)\.", re.DOTALL
)
_PLAIN_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)\s*
    (?: (?:(?P<whole>\d+)\s+)?(?P<top>[1-9]\d*)\s*/\s*(?P<bottom>\d+)
      | \\[dt]?frac\s*(?P<over>\{\s*-?\d+\s*\}|\d)\s*(?P<under>\{\s*\d+\s*\}|\d)
      | (?P<digits>[1-9]\d{0,2}(?:(?P<sep>,|\ |\{,\}|,\\!|\\,)\d{3})(?:(?P=sep)\d{3})*|\d+|(?=\.\d))
        (?:\.(?P<decimals>\d*))?
        (?:(?:e|\s*\\(?:times|cdot)\s*10\^\{?)(?P<exponent>[+-]?\d{1,3})\}?)?
    )
    (?:\s+(?:dollars?|points?|people|grams?|weeks?))?  # units that math-verify 0.9 does not know
    """,
    re.VERBOSE | re.IGNORECASE,
)
# In answer to a plain number; math-verify reads "43 = 42", "> 42", "42 \text{ thousand}" as 42.
_NOT_THE_NUMBER = re.compile(
    r"[=<>≈≠≤≥]|\\(?:[lg]t|[lg]eq?|neq?|approx|sim)(?![a-zA-Z])"
    r"|\b(?:hundred|thousand|million|billion|trillion|dozen)s?\b"
)


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of a plainly written number, or None for any other text.

    Integers, decimals, fractions `3/4` and `\frac{3}{4}`, mixed numbers `1 3/4`, powers of ten
    `1e3`, and whole groups of thousands `1,000`.
    """
    match = _PLAIN_NUMBER.fullmatch(text) if len(text) <= LONGEST_ANSWER else None
    if match is None:
        return None
    if match["top"]:
        top, bottom = int(match["top"]), int(match["bottom"])
        if bottom == 0 or (match["whole"] and top >= bottom):  # "1 234/5" may mean 1234/5
            return None
        value = Fraction(top, bottom) + int(match["whole"] or 0)
    elif match["over"]:
        top, bottom = (int(match[name].strip("{}")) for name in ("over", "under"))
        if bottom == 0:
            return None
        value = Fraction(top, bottom)
    else:
        digits, decimals = re.sub(r"\D", "", match["digits"]), match["decimals"] or ""
        exponent = int(match["exponent"] or 0) - len(decimals)
        value = int(digits + decimals) * Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value


def unwrap(text: str) -> str:
    """The text without what people put around an answer: dollars, bold, a box, a full stop."""
    text = text.strip()
    while match := _WRAPPER.fullmatch(text):  # they nest: **$42$.**
        text = next(group for group in match.groups() if group is not None).strip()
    return text


def normalise(text: str) -> str | None:
    """The form in which `text` is compared, numbers as "42" or "7/4"; None if it is no answer."""
    if len(text) > LONGEST_ANSWER:
        return None
    text = unwrap(text.translate(_CHARACTERS))
    # A brace too many would close the box around the text; an inner box would be graded alone.
    balanced = closing_brace("{" + text + "}", 0) == len(text) + 1
    if not text or not balanced or r"\boxed" in text:
        return None
    number = plain_number(text)
    return text if number is None else str(number)


def grade_plainly(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    """The verdict where it takes no algebra, else the answer and gold that a worker compares."""
    normal_gold = normalise(gold) if isinstance(gold, str) else None
    if normal_gold is None:
        raise ValueError(
            f"a gold answer must be 1 to {LONGEST_ANSWER} characters of text with balanced braces "
            f"and no inner box; got {gold!r:.200}; drop or repair the row"
        )
    normal_answer = None if answer is None else normalise(answer)
    if normal_answer is None:
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    if plain_number(normal_gold) is not None:
        if plain_number(normal_answer) is not None:
            same = normal_answer == normal_gold
            return Verdict(Grade.CORRECT if same else Grade.WRONG, Kind.NUMBER)
        normal_answer = re.sub(r"^[a-zA-Z]\s*=\s*", "", normal_answer)  # "x = 42" states 42
        if _NOT_THE_NUMBER.search(normal_answer):
            return Verdict(Grade.WRONG, Kind.MATHEMATICS)
    return normal_answer, normal_gold


def _parse(text: str) -> tuple:
    r"""What math-verify finds in `\boxed{text}`, in a worker."""
    from math_verify import parse

    # None turns off its signals, which work on the main thread alone; its annotation says int.
    return tuple(parse(rf"\boxed{{{text}}}", parsing_timeout=None))  # pyright: ignore[reportArgumentType]


# Golds come again and again; what a model writes is not kept.
_parse_gold = functools.lru_cache(maxsize=1024)(_parse)


def compare_math(answer: str, gold: str) -> Verdict | None:
    """Compares two normalised texts by math-verify, in a worker; None if the gold does not parse.

    A comparison that math-verify gives up on is WRONG: from outside, its failures look like False.
    """
    from math_verify import verify

    parsed_gold, parsed_answer = list(_parse_gold(gold)), list(_parse(answer))
    if not _is_understood(parsed_gold):
        return None
    if not _is_understood(parsed_answer):
        return Verdict(Grade.UNPARSABLE, Kind.NONE)
    same = verify(parsed_gold, parsed_answer, timeout_seconds=None)
    return Verdict(Grade.CORRECT if same else Grade.WRONG, Kind.MATHEMATICS)


def _is_understood(parsed: list) -> bool:
    """Beside what it understood, parse returns the text; the text alone is a failure to parse."""
    return any(not isinstance(found, str) for found in parsed)


TYPICAL = (
    ("2x + y", "y+2x"),
    (r"\sqrt{117}", r"3\sqrt{13}"),
    (r"\frac{1 + \sqrt{3}}{2}", r"\frac{\sqrt{3}+1}{2}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    ("(x-1)(x-2)^2", "x^3-5x^2+8x-4"),
    (r"\{1, 2\}", r"\{2,1\}"),
    (r"(-\infty, 0) \cup [2, 5]", r"(-\infty,0)\cup[2,5]"),
    ("x = 5, y = 3", "3"),
    ("1 < x", "x>1"),
    (r"\frac{270}{7}\text{ degrees}", r"270/7^\circ"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"2 \sin(x) + \log_2 3", r"\log_{2}{3}+2\sin x"),
    (r"e^{2 \pi i / 3}", "1+2i"),
    (r"25\%", r"\text{east}"),
)

MATH = Checker(
    name="math",
    version=2,
    packages=("math-verify",),
    plainly=grade_plainly,
    compare="sage_unsloth.grading.mathematics:compare_math",
    typical=TYPICAL,
)
