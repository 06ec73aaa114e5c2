r"""How an answer is written: characters, markup and leads that say nothing about its value.

Every rule here is one of `docs/grading.md`, with a case of what it must not accept.
"""

import functools
import re

from sage_unsloth.grading.checker import LONGEST_ANSWER
from sage_unsloth.grading.extraction import closing_brace

_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "χ": "chi", "ψ": "psi",
    "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda", "Σ": "Sigma",
    "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_CHARACTERS = str.maketrans(
    {letter: rf"\{name} " for letter, name in _GREEK.items()}
    | dict.fromkeys("\u2212\u2013\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003", " ")  # no-break and other spaces
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad")  # of no width: nobody sees them
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # of full width
    | {
        "×": r"\times ",
        "·": r"\cdot ",
        "⋅": r"\cdot ",
        "÷": r"\div ",
        "∞": r"\infty ",
        "±": r"\pm ",
    }
    | {"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap "}
    | {
        "∈": r"\in ",
        "°": r"^\circ ",
        "′": "'",
        "’": "'",
        "‘": "'",
        "“": '"',
        "”": '"',
        "µ": r"\mu ",
    }
    | {"¼": r"\frac{1}{4}", "½": r"\frac{1}{2}", "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}"}
    | {
        "⅔": r"\frac{2}{3}",
        "⅕": r"\frac{1}{5}",
        "⅛": r"\frac{1}{8}",
        "ħ": r"\hbar ",
        "…": r"\ldots ",
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# Each in turn; what is behind is the same mathematics in one spelling.
_SPELLINGS = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\\!\s*", ""),
        (r"\{,\}", ","),
        (r"\\(?:left|right)\.", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|textstyle|[lL]arge|LARGE|huge|small|bf|rm)(?![a-zA-Z])", ""),
        (r"\\([lr])brace(?![a-zA-Z])", lambda m: r"\{" if m[1] == "l" else r"\}"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leqslant|leq|le)(?![a-zA-Z])|<=", r"\\le "),
        (r"\\(?:geqslant|geq|ge)(?![a-zA-Z])|>=", r"\\ge "),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=", r"\\ne "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:imath|jmath)(?![a-zA-Z])", "i"),
        (r"\\var(epsilon|theta|phi|rho|sigma|pi|kappa)(?![a-zA-Z])", r"\\\1"),
        (r"\\degree(?![a-zA-Z])|\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*((?:\\prime\s*)+)\}", lambda m: "'" * m[1].count("prime")),
        (r"\^\s*\\prime(?![a-zA-Z])", "'"),
        (r"\\(?:text(?:bf|rm|it|normal)|mbox|math(?:rm|bf|it)|bm|boldsymbol)\s*\{", r"\\text{"),
        (r"\\operatorname\*?\s*\{", r"\\text{"),
        (r"\\text\s+\{", r"\\text{"),
        (r"\\text\{[\s~]*\}", ""),
        (r"\\text\{\s*([a-zA-Z])\s*\}", r" \1 "),
        (r"\\text\{[\s,]*(and|or)[\s,]*\}", r" \1 "),
        (r"\\(?:quad|qquad|hspace\{[^{}]*\})(?![a-zA-Z])|(?<!\\)\\[,;: ]|(?<!\\)~", " "),
        (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}"),
        (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}"),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"√\s*(?=[({])", r"\\sqrt"),
        (r"\s+", " "),
    )
]  # fmt: skip
_DIGITS = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")  # most answers: nothing here changes them
# A command around the whole, and marks around it: each with one group, the text inside.
_AROUND = re.compile(
    r"\\(?:boxed|fbox|underline|mathbf|textbf|boldsymbol|bm|mathrm|text(?=\s*\{[^{}]*\d))\s*(?=\{)"
)
_MARKS = re.compile(
    r"\*\*((?:[^*]|\*(?!\*))+)\*\*|\*(?!\*)(.+)(?<!\*)\*|`([^`]+)`|\$\$?([^$]*)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]"
    r"|(?:\#{1,4}|•|=)\s*(.*)|(.*[^.;,\s])(?<!\\left)(?<!\\right)\s*[.;,]",
    re.DOTALL,
)
_LEAD = re.compile(
    r"(?:\*\*)?(?:so|thus|hence|therefore)?,?\s*(?:the\s+)?(?:(?:final|correct)\s+)?answer(?:\*\*)?\s*"
    r"(?:is\b\s*:?|:|=)(?:\*\*)?\s*",
    re.IGNORECASE,
)


def unwrap(text: str) -> str:
    """The text without what people put around an answer: dollars, bold, a box, a lead, a stop."""
    text = text.strip()
    while True:
        inner = text
        if (around := _AROUND.match(text)) and closing_brace(text, around.end()) == len(text) - 1:
            inner = text[around.end() + 1 : -1]
        elif match := _MARKS.fullmatch(text):
            inner = next(group for group in match.groups() if group is not None)
        elif lead := _LEAD.match(text):
            inner = text[lead.end() :]
        elif text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            inner = text[1:-1]
        if inner.strip() == text:
            return text
        text = inner.strip()


def spelled(text: str) -> str | None:
    """The text in one spelling, without markup; None if it is empty, too long, or unbalanced."""
    if len(text) > LONGEST_ANSWER:
        return None
    if _DIGITS.fullmatch(text):
        return text
    text = unwrap(text.translate(_CHARACTERS))
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = unwrap(text)
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    elif re.match(r"-?\$\s*[\d.]", text):
        text = text.replace("$", r"\$", 1)
    # A brace too many would close the box around the text; an inner box would be graded alone.
    balanced = closing_brace("{" + text + "}", 0) == len(text) + 1
    if not text.strip() or not balanced or re.search(r"\\f?box(?:ed)?(?![a-zA-Z])", text):
        return None
    return text.strip()


@functools.lru_cache(maxsize=1024)  # golds come again and again
def as_words(text: str) -> str | None:
    r"""The words that the text is, in lower case and without an article; None if it is none.

    Letters, hyphens, apostrophes and spaces, in `\text{}` or bare; bare, one of at least three.
    """
    inside = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    inside = re.sub(r"""["“”]|(?<![a-z])'|'(?![a-z])""", " ", inside)
    words = inside.lower().split()
    if not words or not all(re.fullmatch(r"[^\W\d_]+(?:['-][^\W\d_]+)*", word) for word in words):
        return None
    if r"\text" not in text and max(map(len, words)) < 3 and words[-1] not in ("no", "up"):
        return None
    if len(words) > 1 and words[0] in ("a", "an", "the"):
        words = words[1:]
    return " ".join(words)
