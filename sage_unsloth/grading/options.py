"""Options: whether an answer is the letter of one, with or without its text."""

import re

from sage_unsloth.grading.forms import read
from sage_unsloth.grading.units import split_words

_CHOSEN = re.compile(
    r"(?:(?i:option|choice|answer)\s+)?(?:\\text\{\s*)?(?P<open>[(\[]?)\s*(?:\\text\{\s*)?(?P<letter>[A-Za-z])(?![a-zA-Z])"
    r"\s*\}?\s*(?P<close>[)\]:.,]*)\s*\}?\s*(?P<rest>.*)",
    re.DOTALL,
)
_CORRECT = re.compile(
    r"is (?:the )?(?:(?:correct|right|best)(?: (?:answer|option|choice))?|answer)\.?", re.IGNORECASE
)
_OPTION = re.compile(r"[(\[]?[A-Ea-e][)\]]?")
_IN_BRACKETS = re.compile(r"\([A-Ea-e]\)|(?<![a-zA-Z])[A-E]\)")
_TWO = re.compile(r"(?:both )?[A-E] and [A-E]|neither [A-E] nor [A-E]", re.IGNORECASE)
# Words that take a choice back, or name a second one.
_HEDGE = split_words("""
    or unless versus vs except wrong incorrect false fails fail unlikely maybe perhaps possibly
    probably but nor if see plus alternatively instead rather else either neither isn't nope
    untrue reject no not and then also over
""")


def is_choice(answer: str, letter: str) -> bool:
    """Whether an answer is an option's letter, alone or with a mark and then the option's text."""
    match = _CHOSEN.fullmatch(answer)
    if match is None or match["letter"].upper() != letter:
        return False
    rest = match["rest"].strip(" .")
    if not rest:
        return match["close"] in ("", ",", ".", ":", ")", "]", ").", ")]", "):")
    if _CORRECT.fullmatch(rest):
        return True
    inside = rest.startswith("(") and rest.endswith(")")
    # A letter that runs on into words is a sentence: "A man …".
    if not match["close"] and not inside:
        return False
    rest = rest.strip("()") if inside else rest
    # The text of an option may be "Both A and B".
    if _TWO.fullmatch(rest):
        return not inside
    words = re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", re.sub(r"\\[a-zA-Z]+", " ", rest))
    letters = [word for word in words if len(word) == 1 and word not in ("a", "I")]
    if letters and read(rest, units=True) is None:
        return False
    if match["close"] in (",", "") and re.fullmatch(r"\(?[A-Za-z]\)?", rest):
        return False
    if _OPTION.fullmatch(rest) or _IN_BRACKETS.search(rest):
        return False
    lowered = [word.lower() for word in words]
    # "Not enough information" is the text of many options.
    if lowered[:2] == ["not", "enough"]:
        lowered = lowered[2:]
    return not _HEDGE.intersection(lowered) or lowered == ["no"]
