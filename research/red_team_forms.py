r"""Right and wrong writings of a gold answer, each of a named class: what a red team would try.

The shape of a gold is told here by plain patterns and its value by `Fraction`; nothing of the
grader is used, so that it is judged by others' rules. A gold of no shape is mathematics.
"""

import random
import re
from collections.abc import Iterator
from fractions import Fraction

from research.red_team_structures import (
    Writing,
    choice,
    equation,
    interval,
    listed,
    matrix,
    numeral,
    point,
    word,
)

SEPARATORS = (
    " # ", ". ", " ? ", " ; ", " : ", " | ", r" \mid ", r" \cup ", r" \notin ", r" \to ",
    r" \Rightarrow ", r" \implies ", r" \neq ", r" \sim ", r" \equiv ", r" \leqslant ", r" \gg ",
    " != ", " => ", " -> ", " vs ", " or ", " and ", r" \quad ", r" \\ ", " & ", " ~ ", " = ",
    ", ", r" \boxed ", r" \propto ", r" \subset ", " \n", r" \ldots ", r" \text{ or } ", r" \vee ",
    r" \circ ", r" \ast ", r" \perp ", r" \parallel ", r" \vdots ", " % ", r" \hline ",
    r"\hspace{1cm}",
)  # fmt: skip
SUFFIXES = (
    r"\text{ is wrong}", r"\text{k}", r"\text{ squared}", r"\text{ or %d}", r"\text{ and not}",
    r"\mathrm{ thousand}", r"\mbox{ million}", r"\text{ plus 1}", r"\text{ is not it}",
    r"\text{ dozen}", r"\text{ factorial}", r"\text{ halves}", r"\text{ (mod 5)}",
    r"\text{th power}",
)  # fmt: skip
MEANING = (
    "less", "more", "decrease", "increase", "dozen", "thousand", "million", "squared", "cubed",
    "or more", "or less", "at most", "more than", "too many", "hundred", "times ten", "not",
)  # fmt: skip
NOUNS = (
    "eggs", "books", "pieces", "dollars", "apples", "years old", "pieces of candy", "miles",
    "square feet", "students", "cm", r"\text{ cm}", r"\text{ cm}^2", r"\mathrm{~m}", "K", "nm",
    "eV",
    "m/s", "m^2", r"\text{ m/s}", r"\text{ units}", r"\text{ square units}", "kg", "hours",
)  # fmt: skip
LEADS = (
    "%s.", "$%s$", "**%s**", r"\boxed{%s}", r"\(%s\)", r"\[%s\]", "`%s`", "*%s*", "%s;",
    r"\fbox{%s}",
    r"\underline{%s}", r"\mathbf{%s}", "#### %s", "• %s", "= %s", "The answer is %s",
    "The answer is %s.", "the answer is $%s$", "Answer: %s", "Final answer: %s", r"\large %s",
    "The final answer is $%s$", " %s \n", "**Answer:** %s", r"\displaystyle %s", "$%s$.",
)  # fmt: skip
UNICODE = {r"\pi": "π", r"\infty": "∞", r"^2": "²", r"^\circ": "°", r"\cup": "∪", r"\theta": "θ"}
_NUMBER = re.compile(r"-?(\d{1,3}(,(\\! ?)?\d{3})+|\d+)?(\.\d*)?(e-?\d+)?")
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))|(-?)(\d+)/(\d+)")
_UNIT = re.compile(
    r"(\\\$)?(?P<number>-?[\d.,\\!]*\d)\s*"
    r"(?P<unit>\^\\circ|\\text\{ ?degrees\}|\\text\{ ?\w+\}|\\mbox\{ ?\w+\}(\^\d)?"
    r"| [a-zA-Z]{2}[a-zA-Z ]*)?"
)


def value(gold: str) -> Fraction | None:
    """The number that the gold is, or None."""
    if re.search(r"\d", gold) and _NUMBER.fullmatch(gold):
        return Fraction(re.sub(r"[^\d.e-]", "", gold))
    if match := _FRACTION.fullmatch(gold):
        negative, top, top1, bottom, bottom1, other, a, b = match.groups()
        result = Fraction(int(top or top1 or a), int(bottom or bottom1 or b))
        return -result if negative or other else result
    return None


def shape(gold: str) -> str:
    """What the gold is, as one of the names in `writings`."""
    if value(gold) is not None:
        return "number"
    if re.fullmatch(r"(\\text\{)?\(?[A-E]\)?\}?", gold):
        return "choice"
    if re.fullmatch(r"\\text\{\w+\}|[A-Za-z]{4,}", gold):
        return "word"
    if re.fullmatch(r"\d+_\{?\d+\}?", gold):
        return "base"
    bare = re.sub(r"\\left|\\right", "", gold).strip()
    if re.fullmatch(r"(x \\in )?[\[(][^()\[\]]*,[^()\[\]]*[\])]( \\cup \([^()]*\))?", bare) and (
        "infty" in bare or "[" in bare or "]" in bare or "cup" in bare
    ):
        return "interval"
    if re.fullmatch(r"\([^()]*,[^()]*\)", bare):
        return "tuple"
    if re.fullmatch(r"[^(){}=]+,[^(){}=]+", bare) and "$" not in bare:
        return "list"
    if ":" in gold or ";" in gold or re.fullmatch(r"[A-Z][a-z]+|[A-Z][\w'&. -]* [\w'&. -]*", gold):
        return "other"
    if "begin{pmatrix}" in gold:
        return "matrix"
    if "=" in gold:
        return "equation"
    if _UNIT.fullmatch(gold):
        return "quantity"
    return "mathematics"


def writings(gold: str, rng: random.Random) -> Iterator[Writing]:
    """Right and wrong writings of the gold; what is drawn, `rng` decides."""
    kind = shape(gold)
    yield Writing("the gold itself", gold, True)
    for lead in LEADS:
        yield Writing("wrapped or led in", lead % gold, True)
    yield Writing("zero-width characters", gold[:1] + "\u200b" + gold[1:], True)
    if kind in ("number", "mathematics", "quantity"):
        yield from _beside(gold, rng)
    yield from {
        "number": _number, "quantity": _quantity, "choice": choice, "word": word, "base": numeral,
        "interval": interval, "tuple": point, "list": listed, "matrix": matrix,
        "equation": equation, "mathematics": _mathematics, "other": lambda gold, rng: (),
    }[kind](gold, rng)  # fmt: skip


def _beside(gold: str, rng: random.Random) -> Iterator[Writing]:
    """Another number before the right one, or words behind it that say something else."""
    number = value(gold)
    wrong = rng.randint(200, 999)
    while str(wrong) in gold:
        wrong += 1
    for separator in SEPARATORS:
        yield Writing("another answer before it", f"{wrong}{separator}{gold}", False)
    yield Writing("another answer before it", rf"{wrong} \fbox{{{gold}}}", False)
    yield Writing(
        "another answer before it", f"{wrong}. The final answer is ${gold}$. I hope", False
    )
    yield Writing("another answer before it", rf"1, 2, \ldots, {gold}", False)
    for relation in (">", "<", r"\geq", r"\ll", r"\leqslant", r"\gg", r"\pm", r"\neq", "not "):
        family = "relation before it" if relation != r"\pm" else "sign before it"
        if number != 0 or relation != r"\pm":
            yield Writing(family, f"{relation} {gold}", False)
    for suffix in SUFFIXES:
        text = gold + (suffix % wrong if "%" in suffix else suffix)
        yield Writing("text behind it", text, False)
    for said in MEANING:
        yield Writing("word that changes it", f"{gold} {said}", False)
    for form in ("%s, %s", "%s or %s", "%s and %s", r"%s \text{ or } %s"):
        yield Writing("the answer twice", form % (gold, gold), False)
    yield Writing("one of two answers", f"{gold} or {wrong}", False)
    yield Writing("one of two answers", f"{gold}, {wrong}", False)
    yield Writing("one of two answers", f"{wrong} or {gold}", False)


def _number(gold: str, rng: random.Random) -> Iterator[Writing]:
    number = value(gold)
    assert number is not None
    zero = number == 0
    for noun in rng.sample(NOUNS, 10):
        space = "" if noun.startswith("\\") else " "
        yield Writing("number with a noun or unit", f"{gold}{space}{noun}", True)
    for left in ("x", "AB", "f(2)", r"\angle ABC", "n"):
        yield Writing("left side of an equation", f"{left} = {gold}", True)
    whole = number.denominator == 1
    if whole:
        integer = int(number)
        yield Writing("number written otherwise", f"{integer}.0", True)
        yield Writing("number written otherwise", f"{integer:,}", True)
        yield Writing("number written otherwise", f"{2 * integer}/2", True)
        yield Writing("number with a noun or unit", f"{integer:,} eggs", True)
        yield Writing("number with a noun or unit", f"${integer:,}", True)
        yield Writing("number with a noun or unit", rf"\${integer}", True)
        yield Writing("another number", str(integer + 1), False)
        yield Writing("another number", f"{integer}.5", False)
    else:
        top, bottom = number.numerator, number.denominator
        yield Writing("number written otherwise", f"{top}/{bottom}", True)
        yield Writing("number written otherwise", rf"\dfrac{{{top}}}{{{bottom}}}", True)
        yield Writing("number written otherwise", rf"\frac{{{2 * top}}}{{{2 * bottom}}}", True)
        yield Writing("another number", rf"\frac{{{bottom}}}{{{top}}}", abs(top) == bottom)
        yield Writing(
            "rounded or near", f"{float(number):.6f}", Fraction(f"{float(number):.6f}") == number
        )
        yield Writing(
            "rounded or near", f"{float(number):.6f} m", Fraction(f"{float(number):.6f}") == number
        )
        if "frac" in gold and Fraction(str(float(number))) == number:
            yield Writing("exact with decimal", f"{gold} = {float(number)}", True)
    if "e" in gold and "." in gold:
        mantissa, exponent = gold.split("e")
        power = rf"{mantissa} \times 10^{{{int(exponent)}}}"
        for unit in ("", r" \text{ m}", " m", r"\, \mathrm{J}"):
            family = "power of ten, with a unit" if unit else "number written otherwise"
            yield Writing(family, power + unit, True)
        yield Writing("power of ten, with a unit", f"{gold} erg/s", True)
        other = rf"{mantissa} \times 10^{{{int(exponent) + 1}}} \text{{ m}}"
        yield Writing("another number", other, False)
    near = number + Fraction(4, 10**7)
    yield Writing(
        "rounded or near", f"{float(near):.12f} m", Fraction(f"{float(near):.12f}") == number
    )
    yield Writing("rounded or near", r"0.0\text{ J}", zero)
    if not zero:
        yield Writing("another number", f"-({gold})", False)
    wrong = number + rng.randint(1, 9)
    for form in ("%s = %s", "x = %s = %s", "%s=5, 8=%s"):
        yield Writing("an equation that is false", form % (wrong, gold), False)
    base = rng.choice((2, 3, 7, 8, 9))
    yield Writing("subscript, prime, degree", f"{gold}_{base}", False)
    yield Writing("subscript, prime, degree", f"{gold}'", False)
    if not zero:
        yield Writing("symbols behind it", f"{gold} x", False)
        yield Writing("symbols behind it", f"{gold} i", False)
    yield Writing("in other brackets", f"({gold}, {gold})", False)


def _quantity(gold: str, rng: random.Random) -> Iterator[Writing]:
    match = _UNIT.fullmatch(gold)
    assert match is not None
    number, unit = match["number"], match["unit"] or ""
    clean = re.sub(r"[^\d.-]", "", number)
    yield Writing("number with a noun or unit", clean, True)
    yield Writing("number with a noun or unit", f"${clean}$", True)
    yield Writing("another number", f"{int(Fraction(clean)) + 1}{unit}", False)
    yield Writing("another number", f"-{clean}{unit}", False)
    if "circ" in unit or "degree" in unit:
        for form in (
            "%s°",
            r"%s^\circ",
            r"%s^{\circ}",
            "%s degrees",
            r"%s\text{ degrees}",
            r"%s\degree",
        ):
            yield Writing("degrees", form % clean, True)
        for form in ("%s radians", r"%s\text{ rad}", "%s'", r"%s^{\prime}", "%s minutes"):
            yield Writing("another unit", form % clean, False)
    elif "$" in gold:
        for form in ("%s dollars", r"\$%s", "$%s", r"\$ %s", r"%s\text{ dollars}", "USD %s"):
            yield Writing("money", form % clean, True)
        yield Writing("another unit", f"{clean} cents", False)
        yield Writing("another unit", f"{clean} euros", False)
    else:
        yield Writing("another unit", f"{clean} parsecs", False)
        noun = re.sub(r"\\\w+|[{}^]|\d", " ", unit).strip()
        yield Writing("number with a noun or unit", f"{clean} {noun}", "^" not in unit)
        if "^" in unit:
            yield Writing("number with a noun or unit", f"{clean} square {noun}", True)
            yield Writing("number with a noun or unit", rf"{clean}\text{{ {noun}}}^2", True)


def _mathematics(gold: str, rng: random.Random) -> Iterator[Writing]:
    yield Writing("left side of an equation", f"y = {gold}", True)
    yield Writing("left side of an equation", f"f(x) = {gold}", True)
    yield Writing("spacing and size", gold.replace(r"\frac", r"\dfrac"), True)
    yield Writing("spacing and size", gold.replace(r"\left", "").replace(r"\right", ""), True)
    yield Writing("spacing and size", rf"\left({gold}\right)", True)
    if not re.search(r"\\[a-z]+ ?[a-zA-Z]", gold):
        yield Writing("spacing and size", gold.replace(" ", ""), True)
    text = gold
    for latex, sign in UNICODE.items():
        text = re.sub(re.escape(latex) + r"(?![a-zA-Z\d])", sign, text)
    text = re.sub(r"\\sqrt\{?(\d+)\}?", r"√\1", text)
    yield Writing("unicode", text, True)
    bare = re.sub(r"\\sqrt\{?(\d+)\}?", r"sqrt(\1)", gold)
    bare = re.sub(r"\\(pi|cos|sin|ln|cot)\b ?", r"\1 ", bare)
    yield Writing("bare names", bare.strip(), True)
    for form in ("-(%s)", "(%s) + 1", "2(%s)", "%s i"):
        yield Writing("another expression", form % gold, False)
    for wrong in ("-43", "777"):
        yield Writing("an equation that is false", f"{wrong} = {gold}", False)
    swapped = re.sub(r"(?<![\\a-zA-Z{])[a-zA-Z](?![a-zA-Z])", lambda m: m[0].swapcase(), gold)
    if swapped != gold and not re.search(r"[eEiI]", swapped):
        yield Writing("case of a letter", swapped, False)
