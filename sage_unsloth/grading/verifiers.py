"""Verifiers, by name or as a custom function; `docs/own_reward.md` has a table.

Every verifier is a `Checker`. Comparisons that may hang or break run in the confined workers.
"""

import inspect
import json
import math
import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

from sage_unsloth.grading.checker import LONGEST_ANSWER, Checker, Grade, Kind, Verdict
from sage_unsloth.grading.checkers import REASONING_GYM, ROLES
from sage_unsloth.grading.countdown import COUNTDOWN
from sage_unsloth.grading.extraction import strip_fence
from sage_unsloth.grading.mathematics import MATH, plain_number
from sage_unsloth.grading.programs import python_checker
from sage_unsloth.grading.writing import normalise_spelling, unwrap
from sage_unsloth.own_code import (
    OwnCodeError,
    OwnFunction,
    describe_exception,
    function_record,
    named_function,
)
from sage_unsloth.runs.record import package_version

LONGEST_JSON = 20_000  # characters

_NOTHING = Verdict(Grade.UNPARSABLE, Kind.NONE)


def get_verifier(
    expected: str | Checker | Callable[[str, str], Any], *, allow_unconfined: bool = False
) -> Checker:
    """The verifier of a name or function.

    Args:
        expected: a name in `VERIFIERS`, `number:TOLERANCE`, `module:function`, or the function
            itself: (answer, gold) -> True or a score of 1 if correct, None if it is not an answer.
        allow_unconfined: let `python` run programs even if the kernel cannot block their access to
            files, network and processes.

    Raises:
        ValueError: an unknown name, a missing package, or a function that cannot be imported.
    """
    if isinstance(expected, Checker):
        return expected
    if not isinstance(expected, str):
        return _own(function_record(expected))
    name, colon, option = expected.partition(":")
    if name == "number" and colon:
        return _number(option)
    if expected == "python":
        return python_checker(allow_unconfined=allow_unconfined)
    if expected in VERIFIERS:
        checker = VERIFIERS[expected]
        for package in checker.packages:
            if package_version(package) is None:
                raise ValueError(
                    f"the verifier {expected} needs the package {package}, which is not installed "
                    f"(pip install {package})"
                )
        return checker
    if not colon:
        raise ValueError(
            f"a verifier is one of {', '.join(VERIFIERS)}, number:TOLERANCE, or your own "
            f"module:function, got {expected!r}"
        )
    return _own(named_function(expected, "a verifier"))


def _verdict(right: bool, kind: Kind) -> Verdict:
    return Verdict(Grade.CORRECT if right else Grade.WRONG, kind)


def _too_long(answer: str | None, longest: int = LONGEST_ANSWER) -> bool:
    return not answer or len(answer) > longest


# --- compared at once -----------------------------------------------------------------------------


def _check_text(answer: str | None, gold: str) -> Verdict:
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(
            f"a gold answer must be text, got {gold!r:.200}. Write numbers as text (str)"
        )
    if answer is None or _too_long(answer):
        return _NOTHING
    result, expected = (unicodedata.normalize("NFC", text).strip() for text in (answer, gold))
    return _verdict(result == expected, Kind.TEXT)


def _read_number(text: str) -> Fraction | None:
    result = normalise_spelling(text)
    return None if result is None else plain_number(result)


def _check_number(tolerance: Fraction, answer: str | None, gold: str) -> Verdict:
    expected = _read_number(gold) if isinstance(gold, str) else None
    if expected is None:
        raise ValueError(
            "a gold answer must be a plainly written number, as 42, 0.5, 3/4 or 1e3, got "
            f"{gold!r:.200}. Use --verifier math for others"
        )
    result = None if answer is None or _too_long(answer) else _read_number(answer)
    if result is None:
        return _NOTHING
    return _verdict(abs(result - expected) <= tolerance * max(1, abs(expected)), Kind.NUMBER)


def _number(tolerance: str) -> Checker:
    """|answer - gold| <= tolerance * max(1, |gold|)."""
    try:
        value = Fraction(tolerance)
    except (ValueError, ZeroDivisionError):
        value = Fraction(-1)
    if not 0 <= value < 1:
        raise ValueError(
            "number:TOLERANCE takes a number of at least 0 and below 1, as number:1e-6, got "
            f"{tolerance!r}"
        )
    return Checker(
        name="number" if value == 0 else f"number:{tolerance}",
        version=1,
        plainly=partial(_check_number, value),
    )


_GOLD_LETTER = re.compile(r"\s*(?:\\text\{)?\s*\(?\s*([A-Z])\s*\)?\s*\}?\s*\.?\s*")
_LETTER = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s*(?:is|:)?\s*)?(?:\\text\{)?\s*"
    r"(?:[(\[]\s*([A-Z])\s*[)\]]|([A-Z])(?![\w'+=*/^-]))\s*\}?\s*(?:[).:,-]\s*|\s+|$)(?P<rest>.*)",
    re.IGNORECASE | re.DOTALL,
)
_TAKES_BACK = re.compile(r"\b(?:or|and|not|nor|but|wrong|false|incorrect|no)\b", re.IGNORECASE)
_OTHER_LETTER = re.compile(r"(?<![\w'])[A-Z](?![\w'])")


def _check_choice(answer: str | None, gold: str) -> Verdict:
    expected = _GOLD_LETTER.fullmatch(gold) if isinstance(gold, str) else None
    if expected is None:
        raise ValueError(
            f"a gold answer must be the letter of an option, as C or (C), got {gold!r:.200}"
        )
    if answer is None or _too_long(answer):
        return _NOTHING
    match = _LETTER.fullmatch(unwrap(answer).strip())
    if match is None:
        return _NOTHING
    rest = match["rest"]
    if _TAKES_BACK.search(rest) or _OTHER_LETTER.search(rest):
        return Verdict(Grade.WRONG, Kind.CHOICE)
    return _verdict((match[1] or match[2]).upper() == expected[1], Kind.CHOICE)


# --- compared in a worker -------------------------------------------------------------------------


def _check_pattern(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    try:
        _compiled(gold)
    except (TypeError, re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"a gold must be a regular expression of Python, got {gold!r:.200}: {error}"
        ) from None
    return _NOTHING if answer is None or _too_long(answer) else (answer, gold)


_compiled = lru_cache(maxsize=1024)(re.compile)


def compare_pattern(answer: str, gold: str) -> Verdict:
    """Whether the whole answer matches the pattern, which may take for ever."""
    return _verdict(re.fullmatch(gold, answer) is not None, Kind.PATTERN)


def _check_schema(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    schema = _json(gold) if isinstance(gold, str) else None
    if not isinstance(schema, (dict, bool)):
        raise ValueError(
            f'a gold must be a JSON schema as JSON text, as {{"type": "object"}}, got {gold!r:.200}'
        )
    return _NOTHING if answer is None or _too_long(answer, LONGEST_JSON) else (answer, gold)


def _json(text: str) -> Any:
    """The value of JSON text; the class ValueError for any other text."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)  # NaN and Infinity are Python's, not JSON's

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        # None is JSON's null, so invalid JSON needs another mark.
        return ValueError


def compare_schema(answer: str, gold: str) -> Verdict | None:
    """Whether the answer is JSON that the schema allows; None for an invalid schema."""
    import jsonschema
    from jsonschema.validators import validator_for

    schema, result = _json(gold), _json(strip_fence(answer))
    if schema is ValueError:
        return None
    try:
        kind = validator_for(schema)
        kind.check_schema(schema)
    except jsonschema.SchemaError:
        return None
    if result is ValueError:
        return _NOTHING
    return _verdict(kind(schema).is_valid(result), Kind.SCHEMA)


def _check_math_verify(answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(f"a gold answer must be text, got {gold!r:.200}")
    return _NOTHING if answer is None or _too_long(answer) else (answer, gold)


def compare_math_verify(answer: str, gold: str) -> Verdict:
    """math-verify's verdict on two texts, each read between dollars, then as it is.

    Its time limits are signals, which need the main thread, so they are off: the worker has its
    own.
    """
    from math_verify import parse, verify

    def parsed(text: str) -> list:
        whole = parse(f"${text}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        return whole or parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    expected, result = parsed(gold), parsed(answer)
    if not result:
        return _NOTHING
    return _verdict(bool(verify(expected, result, timeout_seconds=None)), Kind.MATHEMATICS)


# --- of one's own ---------------------------------------------------------------------------------


def _own(own: OwnFunction) -> Checker:
    module, _, name = own.reference.partition(":")
    if module == "__main__" or not name.isidentifier():
        raise ValueError(
            "a verifier of your own must be a function at the top of a module, because the workers "
            f"import it, got {own.reference}"
        )
    try:
        inspect.signature(own.function).bind("answer", "gold")
    except TypeError as error:
        raise ValueError(
            f"a verifier is called with an answer and its gold, but {own.reference} takes "
            f"{inspect.signature(own.function)}: {error}"
        ) from error
    except ValueError:  # of some functions in C, which have no signature
        pass
    return Checker(
        name=own.reference,
        version=own.digest,
        plainly=partial(_check_own, own.reference),
        compare="sage_unsloth.grading.verifiers:compare_own",
        # The question that starts every worker imports the function.
        typical=(("", json.dumps({"import": own.reference})),),
        gold_is_answer=False,
    )


def _check_own(reference: str, answer: str | None, gold: str) -> Verdict | tuple[str, str]:
    if not isinstance(gold, str):
        raise ValueError(f"a gold must be text, got {gold!r:.200}")
    if answer is None or len(answer) > LONGEST_JSON:
        return _NOTHING
    return answer, json.dumps({"import": reference, "gold": gold})


def compare_own(answer: str, question: str) -> Verdict | None:
    """The verdict of a custom function; a question without a gold only imports it.

    Raises:
        OwnCodeError: it raised, or its value is neither a truth value, a number nor None.
    """
    requested = _json(question)
    if not isinstance(requested, dict):
        return None  # the question with which every worker starts
    function = named_function(requested["import"], "a verifier").function
    if "gold" not in requested:
        return None
    try:
        value = function(answer, requested["gold"])
    # The worker asks again in a fresh child, which may have enough.
    except MemoryError:
        raise
    except Exception as error:
        raise OwnCodeError(
            f"the verifier {requested['import']} must return True, False, a number or None, but it "
            f"raised {describe_exception(error)} for the answer {answer!r:.200} and the gold "
            f"{requested['gold']!r:.200}"
        ) from error
    if value is None:
        return _NOTHING
    if isinstance(value, (bool, int, float)) and not math.isnan(value):
        return _verdict(value >= 1, Kind.OWN)
    raise OwnCodeError(
        f"the verifier {requested['import']} must return True, False, a number or None, got "
        f"{value!r:.200} for the answer {answer!r:.200}"
    )


VERIFIERS: dict[str, Checker] = {
    "math": MATH,
    "math-verify": Checker(
        name="math-verify",
        version=1,
        packages=("math-verify",),
        plainly=_check_math_verify,
        compare="sage_unsloth.grading.verifiers:compare_math_verify",
        typical=((r"\frac{1}{2}+x", "x+0.5"), ("1, 2", r"\{2, 1\}")),
    ),
    "number": _number("0"),
    "text": Checker(name="text", version=1, plainly=_check_text),
    "choice": Checker(name="choice", version=1, plainly=_check_choice),
    "regex": Checker(
        name="regex",
        version=1,
        plainly=_check_pattern,
        compare="sage_unsloth.grading.verifiers:compare_pattern",
        gold_is_answer=False,
    ),
    "json": Checker(
        name="json",
        version=1,
        packages=("jsonschema",),
        plainly=_check_schema,
        compare="sage_unsloth.grading.verifiers:compare_schema",
        typical=(("{}", "{}"),),
        gold_is_answer=False,
        longest=LONGEST_JSON,
    ),
    "roles": ROLES,
    "countdown": COUNTDOWN,
    "reasoning-gym": REASONING_GYM,
    "python": python_checker(),
}
"""By name; "number" is exact, and "python" refuses to run where it cannot be confined."""
