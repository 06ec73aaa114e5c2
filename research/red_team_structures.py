r"""Right and wrong writings of golds that are no number: choices, words, sets, intervals and so on.

Part of `red_team_forms`.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Writing:
    """An answer as somebody may write it, its class, and whether it is right."""

    family: str
    text: str
    right: bool


def choice(gold: str, rng: random.Random) -> Iterator[Writing]:
    """The letter of an option."""
    letter = re.sub(r"\\text|[^A-E]", "", gold)
    other = rng.choice([c for c in "ABCDE" if c != letter])
    for form in ("%s", "(%s)", "%s)", "%s.", "Option %s", r"\text{%s}", r"\textbf{(%s)}", "(%s) 42",
                 r"\text{(%s)}", r"\mathbf{%s}", r"(%s)\ 6", "option (%s)", "[%s]",
                 "Choice %s"):  # fmt: skip
        yield Writing("choice", form % letter, True)
    for form in ("{b}", "({b})", "{b}={a}", r"{a}\text{{ or {b}}}", "{a} or {b}", "({b})({a})",
                 "{b}, {a}", "not {a}", "{b}{a}", "{a}{b}", "{a}, {b}", "({a}) or ({b})",
                 "{a} + {b}",
                 "{a}{a}", "({b}) {a}", "{a} is wrong", "{b}. {a}"):  # fmt: skip
        yield Writing("another choice, or several", form.format(a=letter, b=other), False)


def word(gold: str, rng: random.Random) -> Iterator[Writing]:
    """A word or a name."""
    name = re.sub(r"\\text\{|\}", "", gold)
    for form in ("%s", r"\text{%s}", r"\textbf{%s}", r"\mathrm{%s}", "%s.", '"%s"', r"\text{ %s }"):
        yield Writing("word", form % name, True)
    yield Writing("word", name.capitalize(), True)
    yield Writing("word", name.upper(), True)
    article = "an" if name[0].lower() in "aeiou" else "a"
    yield Writing("word", f"{article} {name}", True)
    yield Writing("word", f"the {name}", True)
    letters = list(name)
    while "".join(letters).lower() == name.lower():
        rng.shuffle(letters)
    mixed = "".join(letters)
    for text in (name[::-1], mixed, rf"\text{{{mixed}}}", rf"\text{{{name[::-1]}}}", name[:-1]):
        yield Writing("letters in another order", text, text.lower() == name.lower())
    for form in ("not %s", "%s or west", "%s and Bob", r"\text{%s or other}", "other %s", "%s %s",
                 "non%s",
                 "%s is wrong", "west, %s", r"\text{west} = \text{%s}", "%s, west"):  # fmt: skip
        text = form % ((name,) * form.count("%s"))
        yield Writing("another word beside it", text, False)


def numeral(gold: str, rng: random.Random) -> Iterator[Writing]:
    """A number in a base."""
    digits, base = re.sub(r"[{}]", "", gold).split("_")
    for form in ("%s_%s", "%s_{%s}", "(%s)_%s", "%s base %s", r"%s_{\text{%s}}",
                 r"%s \text{ base } %s",
                 "(%s)_{%s}", "%s (base %s)", "%s in base %s"):  # fmt: skip
        yield Writing("base", form % (digits, base), True)
    for other in (7, 8, 9, 10, 16):
        if str(other) != base:
            yield Writing("another base, or none", f"{digits}_{other}", False)
            yield Writing("another base, or none", f"{digits}_{{{other}}}", False)
    yield Writing("another base, or none", digits, False)
    yield Writing("another number", f"{int(digits) + 1}_{base}", False)
    yield Writing("another number", str(int(digits, int(base))), False)


def _parts(gold: str) -> tuple[str, list[str], str]:
    bare = re.sub(r"\\left|\\right", "", gold).strip()
    return bare[0], [part.strip() for part in bare[1:-1].split(",")], bare[-1]


def interval(gold: str, rng: random.Random) -> Iterator[Writing]:
    """An interval, or two united."""
    bare = re.sub(r"x \\in |\\left|\\right", "", gold).strip()
    yield Writing("interval", rf"x \in {bare}", True)
    yield Writing("interval", bare.replace(" ", ""), True)
    yield Writing("interval", bare.replace(r"\infty", "∞"), True)
    if "cup" in bare:
        first, second = bare.split(r" \cup ")
        yield Writing("interval", rf"{second} \cup {first}", True)
        yield Writing("part of a set", first, False)
        yield Writing("part of a set", second, False)
        yield Writing("brackets or ends changed", bare.replace("(", "[", 1), False)
        yield Writing("brackets or ends changed", rf"{first} \cap {second}", False)
        return
    opening, (low, high), closing = _parts(bare)
    relations = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}
    if low == r"-\infty":
        given, ascii_told = (
            f"x {relations[closing]} {high}",
            f"x {'<' if closing == ')' else '<='} {high}",
        )
    elif high == r"\infty":
        sign = ">" if opening == "(" else r"\ge"
        given, ascii_told = f"x {sign} {low}", f"x {sign.replace(chr(92) + 'ge', '>=')} {low}"
    else:
        given = f"{low} {relations[opening]} x {relations[closing]} {high}"
        ascii_told = given.replace(r"\le", "<=")
    yield Writing("interval as an inequality", given, True)
    yield Writing("interval as an inequality", ascii_told, True)
    yield Writing("interval as an inequality", f"${given}$", True)
    flipped = {"(": "[", "[": "(", ")": "]", "]": ")"}
    yield Writing("brackets or ends changed", f"{flipped[opening]}{low}, {high}{closing}", False)
    yield Writing("brackets or ends changed", f"{opening}{low}, {high}{flipped[closing]}", False)
    yield Writing("brackets or ends changed", f"{opening}{high}, {low}{closing}", False)
    yield Writing("brackets or ends changed", rf"\{{{low}, {high}\}}", False)
    yield Writing("brackets or ends changed", f"{low}, {high}", False)
    yield Writing("an equation that is false", f"9={low}, 8={high}", False)
    yield Writing("one of two answers", f"{bare} or (0, 1)", False)


def point(gold: str, rng: random.Random) -> Iterator[Writing]:
    """A tuple, in order."""
    _, parts, _ = _parts(gold)
    inner = ", ".join(parts)
    for form in (
        r"\left(%s\right)",
        "(%s)",
        r"\left( %s \right)",
        r"\langle %s \rangle",
        r"\bigl(%s\bigr)",
    ):
        yield Writing("tuple", form % inner, True)
    yield Writing("tuple", "(" + ",".join(parts) + ")", True)
    swapped = ", ".join(reversed(parts))
    if swapped != inner and parts[0] not in ("-" + parts[1], r"-\sqrt{3}"):
        for form in ("(%s)", r"\left(%s\right)"):
            yield Writing("order changed", form % swapped, False)
    for form in (r"\{%s\}", "[%s]", "%s", r"(%s]", r"[%s)"):
        yield Writing("brackets or ends changed", form % inner, False)
    yield Writing("elements changed", f"({inner}, {parts[-1]})", False)
    yield Writing("elements changed", "(" + ", ".join([*parts[:-1], parts[-1] + "+1"]) + ")", False)
    yield Writing("an equation that is false", ", ".join(f"9={p}" for p in parts), False)
    yield Writing("one of two answers", f"({inner}) or (0, 1)", False)


def listed(gold: str, rng: random.Random) -> Iterator[Writing]:
    """A list without order."""
    parts = [part.strip() for part in gold.split(",")]
    turned = parts[1:] + parts[:1]
    for form in ("%s", r"\{%s\}", r"\left\{%s\right\}", "$%s$"):
        yield Writing("set", form % ", ".join(turned), True)
        yield Writing("set", form % ", ".join(parts), True)
    yield Writing("set", " and ".join(turned), True)
    yield Writing("set", ", ".join(turned[:-1]) + f" and {turned[-1]}", True)
    yield Writing("set", ", ".join(turned[:-1]) + rf"\text{{ and }}{turned[-1]}", True)
    yield Writing("set", ", ".join(f"x = {part}" for part in turned), True)
    if len(parts) == 2:
        yield Writing("set", f"x = {parts[0]} or x = {parts[1]}", True)
    yield Writing("the answer twice", ", ".join([*parts, parts[0]]), False)
    yield Writing("the answer twice", rf"\{{{', '.join([*parts, parts[-1]])}\}}", False)
    yield Writing("brackets or ends changed", f"({', '.join(turned)})", False)
    yield Writing("brackets or ends changed", f"[{', '.join(parts)}]", False)
    yield Writing("elements changed", ", ".join(parts[:-1]), False)
    yield Writing("elements changed", ", ".join([*parts, "77"]), False)
    yield Writing("elements changed", ", ".join([*parts[:-1], parts[-1] + "+1"]), False)
    yield Writing("an equation that is false", ", ".join(f"9={part}" for part in parts), False)


def matrix(gold: str, rng: random.Random) -> Iterator[Writing]:
    """A matrix or a column."""
    yield Writing("matrix in other brackets", gold.replace("pmatrix", "bmatrix"), True)
    yield Writing(
        "matrix in other brackets", rf"\left[{gold.replace('pmatrix', 'matrix')}\right]", True
    )
    inner = gold.replace(r"\begin{pmatrix}", "").replace(r"\end{pmatrix}", "")
    rows = [row.strip() for row in inner.split(r"\\")]
    if "&" not in inner:
        for form in ("(%s)", r"\langle %s \rangle", r"\left( %s \right)"):
            yield Writing("matrix in other brackets", form % ", ".join(rows), True)
        yield Writing("order changed", f"({', '.join(rows[::-1])})", rows == rows[::-1])
        yield Writing("brackets or ends changed", rf"\{{{', '.join(rows)}\}}", False)
    turned = rows[1:] + rows[:1]
    text = r"\begin{pmatrix} " + r" \\ ".join(turned) + r" \end{pmatrix}"
    yield Writing("order changed", text, turned == rows)
    text = r"\begin{pmatrix} " + r" \\ ".join([*rows, rows[0]]) + r" \end{pmatrix}"
    yield Writing("elements changed", text, False)
    text = r"\begin{pmatrix} " + r" \\ ".join([*rows[:-1], rows[-1] + "1"]) + r" \end{pmatrix}"
    yield Writing("elements changed", text, False)


def equation(gold: str, rng: random.Random) -> Iterator[Writing]:
    """An equation."""
    left, _, right = gold.partition("=")
    yield Writing("equation", f"{right.strip()} = {left.strip()}", True)
    yield Writing("equation", gold.replace(" ", "") if "\\" not in gold else gold, True)
    symbol = re.fullmatch(r"[a-zA-Z](_\{?\w\}?)?", left.strip())
    if symbol:
        yield Writing("equation", right.strip(), True)
    yield Writing("another equation", f"{left} = {right} + 1", False)
    yield Writing("another equation", f"{left} = 0", right.strip() == "0")
    yield Writing("another equation", f"{left} = 7", False)
    yield Writing("another equation", f"0 = 0, {gold}", False)
    yield Writing("another equation", "1 = 1", False)
    yield Writing("another equation", f"{left} > {right}", False)
    yield Writing("another equation", f"9 = {right}", False)
    if left.strip() != right.strip():
        yield Writing("another equation", f"{left.strip()} = {left.strip()}", False)
    yield Writing("the answer twice", f"{gold}, {gold}", False)
