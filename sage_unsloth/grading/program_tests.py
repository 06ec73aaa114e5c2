"""The tests of a program, as a gold holds them: JSON text in one of three forms.

    ["assert add(2, 3) == 5", ...]                                      asserts
    {"inputs": ["2 3\\n", ...], "outputs": ["5\\n", ...]}                 standard input and output
    {"inputs": [[2, 3], ...], "outputs": [5, ...], "fn_name": "add"}    calls of one function

The first is MBPP's, the others are those of APPS. Expected values stay in the comparing process;
the program gets only `Tests.requests`.
"""

import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sage_unsloth.grading.asserts import Assert
from sage_unsloth.grading.program_results import DictValue, read_results
from sage_unsloth.grading.program_values import encode, output_digest

LONGEST_RESULTS, RESULTS_PER_GOLD = 2**16, 4
"""Bytes of JSON that a program may return: at least, and for each character of its gold."""
RELATIVE = 1e-9
"""Relative tolerance for floats in calls of a function; an assert has its own comparison."""


class Tests:
    """The tests of one gold.

    Attributes:
        requests: each is sent to its own process: {"stdin": text} for every test, or all calls
            together as {"calls": [...]}.
        longest_results: bytes of results that are read.
    """

    def __init__(
        self,
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        calls: Sequence[list] = (),
        expected: Sequence[Any] = (),
        asserts: Sequence[Assert] = (),
        longest_results: int = LONGEST_RESULTS,
    ) -> None:
        self.requests: list[dict[str, Any]] = [{"stdin": text} for text in inputs]
        if calls:
            self.requests = [{"calls": list(calls)}]
        self.longest_results = longest_results
        self._digests = [output_digest(text) for text in outputs]
        self._expected, self._asserts = list(expected), list(asserts)

    def passes(self, number: int, digest: str, results: bytes) -> bool:
        """Whether the result of a request is correct.

        Args:
            digest: `output_digest` of its standard output.
            results: returned values, if functions were called.
        """
        if self._digests:
            return digest == self._digests[number]
        (request,) = self.requests
        values = read_results(results, len(request["calls"]))
        if values is None:
            return False
        if not self._asserts:
            return all(same(*pair) for pair in zip(values, self._expected, strict=True))
        for test in self._asserts:
            # All asserts share one process, which made their calls in this order.
            own, values = values[: len(test.calls)], values[len(test.calls) :]
            if not test.holds(own):
                return False
        return True


@lru_cache(maxsize=256)
def read_tests(gold: str) -> Tests:
    """Parses a gold.

    Raises:
        ValueError: an unsupported form, or no test.
    """
    try:
        result = json.loads(gold)
    except (ValueError, TypeError, RecursionError):
        result = None
    longest = max(LONGEST_RESULTS, RESULTS_PER_GOLD * len(gold))
    if isinstance(result, list) and result and all(isinstance(text, str) for text in result):
        asserts = [Assert(text) for text in result]
        calls = [
            [
                call.name,
                [*map(encode, call.arguments)],
                {k: encode(v) for k, v in call.by_name.items()},
            ]
            for test in asserts
            for call in test.calls
        ]
        return Tests(calls=calls, asserts=asserts, longest_results=longest)
    if isinstance(result, dict):
        inputs, outputs = result.get("inputs"), result.get("outputs")
        name = result.get("fn_name")
        if isinstance(inputs, list) and isinstance(outputs, list) and inputs:
            same_number = len(inputs) == len(outputs)
            texts = all(isinstance(text, str) for text in (*inputs, *outputs))
            if name is None and same_number and texts:
                return Tests(inputs=inputs, outputs=outputs)
            lists = all(isinstance(arguments, list) for arguments in inputs)
            if isinstance(name, str) and name.isidentifier() and same_number and lists:
                calls = [[name, [*map(encode, arguments)], {}] for arguments in inputs]
                return Tests(calls=calls, expected=outputs, longest_results=longest)
    raise ValueError(
        'the tests of a program must be JSON text: ["assert add(2, 3) == 5", ...], {"inputs": '
        '[texts], "outputs": [texts]}, or {"inputs": [lists of arguments], "outputs": [values], '
        f'"fn_name": NAME}}, as many inputs as outputs, got {gold!r:.200}'
    )


def same(result: Any, expected: Any) -> bool:
    """Whether a returned value equals the JSON one: a tuple is a list, and True is not 1."""
    if isinstance(result, tuple):
        result = list(result)
    if isinstance(result, bool) or isinstance(expected, bool):
        return type(result) is type(expected) and result == expected
    if isinstance(result, float) or isinstance(expected, float):
        numbers = isinstance(result, (int, float)) and isinstance(expected, (int, float))
        try:
            return numbers and math.isclose(result, expected, rel_tol=RELATIVE)
        except OverflowError:
            return False
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(map(same, result, expected))
    if isinstance(result, DictValue) and isinstance(expected, dict):
        try:
            by_text = {str(key): value for key, value in result.items()}
        except (TypeError, ValueError):  # of keys that have no text
            return False
        return by_text.keys() == expected.keys() and all(
            same(by_text[key], expected[key]) for key in expected
        )
    return type(result) is type(expected) and result == expected
