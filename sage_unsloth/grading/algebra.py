"""Comparing two expressions by math-verify, in a worker; what it is given is `expressions`'."""

import functools
from typing import Any

from sage_unsloth.grading.expressions import canonical


def _parse(text: str) -> Any:
    r"""The SymPy expression that math-verify finds in `\boxed{text}`, or None.

    Nothing is looked for but the whole text: no units are taken off, no other place is tried.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    whole = LatexExtractionConfig(
        boxed_match_priority=0,
        try_extract_without_anchor=False,
        normalization_config=NormalizationConfig(
            basic_latex=False,
            units=False,
            malformed_operators=False,
            nits=False,
            boxed="last",
            equations=False,
        ),
    )
    # None turns off its signals, which work on the main thread alone; its annotation says int.
    found = parse(
        rf"\boxed{{{text}}}",
        extraction_config=[whole],
        fallback_mode="no_fallback",
        parsing_timeout=None,  # pyright: ignore[reportArgumentType]
    )
    return found[0] if found else None


# Golds come again and again; what a model writes is not kept.
_parse_gold = functools.lru_cache(maxsize=1024)(_parse)


def readable(text: str) -> bool:
    """Whether the text is an expression that math-verify parses; of a gold, whose parse is kept."""
    found = canonical(text)
    return found is not None and _parse_gold(found) is not None


def same(gold: str, answer: str) -> bool | None:
    """Whether two expressions are equal; None if the answer is none.

    A comparison that math-verify gives up on is False: from outside, its failures look like that.
    """
    from math_verify import verify
    from sympy import Symbol

    written = canonical(gold), canonical(answer)
    if written[0] is None or written[1] is None:
        return None
    if written[0] == written[1]:
        return True
    expected, found = _parse_gold(written[0]), _parse(written[1])
    if expected is None or found is None:
        return None
    if isinstance(expected, Symbol) and isinstance(found, Symbol):
        return expected == found
    if isinstance(expected, Symbol) or isinstance(found, Symbol):
        return _is_zero(expected - found)  # math-verify joins the names of symbols: ab for a b
    if not verify([expected], [found], timeout_seconds=None):
        return False
    return _near(expected, found)


def proportional(first: tuple[str, str], second: tuple[str, str]) -> bool | None:
    """Whether two equations, left and right side each, differ by a constant factor; None if one
    cannot be read."""
    from sympy import simplify

    parsed = []
    for side in (*first, *second):
        written = canonical(side)
        found = None if written is None else _parse(written)
        if found is None:
            return None
        parsed.append(found)
    left, right = parsed[0] - parsed[1], parsed[2] - parsed[3]
    if _is_zero(left) or _is_zero(right):
        return False  # of what is always true, nothing follows
    ratio = simplify(left.doit() / right.doit())
    return not ratio.free_symbols and ratio.is_finite is True


def _is_zero(expression: Any) -> bool:
    from sympy import simplify

    return simplify(expression.doit()).is_zero is True


def _near(first: Any, second: Any) -> bool:
    """Equal to 12 digits of their own size, where both are numbers; its own bound is absolute."""
    try:
        if first.free_symbols or second.free_symbols:
            return True
        first, second = first.doit().evalf(30), second.doit().evalf(30)
        return bool(abs(first - second) <= abs(first) * 1e-12)
    except (TypeError, AttributeError):
        return True
