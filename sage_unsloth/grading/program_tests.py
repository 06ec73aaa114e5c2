"""The tests of a program, as a gold holds them: JSON text in one of three forms.

    ["assert add(2, 3) == 5", ...]                                      asserts
    {"inputs": ["2 3\\n", ...], "outputs": ["5\\n", ...]}                 standard input and output
    {"inputs": [[2, 3], ...], "outputs": [5, ...], "fn_name": "add"}    calls of one function

The first is MBPP's, the others are those of APPS. What is expected stays in the process that
compares; `Tests.requests` has what the program is given.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sage_unsloth.grading.asserts import Assert
from sage_unsloth.grading.program_values import decode, encode

RELATIVE = 1e-9
"""Two numbers with a fraction are equal up to this part of the larger one, in calls of a function;
an assert says itself how it compares."""


class Tests:
    """The tests of one gold.

    Attributes:
        requests: what the program is asked for, each in a process of its own: {"stdin": text} for
            every test, or all calls together as {"calls": [...]}.
    """

    def __init__(
        self,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        calls: Sequence[list] = (),
        expected: Sequence[Any] = (),
        asserts: Sequence[Assert] = (),
    ) -> None:
        self.requests: list[dict[str, Any]] = [{"stdin": text} for text in inputs]
        if calls:
            self.requests = [{"calls": list(calls)}]
        self._outputs = [lines_of(text) for text in outputs]
        self._expected, self._asserts = list(expected), list(asserts)

    def passes(self, number: int, output: str) -> bool:
        """Whether what the program wrote for a request is right."""
        if self._outputs:
            return lines_of(output) == self._outputs[number]
        values = _values(output)
        if values is None:
            return False
        if not self._asserts:
            return len(values) == len(self._expected) and all(
                same(*pair) for pair in zip(values, self._expected, strict=True)
            )
        if len(values) != sum(len(one.calls) for one in self._asserts):
            return False
        for one in self._asserts:
            own, values = values[: len(one.calls)], values[len(one.calls) :]
            if not one.holds(own):
                return False
        return True


@lru_cache(maxsize=256)
def read_tests(gold: str) -> Tests:
    """The tests of a gold.

    Raises:
        ValueError: another form than the module says, or no test.
    """
    try:
        found = json.loads(gold)
    except (ValueError, TypeError, RecursionError):
        found = None
    if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
        asserts = [Assert(text) for text in found]
        calls = [
            [
                call.name,
                [*map(encode, call.arguments)],
                {k: encode(v) for k, v in call.by_name.items()},
            ]
            for one in asserts
            for call in one.calls
        ]
        return Tests(calls=calls, asserts=asserts)
    if isinstance(found, dict):
        inputs, outputs = found.get("inputs"), found.get("outputs")
        name = found.get("fn_name")
        if isinstance(inputs, list) and isinstance(outputs, list) and inputs:
            same_number = len(inputs) == len(outputs)
            texts = all(isinstance(text, str) for text in (*inputs, *outputs))
            if name is None and same_number and texts:
                return Tests(inputs=inputs, outputs=outputs)
            lists = all(isinstance(arguments, list) for arguments in inputs)
            if isinstance(name, str) and name.isidentifier() and same_number and lists:
                calls = [[name, [*map(encode, arguments)], {}] for arguments in inputs]
                return Tests(calls=calls, expected=outputs)
    raise ValueError(
        'the tests of a program must be JSON text: ["assert add(2, 3) == 5", ...], {"inputs": '
        '[texts], "outputs": [texts]}, or {"inputs": [lists of arguments], "outputs": [values], '
        f'"fn_name": NAME}}, as many inputs as outputs; got {gold!r:.200}; repair the row'
    )


def lines_of(text: str) -> list[str]:
    """What of an output is compared: its lines without white space at their ends, without empty
    ones at the end.
    """
    return [line.rstrip() for line in text.rstrip().splitlines()]


def same(found: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one of JSON: a tuple counts as a list, and True is
    not 1.
    """
    if isinstance(found, tuple):
        found = list(found)
    if isinstance(found, bool) or isinstance(expected, bool):
        return type(found) is type(expected) and found == expected
    if isinstance(found, float) or isinstance(expected, float):
        numbers = isinstance(found, (int, float)) and isinstance(expected, (int, float))
        try:
            return numbers and math.isclose(found, expected, rel_tol=RELATIVE)
        except OverflowError:
            return False
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(found, dict) and isinstance(expected, dict):
        found = {str(key): value for key, value in found.items()}
        return found.keys() == expected.keys() and all(
            same(found[key], expected[key]) for key in expected
        )
    return type(found) is type(expected) and found == expected


def _values(output: str) -> list[Any] | None:
    try:
        return [decode(json.loads(line)) for line in output.splitlines()]
    except (ValueError, TypeError, RecursionError, AttributeError):
        return None
