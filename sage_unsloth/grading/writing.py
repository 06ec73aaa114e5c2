"""Spelling of answers: characters, markup and leads that do not change the value.

Every rule is in `docs/grading.md`, with a case that it must not accept.
"""

import functools
import re
import unicodedata

from sage_unsloth.grading.checker import LONGEST_ANSWER
from sage_unsloth.grading.extraction import closing_brace
from sage_unsloth.grading.units import words_of

MAX_MARKUP_DEPTH = 12  # of markup around an answer
MOST_BRACES = 200

_GREEK_NAMES = """
    alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi pi rho sigma tau phi
    chi psi omega Gamma Delta Theta Lambda Sigma Phi Psi Omega
"""
_GREEK = dict(zip("αβγδεζηθκλμνξπρστφχψωΓΔΘΛΣΦΨΩ", _GREEK_NAMES.split(), strict=True))
_LATEX = {
    "×": "times", "·": "cdot", "⋅": "cdot", "÷": "div", "∞": "infty", "±": "pm", "∓": "mp",
    "≤": "le", "≥": "ge", "≠": "ne", "≈": "approx", "∪": "cup", "∩": "cap", "∈": "in",
    "∖": "setminus", "∅": "emptyset", "µ": "mu", "ħ": "hbar", "…": "ldots",
    "ℝ": "mathbb{R}", "ℤ": "mathbb{Z}", "ℕ": "mathbb{N}", "ℚ": "mathbb{Q}", "ℂ": "mathbb{C}",
    "∣": "mid", "⇒": "Rightarrow", "∨": "lor", "≡": "equiv",
}  # fmt: skip
_FRACTIONS = {
    character: r"\frac{{{}}}{{{}}}".format(
        *unicodedata.normalize("NFKC", character).split("\u2044")
    )
    for character in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
}
_CHARACTERS = str.maketrans(
    {letter: rf"\{name} " for letter, name in (_GREEK | _LATEX).items()}
    | _FRACTIONS
    | dict.fromkeys("\u2212\u2013\u2010\u2011", "-")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003", " ")  # no-break and other spaces
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad")  # of no width: nobody sees them
    | {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}  # of full width
    | {"°": r"^\circ ", "º": r"^\circ ", "′": "'", "’": "'", "‘": "'", "″": '"', "“": '"', "”": '"'}
    | {"∴": "", "\u2044": "/"}
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
# Commands without a meaning, and synonyms of others.
_NOTHING = words_of("""
    left right middle big Big bigg Bigg bigl bigr bigm Bigl Bigr Bigm biggl biggr
    biggm Biggl Biggr Biggm
    displaystyle textstyle large Large LARGE huge small bf rm
""")
_COMMANDS = dict.fromkeys(_NOTHING, "") | {
    "cr": r"\\", "colon": ":", "lbrace": r"\{", "rbrace": r"\}", "langle": "(", "rangle": ")",
    "vert": "|", "lvert": "|", "rvert": "|", "dfrac": r"\frac", "tfrac": r"\frac",
    "cfrac": r"\frac", "nicefrac": r"\frac", "sfrac": r"\frac", "dbinom": r"\binom",
    "tbinom": r"\binom", "leqslant": r"\le ", "leqq": r"\le ", "leq": r"\le ",
    "le": r"\le ", "ge": r"\ge ", "ne": r"\ne ",
    "geqslant": r"\ge ", "geqq": r"\ge ", "geq": r"\ge ", "neq": r"\ne ", "lt": "<", "gt": ">",
    "imath": "i", "jmath": "i", "varnothing": r"\emptyset ", "empty": r"\emptyset ",
    "varepsilon": r"\epsilon", "vartheta": r"\theta", "varphi": r"\phi", "varrho": r"\rho",
    "varsigma": r"\sigma", "varpi": r"\pi", "varkappa": r"\kappa", "degree": r"^\circ ",
    "textdegree": r"^\circ ", "quad": " ", "qquad": " ",
}  # fmt: skip


def _command(match: re.Match[str]) -> str:
    return _COMMANDS.get(match[1], match[0])


# Applied in order; the result is the same mathematics in one spelling.
_SPELLINGS = [
    (re.compile(pattern, re.ASCII), new)
    for pattern, new in (
        (r"(?<=\d)(?:\{,\}|\\,|\\!,?|,\\!)\s?(?=\d{3}(?!\d))", ""),  # 1{,}000
        (r"\\!|\{\s*\}|\\(?:left|right)\.", ""),
        (r"\\\\\[[\d.]+[a-z]+\]", r"\\\\"),
        (r"\\([a-zA-Z]+)", _command),
        (r"\{:\}|\\text\{\s*:\s*\}", ":"),
        (r"\+/-|plus or minus", r"\\pm "),
        (r"(?<!\d)\.(?=\\(?:overline|bar))", "0."),
        (r"\^\s*\{?\s*(?:\\text\{\s*o\s*\}|o(?![a-zA-Z]))\s*\}?", r"^\\circ "),
        (r"per cent\b", "percent"),
        (r"∛\s*(\d+)", r"\\sqrt[3]{\1}"),
        (r"\{,\}", ","),
        ("<=", r"\\le "),
        (">=", r"\\ge "),
        ("!=", r"\\ne "),
        (r"\\mathbb\s*(?:\{\s*([RZNQC])\s*\}|([RZNQC])(?![a-zA-Z]))", r"\\mathbb\1\2 "),
        (r"\^\s*\{\s*(?:\^\s*)?\\circ\s*\}|\^\s*(?:\^\s*)?\\circ(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*((?:\\prime\s*)+)\}", lambda m: "'" * m[1].count("prime")),
        (r"\^\s*\\prime(?![a-zA-Z])", "'"),
        (r"\\(?:mathbf|bm|boldsymbol)\s*\{\s*([a-zA-Z])\s*\}", r"\\vec{\1}"),
        (
            r"\\(?:text(?:bf|rm|it|sf|normal)|mbox|math(?:rm|bf|it|sf)|bm|boldsymbol"
            r"|operatorname\*?|text(?=\s))\s*\{",
            r"\\text{",
        ),
        (r"\\text\{[\s~]*\}", ""),
        (r"\\text\{\s*([ei])\s*\}", r" \1 "),
        (r"(?<![a-zA-Z])(?:np|math)\.(?=[a-z])", ""),
        (r"\\hspace\{[^{}]*\}|(?<!\\)\\[,;: ]|(?<!\\)~", " "),
        (r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda m: "^{" + m[0].translate(_SUPERSCRIPTS) + "}"),
        (r"[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + m[0].translate(_SUBSCRIPTS) + "}"),
        (r"(?:\d\u0305)+", lambda m: r"\overline{" + m[0].replace("\u0305", "") + "}"),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"√\s*(?=[({])", r"\\sqrt"),
    )
]
_SPACES = re.compile(r"\s+")
_DIGITS = re.compile(r"-?[0-9]{1,300}(?:\.[0-9]{1,300})?")  # most answers: nothing changes them
# A command around the whole, and marks around it: each with one group, the text inside.
_AROUND = re.compile(
    r"\\(?:boxed|fbox|underline|emph|mathbf|textbf|boldsymbol|bm|mathrm|text(?=\s*\{[^{}]*\d))\s*(?=\{)"
)
_MARKS = re.compile(
    r"\*\*\*([^*]+)\*\*\*|'([^']*)'|\*\*((?:[^*]|\*(?!\*))+)\*\*|\*(?!\*)(.+)(?<!\*)\*|__([^_]+)__|_([^_{]+)_|`([^`]+)`"
    r"|\$\$?([^$]*)\$\$?|\\\((.*)\\\)|\\\[(.*)\\\]|\"([^\"]*)\""
    r"|<(?:b|i|em|strong|u|p|answer)>([^<>]*)</(?:b|i|em|strong|u|p|answer)>"
    r"|(?:\#{1,4}|•|=)\s*(.*)|(.*[^.;,\s])(?<!\\left)(?<!\\right)\s*[.;,]"
    r"|(.*\S)\s*(?:\\\\|\\[,;:! ]?|[.,]\s*I hope it is correct\.?|✅"
    r"|\\(?:blacksquare|square|checkmark|qed|Box)|\(exact(?:ly)?\)|✓|∎|■)",
    re.DOTALL,
)
_LEAD = re.compile(
    r"(?:\*\*)?(?:(?:so|thus|hence|therefore|then)\b,?\s*)?"
    r"(?:(?:the\s+)?(?:(?:final|correct)\s+)?(?:answer|result|solution)(?:\*\*)?\s*"
    r"(?:is\b\s*:?|:|=|(?=[-\d$]))(?:\*\*)?\s*|(?<=[a-z,]\s))",
    re.IGNORECASE | re.ASCII,
)


def unwrap(text: str) -> str:
    """The text without dollars, bold, a box, a lead or a full stop around it."""
    text = text.strip()
    for _ in range(MAX_MARKUP_DEPTH):
        inner = text
        if (around := _AROUND.match(text)) and closing_brace(text, around.end()) == len(text) - 1:
            inner = text[around.end() + 1 : -1]
        elif match := _MARKS.fullmatch(text):
            inner = next(group for group in match.groups() if group is not None)
        elif (lead := _LEAD.match(text)) and lead.end():
            inner = text[lead.end() :]
        elif text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            inner = text[1:-1]
        if inner.strip() == text:
            return text
        text = inner.strip()
    return text


def normalise_spelling(text: str) -> str | None:
    """The text in one spelling, without markup; None if empty, too long or unbalanced."""
    # "~~7~~" is struck out, "~7" is about 7: neither states 7.
    struck = "~~" in text or text.lstrip().startswith("~")
    if len(text) > LONGEST_ANSWER or text.count("{") > MOST_BRACES or struck:
        return None
    if _DIGITS.fullmatch(text):
        return text
    if not text.isascii():
        text = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)
    text = unwrap(_SPACES.sub(" ", text.translate(_CHARACTERS)))
    for pattern, new in _SPELLINGS:
        text = pattern.sub(new, text)
    text = unwrap(_SPACES.sub(" ", text))
    # An odd dollar sign is a currency.
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text)
    # A brace too many would close the box around the text; an inner box would be graded alone.
    balanced = closing_brace("{" + text + "}", 0) == len(text) + 1
    if not text.strip() or not balanced or re.search(r"\\f?box(?:ed)?(?![a-zA-Z])", text):
        return None
    return text.strip()


_LEADS = words_of("""
    so thus hence therefore then now we get have obtain find there it he she they this that
    the a an of final correct exact total answer answers ans result solution solutions set
    value values point points vertex center centre coordinates equation polynomial line
    function graph number ways area perimeter volume probability ratio sum difference product
    average mean median slope distance length angle remainder option choice day exactly only
    simply just precisely in equal equals to is are be was will on cost price time both
""")
_BEGINNING = re.compile(
    r"\\(?:therefore|implies|Rightarrow)(?![a-zA-Z])\s*"
    r"|(?:\\text\{\s*)?(?P<word>[A-Za-z]{2,}|a(?= [a-z]))\b,?(?!\s*\}?\s*[=^_'])\s*:?\s*\}?\s*"
)


def without_lead(text: str) -> str:
    """An answer without leading words of `_LEADS`: `the value is 7`, `It is an ellipse`."""
    rest = text
    while (match := _BEGINNING.match(rest)) and (match["word"] or "so").lower() in _LEADS:
        inside = match.group().startswith(r"\text{") and "}" not in match.group()
        rest = (r"\text{" if inside else "") + rest[match.end() :]
    return rest.removesuffix(" only").strip() or text


_LOOSE = re.compile(r"(?<=[^\w.\s])\s+|\s+(?=[^\w.\s+-]|[-+](?!\d))")
_MODULUS = re.compile(
    r"\(?\s*(?:\\[pb]?mod|\\text\{\s*mod\s*\}|mod)\s*\{?\s*(\d+)\s*\}?\s*\)?", re.ASCII
)
_HOUR = re.compile(
    r"0?(\d{1,2}(?::\d\d)?)\s*(?:\\text\{)?\s*([ap])\.?\s?m\.?\s*\}?", re.ASCII | re.IGNORECASE
)
_MONTHS = "january february march april may june july august september october november december"
_MONTH = "|".join(_MONTHS.split())
_DATE = re.compile(
    rf"(?P<first>{_MONTH})\s+(?P<day>\d\d?)(?:st|nd|rd|th)?"
    rf"|(?P<date>\d\d?)(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<second>{_MONTH})",
    re.IGNORECASE | re.ASCII,
)
_WORDS = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*")
_PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{3}|[a-z]{1,2}[A-Z]+|abc|[A-Z]{2}[a-z]|[A-Z][a-z][A-Z]")


_ELEMENTS = words_of("""
    H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As
    Se Br Kr Rb Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Nd Sm Eu Gd W Pt
    Au Hg Tl Pb Bi Rn Ra Th U Pu
""")


def is_formula(text: str) -> bool:
    """Whether a gold is a chemical formula (H_2O, NaCl), in which order and case matter."""
    if re.fullmatch(r"(?:[A-Z][a-z]?(?:_(?:\d|\{\d+\}))?){2,}", text) is None:
        return False
    capitals = len(text) > 2 and text.isalpha() and text.isupper()  # a name
    return not capitals and _ELEMENTS.issuperset(re.findall(r"[A-Z][a-z]?", text))


def as_text(text: str) -> str:
    """The text in the form that is compared: white space counts only between letters and digits."""
    text = _SPACES.sub(" ", text.strip()).rstrip(".;!")
    if date := _DATE.fullmatch(text):
        return f"{(date['first'] or date['second']).lower()} {int(date['day'] or date['date'])}"
    text = _MODULUS.sub(r"(mod \1)", text.replace("{:}", ":"))
    if ratio := re.fullmatch(r"(\d+) to (\d+)", text, re.ASCII):
        return f"{ratio[1]}:{ratio[2]}"
    if hour := _HOUR.fullmatch(text):
        return f"{hour[1]} {hour[2].lower()}m"
    clock = re.fullmatch(r"0?(\d{1,2}:\d\d(?::\d\d)?)(.*)", text, re.ASCII)
    return _LOOSE.sub("", clock[1] + clock[2] if clock else text)


@functools.lru_cache(maxsize=1024)  # golds repeat
def as_words(text: str) -> str | None:
    r"""The words of a text, in lower case and without an article; None for other text.

    Letters, hyphens, apostrophes and spaces, in `\text{}` or bare; if bare, one word has three
    letters.
    """
    inside = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    inside = re.sub(r"""["“”]|(?<![a-z])'|'(?![a-z])|[!?]+$""", " ", inside)
    words = inside.split()
    if not words or not all(_WORDS.fullmatch(word) for word in words):
        return None
    if r"\text" not in text:
        # Bare "xy" or "abc" is a product of letters.
        short = max(map(len, words)) < 3 and words[-1].lower() not in ("no", "up")
        if short or all(len(word) == 1 or _PRODUCT.fullmatch(word) for word in words):
            return None
    words = [word.lower() for word in words]
    if len(words) > 1 and words[0] in ("a", "an", "the"):
        words = words[1:]
    if words in (["no", "solutions"], ["no", "real", "solutions"]):
        words[-1] = "solution"
    return " ".join(words)
