"""The verifier `python`: programs against tests. Those that attack it: `test_program_attacks`."""

import json
import math
import textwrap
import time

import pytest

from sage_unsloth.grading.asserts import Assert
from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.program_results import DictValue, SetValue, comparison_key, read_results
from sage_unsloth.grading.program_tests import read_tests, same
from sage_unsloth.grading.program_values import decode, encode
from sage_unsloth.grading.verifiers import get_verifier

SUM = json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6\n"]})
ADD = json.dumps(["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"])
CALLS = json.dumps({"inputs": [[2, 3], ["a", "b"]], "outputs": [5, "ab"], "fn_name": "add"})


@pytest.fixture(scope="module")
def grader():
    with Grader(time_limit=20.0, checker=get_verifier("python")) as grader:
        yield grader


def graded(grader, program, gold):
    ((grade, kind),) = grader.judge_answers([textwrap.dedent(program)], [gold])
    assert kind is (Kind.TESTS if grade in (Grade.CORRECT, Grade.WRONG) else Kind.NONE)
    return grade


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program, gold",
    [
        ("a, b = map(int, input().split())\nprint(a + b)", SUM),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())), end='  \\n\\n')", SUM),
        ("print(sum(map(int, open(0).read().split())))", SUM),
        ("def main():\n    print(eval(input().replace(' ', '+')))\n"
         "if __name__ == '__main__':\n    main()", SUM),
        ("import threading, sys\nsys.setrecursionlimit(10**6)\n"
         "def f():\n    print(sum(map(int, input().split())))\nthreading.Thread(target=f).start()",
         SUM),
        ("from fractions import Fraction\nfrom dataclasses import dataclass\nimport numbers, bz2\n"
         "@dataclass\nclass A:\n    x: int\nprint(A(sum(map(int, input().split()))).x)\nexit()",
         SUM),
        ("def add(a, b):\n    return a + b", ADD),
        ("def add(a, b):\n    print('noise')\n    return a + b", CALLS),
        ("add = lambda b, a: b + a", CALLS),
        ("class Solution:\n    def add(self, a: List[int], b: Optional[int] = None) -> int:\n"
         "        return a + b", CALLS),
        ("class Solution:\n    calls = None\n    def __init__(self):\n        self.calls = []\n"
         "    def add(self, a, b):\n        self.calls += [a, b]\n"
         "        return self.calls[0] + self.calls[1]", CALLS),
        ("def add(a, b):\n    return a + b\nclass Solution:\n    def add(self, a, b):\n"
         "        return None", CALLS),
    ],
)  # fmt: skip
def test_a_program_that_passes_every_test_is_right(grader, program, gold):
    assert graded(grader, program, gold) is Grade.CORRECT


@pytest.mark.parametrize(
    "program, gold, grade",
    [
        ("print(5)", SUM, Grade.WRONG),  # the first test only
        ("print('5 ')\nraise SystemExit(1)", SUM, Grade.WRONG),
        ("", SUM, Grade.UNPARSABLE),
        ("def add(a, b):", ADD, Grade.UNPARSABLE),
        ("print('\ud800')" + "#" * 20_001, SUM, Grade.UNPARSABLE),
        ("def plus(a, b):\n    return a + b", ADD, Grade.WRONG),
        ("def add(a, b):\n    raise ValueError", ADD, Grade.WRONG),
        ("def add(a, b):\n    return a - b", CALLS, Grade.WRONG),
        ("import numpy\ndef add(a, b):\n    return a + b", CALLS, Grade.WRONG),
        ("class Solution:\n    def plus(self, a, b):\n        return a + b", CALLS, Grade.WRONG),
        ("class Solution:\n    def add(self, a, b):\n        return a - b", CALLS, Grade.WRONG),
        ("class Solution:\n    def __init__(self, n):\n        self.n = n\n"
         "    def add(self, a, b):\n        return a + b", CALLS, Grade.WRONG),
        ("def f(n):\n    return f(n + 1)\nf(0)", SUM, Grade.WRONG),
    ],
)  # fmt: skip
def test_any_other_is_not(grader, program, gold, grade):
    assert graded(grader, program, gold) is grade


RIGHT = "print(sum(map(int, input().split())))\n"


@pytest.mark.parametrize(
    "ending",
    [
        "import sys\nsys.exit(1)",
        "raise SystemExit(3)",
        "raise SystemExit('message')",
        "exit(True)",
        "raise ValueError",
        "import os, sys\nsys.stdout.flush()\nos._exit(1)",
        "import sys\nsys.stdout.close()",
    ],
)
def test_right_output_and_another_end_than_success_is_wrong(grader, ending):
    assert graded(grader, RIGHT + ending, SUM) is Grade.WRONG


@pytest.mark.parametrize("ending", ["import sys\nsys.exit(0)", "raise SystemExit", "exit(None)"])
def test_right_output_and_success_is_right(grader, ending):
    assert graded(grader, RIGHT + ending, SUM) is Grade.CORRECT


@pytest.mark.parametrize("ending", ["import os\nos._exit(1)", "raise SystemExit(1)"])
def test_right_results_and_another_end_than_success_are_wrong(grader, ending):
    program = f"import os\nos.write(3, b'5\\n' + b'\"ab\"\\n')\n{ending}\n"
    assert graded(grader, program, ADD) is Grade.WRONG
    program = program.replace("(1)", "(0)")
    if "_exit" in ending:
        assert graded(grader, program, ADD) is Grade.CORRECT, "the results themselves are right"


def test_a_program_has_the_memory_of_its_limit():
    program = "x = bytes({} * 2**20)\n" + RIGHT
    with Grader(time_limit=20.0, memory_limit_gib=0.25, checker=get_verifier("python")) as small:
        assert graded(small, program.format(100), SUM) is Grade.CORRECT
        assert graded(small, program.format(400), SUM) is Grade.WRONG


def test_all_tests_of_a_program_share_its_time():
    tests = json.dumps({"inputs": ["1", "2", "3"], "outputs": ["1", "2", "3"]})
    sleeper = "import time\ntime.sleep({})\nprint(input())"
    with Grader(time_limit=1.5, checker=get_verifier("python")) as brief:
        brief.check_workers()
        started = time.monotonic()
        assert graded(brief, sleeper.format(0.7), tests) is Grade.TIMED_OUT
        assert time.monotonic() - started < 2.1, "0.7 s for each of three are within 1.5 s for each"
        assert graded(brief, sleeper.format(0.05), tests) is Grade.CORRECT


def test_the_answer_is_in_the_tag_or_in_the_last_block(grader):
    block = "```python\ndef add(a, b):\n    return a + b\n```"
    wrong = "```python\ndef add(a, b):\n    return 0\n```"
    cases = {
        f"<SOLUTION>{block}</SOLUTION>": Grade.CORRECT,
        "<SOLUTION>\ndef add(a, b):\n    return a + b\n</SOLUTION>": Grade.CORRECT,
        f"{wrong}\nBetter:\n{block}\nThat is it.": Grade.CORRECT,
        f"{block}\nBetter:\n{wrong}": Grade.WRONG,
        f"{block}\n```text\n5\n```\n</s>": Grade.CORRECT,
        f"{block}\n```python\ndef add(": Grade.UNPARSABLE,  # left open
        f"{block} <SOLUTION>5": Grade.UNPARSABLE,
        f"{block}<end_working_out>": Grade.UNPARSABLE,  # within the working
        f"<start_working_out>{block}": Grade.UNPARSABLE,
        "def add(a, b):\n    return a + b": Grade.UNPARSABLE,
    }
    grades = grader.grade_many(list(cases), [ADD] * len(cases))
    assert dict(zip(cases, grades, strict=True)) == cases


# --- golds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, values, holds",
    [
        ("assert f(1, k=[2]) == (3, {4})", [(3, {4})], True),
        ("assert f(1) == 2 and not g(3)", [2, False], True),
        ("assert set(f([1, 2])) == {1, 2}", [[2, 1, 1]], True),
        ("assert abs(f(2) - 1.4142) < 1e-3", [1.41425], True),
        ("assert math.isclose(f(2), 0.3, rel_tol=0.01), 'message'", [0.301], True),
        ("assert sorted(f(-1))[:2] == [1, 2]", [[3, 2, 1]], True),
        ("assert f('x') is None", [None], True),
        ("assert f('x') is None", [0], False),
        ("assert f(1) < 2", ["text"], False),  # a TypeError in the program's place
        ("assert f(1) == [1, 2]", [(1, 2)], False),
        ("assert 1 <= f(1) <= 3", [3], True),
        ("assert f(1) == {'a': [1, {2}], (1, 2): 3.0}", [{"a": [1, {2}], (1, 2): 3}], True),
        ("assert f(1) == {'a': 1}", [{"a": 1, "b": 2}], False),
        ("assert f(1)['a'] == 1 and 'b' not in f(2)", [{"a": 1}, {"a": 1}], True),
        (
            "assert f(1) == {1, 2.5, 'a', None, (1, frozenset([2]))}",
            [{1.0, 2.5, "a", None, (1, frozenset([2]))}],
            True,
        ),
        ("assert f(1) == {1, 2}", [frozenset([1, 2])], True),
        ("assert f(1) == {1, 2}", [{1, 3}], False),
        ("assert f(1) < {1, 2, 3} and {1} <= f(2)", [{1, 2}, {1, 2}], True),
        ("assert f(1) - {1} == {2} and 2 in f(2)", [{1, 2}, {True, 2}], True),
        ("assert len(set(f(1))) == 2", [[1, True, 1.0, 2]], True),
        ("assert dict(f(1)) == {1: 2} and list(f(2)) == ['a']", [[(1, 2)], {"a": 1}], True),
        ("assert sorted(f(1), key=len, reverse=True)[0] == 'abc'", [["a", "abc"]], True),
        ("assert max(f(1)) == 3 and min(f(2), default=0) == 0", [{3, 1}, []], True),
        ("assert sum(f(1)) == 3.5 and round(f(2), 2) == 3.14", [[1, 2.5], 3.14159], True),
        ("assert f(1) % 2 == 1 and f(2) // 2 == 3 and f(3) * 2 == 'abab'", [7, 7, "ab"], True),
        ("assert str(f(1)) == \"{'a': [1]}\" and int(f(2)) == 12", [{"a": [1]}, "12"], True),
        ("assert float(f(1)) == 1.5 and float(f(2)) == 2", ["1.5", 2], True),
        ("assert f(1) + [3] == [1, 2, 3] and -f(2) == 4", [[1, 2], -4], True),
        ("assert f(1)", [set()], False),
        ("assert f(1) == f(2)", [float("nan"), float("nan")], False),
    ],
)
def test_an_assert_is_evaluated_outside(text, values, holds):
    assert Assert(text).holds(returned(*values)) is holds


def returned(*values):
    """The values as the comparing process has them."""
    text = b"".join(json.dumps(encode(value)).encode() + b"\n" for value in values)
    results = read_results(text, len(values))
    assert results is not None
    return results


@pytest.mark.parametrize(
    "text, value",
    [
        ("assert f(1) % 2 == 0", "%600000000d"),
        ("assert f(1) % 2 != 0", b"%600000000d"),
        ("assert f(1) * 100_001 != 0", "x"),
        ("assert f(1) * 20_000 != 0", ["xxxxxxxxxx"]),
        ("assert 'x' * f(1) != ''", 10**9),
        ("assert 3 ** 4 != f(1) * f(1)", 1),
        ("assert " + " * ".join(["f(1)"] * 8) + " != 1", 10**4_000),
        ("assert sum(f(1), []) != 0", [[1], [2]]),
        ("assert round(5, f(1)) == 0", -(10**9)),
        ("assert int(f(1)) != 0", "9" * 4_000),
        ("assert f(1) < [[[[2]]]]", [[[[1]]]]),
        ("assert sorted(f(1)) != 0", [[[[[1]]]], [[[[2]]]]]),
        ("assert str(f(1)) != ''", {1, 2}),
        ("assert f(1).real == 1", 1),
    ],
)
def test_what_would_be_unbounded_does_not_hold(text, value):
    try:
        test = Assert(text)
    except ValueError:
        return
    assert not test.holds(returned(*[value] * len(test.calls)))


def test_equal_values_have_equal_keys_and_others_have_not():
    values = [
        0, 1, -1, 13, 255, 2.5, 1e-07, 1e300, float("inf"), -float("inf"), 1j, 1 + 2j, "", "1",
        "n1", "None", None, b"", b"n1", (), (1,), (1, 2), ((1,), 2), (1, (2,)), ("1",), "x" * 100,
        "x" * 101, 10**400, 10**400 + 1, ("a", "b"), ("ab",), SetValue([1, 2]), SetValue([1]),
    ]  # fmt: skip
    assert len({comparison_key(value) for value in values}) == len(values)
    for group in ([1, 1.0, True, 1 + 0j], [0, 0.0, -0.0, False], [(1, 2.0), (True, 2)]):
        assert len({comparison_key(value) for value in group}) == 1
    for number in (2**53 + 1, 2**64, 2**64 + 1, 2**70, 10**18, 10**40, 2**1023, 2**1024 - 1):
        for value in (number, -number, number + 1):
            as_float = float(value) if abs(value) <= 2**1023 else math.inf
            assert (comparison_key(value) == comparison_key(as_float)) == (value == as_float), value
    assert comparison_key(SetValue([1, 2])) == comparison_key(SetValue([2.0, True]))
    nan = float("nan")
    assert comparison_key(nan) == comparison_key(nan) != comparison_key(float("-nan"))
    for value in ([], DictValue([])):
        with pytest.raises(TypeError, match="has no hash"):
            comparison_key(value)


def test_what_a_call_is_given():
    found = Assert("assert f(-1, (2, 3), k={'a': None}) == 2").calls
    assert [(c.name, c.arguments, dict(c.by_name)) for c in found] == [
        ("f", (-1, (2, 3)), {"k": {"a": None}})
    ]


@pytest.mark.parametrize(
    "text",
    [
        "f(1) == 2",
        "assert 1 == 1",
        "assert f(x) == 1",
        "assert f(g(1)) == 1",
        "assert [f(i) for i in (1, 2)] == [1, 2]",
        "assert f(1).strip() == 'a'",
        "assert f(1) == 2 ** 9999999999",
        "assert __import__('os').getcwd() == f(1)",
        "assert f(1) == (1).__class__",
        "assert f(*a) == 1",
        "import os",
        "assert f(1) == 2; assert f(2) == 3",
        "assert f(1) == '%d' % 3",
        "assert f(1) == " + "(" * 300,
    ],
)
def test_an_assert_of_another_form_is_refused(text):
    with pytest.raises(ValueError, match="a test must be an assert of literals"):
        Assert(text)


@pytest.mark.parametrize(
    "gold",
    [
        "42", "[]", "not json", "[1]", "{}", '{"inputs": [], "outputs": []}',
        '{"inputs": ["a"], "outputs": ["a", "b"]}', '{"inputs": [1], "outputs": [2]}',
        '{"inputs": [1], "outputs": [2], "fn_name": "f"}',
        '{"inputs": [[1]], "outputs": [2], "fn_name": "f.g"}',
    ],
)  # fmt: skip
def test_a_gold_of_another_form_is_refused(gold):
    with pytest.raises(ValueError, match="the tests of a program must be JSON text"):
        read_tests(gold)


def test_values_come_through_as_they_are():
    value = [None, True, 1, -2.5, float("inf"), "ä", b"\0", (1, [2]), {3}, {"a": {1: 2}}, 1j]
    assert decode(json.loads(json.dumps(encode(value)))) == value
    with pytest.raises(ValueError, match="not a plain value"):
        decode(json.loads(json.dumps(encode([object()]))))
    assert read_results(json.dumps(encode([object()])).encode(), 1) is None
    assert read_results(b"1\n2\n", 2) == [1, 2]
    assert read_results(b"1\n2\n", 1) is read_results(b"1\n2\n", 3) is None


@pytest.mark.parametrize(
    "found, expected, equal",
    [
        ((1, (2,)), [1, [2]], True),
        (True, 1, False),
        (1, True, False),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (2, 2.0, True),
        ("2", 2, False),
        ({1: "a"}, {"1": "a"}, True),
        ({1}, [1], False),
        (True, 1.0, False),
        (1.0, True, False),
        (False, 0.0, False),
        ({(1, 2): 3}, {"(1, 2)": 3}, True),
        ({frozenset([1]): 3}, {"frozenset({1})": 3}, False),
        (None, None, True),
        ([True, 1], [1, 1], False),
        ({"a": True}, {"a": 1}, False),
        (float("nan"), 1.0, False),
        (10**400, 1.0, False),
    ],
)
def test_returned_values_are_compared_with_those_of_json(found, expected, equal):
    assert same(*returned(found), expected) is equal
