"""The verifier `python`: programs against tests, and programs that attack it."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sage_unsloth.grading.asserts import Assert
from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.program_tests import read_tests, same
from sage_unsloth.grading.program_values import decode, encode
from sage_unsloth.grading.seccomp import filter_instructions, refused_calls
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.runs.files import read_jsonl

ROOT = Path(__file__).parents[2]
HOSTILE = read_jsonl(ROOT / "data/hostile_programs.jsonl")
SUM = json.dumps({"inputs": ["2 3\n", "10 -4\n"], "outputs": ["5\n", "6\n"]})
ADD = json.dumps(["assert add(2, 3) == 5", "assert add('a', 'b') == 'ab'"])
CALLS = json.dumps({"inputs": [[2, 3], ["a", "b"]], "outputs": [5, "ab"], "fn_name": "add"})
SECRET = "expected-only-by-the-test-7341"


@pytest.fixture(scope="module")
def grader():
    with Grader(time_limit=20.0, checker=get_verifier("python")) as grader:
        yield grader


@pytest.fixture(scope="module")
def quick():
    """With a limit that programs which never end reach soon."""
    with Grader(time_limit=2.0, memory_limit_gib=0.25, checker=get_verifier("python")) as grader:
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
        ("def f(n):\n    return f(n + 1)\nf(0)", SUM, Grade.WRONG),
    ],
)  # fmt: skip
def test_any_other_is_not(grader, program, gold, grade):
    assert graded(grader, program, gold) is grade


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


# --- what attacks ---------------------------------------------------------------------------------


def test_the_list_of_attacks_has_every_class():
    assert {row["class"] for row in HOSTILE} >= {
        "fork bomb", "endless output", "huge output", "writing files", "sockets", "ctypes",
        "reading the tests", "sys.exit", "os._exit", "builtins", "__eq__", "proc", "threads",
        "signals", "recursion", "memory", "results", "processes", "time",
    }  # fmt: skip


@pytest.mark.parametrize("row", HOSTILE, ids=lambda row: row["id"])
def test_no_hostile_program_is_right_or_leaves_a_trace(row, quick, tmp_path, monkeypatch):
    """Each would be right, or leave a file, if it got at what it is after: the expected output lies
    in a file, in this process's environment, and in its memory.
    """
    (tmp_path / "tests.json").write_text(SECRET)
    before = set(Path("/tmp").iterdir()) - {tmp_path}
    monkeypatch.setenv("EXPECTED", SECRET)
    program = row["program"].replace("FOLDER", str(tmp_path)).replace("PID", str(os.getpid()))
    golds = {
        "stdin": json.dumps({"inputs": ["go\n"], "outputs": [SECRET]}),
        "calls": json.dumps({"inputs": [[1]], "outputs": [SECRET], "fn_name": "f"}),
        "asserts": json.dumps([f"assert f(1) == {SECRET!r}"]),
    }
    started = time.monotonic()
    grade = graded(quick, program, golds[row["tests"]])
    assert grade in (Grade.WRONG, Grade.TIMED_OUT, Grade.UNPARSABLE)
    assert time.monotonic() - started < 60
    assert [file.name for file in tmp_path.iterdir()] == ["tests.json"]
    assert not any("owned" in file.name for file in set(Path("/tmp").iterdir()) - before)
    # The next program is graded as if there had been none.
    assert graded(quick, "def add(a, b):\n    return a + b  # " + row["id"], ADD) is Grade.CORRECT


def test_no_program_outlives_its_grader():
    marker = "sleeper-5518"
    with Grader(time_limit=0.5, checker=get_verifier("python")) as grader:
        program = f"# {marker}\nimport time\nwhile True:\n    time.sleep(9)"
        assert graded(grader, program, SUM) is Grade.TIMED_OUT
        server = grader._workers.all[0].process.pid
        assert children(server) == []
    assert not Path(f"/proc/{server}").exists()


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


# --- where the kernel cannot ----------------------------------------------------------------------

UNCONFINED = """
    import ctypes, json, platform, struct, sys

    def kernel_without(*calls):
        "From now on these system calls fail as ones that the kernel does not have (ENOSYS, 38)."
        lines = [(0x20, 0, 0, 0)]
        for number in calls:
            lines += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50000 | 38)]
        code = b"".join(struct.pack("HBBI", *line) for line in [*lines, (0x06, 0, 0, 0x7FFF0000)])
        memory = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
        libc = ctypes.CDLL(None)
        libc.prctl(38, 1, 0, 0, 0)
        assert libc.prctl(22, ctypes.c_ulong(2), program, 0, 0) == 0

    landlock, arm = (444, 445, 446), platform.machine() == "aarch64"
    unshare, prctl = (97, 167) if arm else (272, 157)
    kernel_without(*landlock, unshare, *([prctl] if "filter" in sys.argv[1] else []))
    from sage_unsloth.grading.grader import Grader
    from sage_unsloth.grading.verifiers import get_verifier
    gold = json.dumps({"inputs": ["2 3"], "outputs": ["5"]})
    checker = get_verifier("python", allow_unconfined="allowed" in sys.argv[1])
    with Grader(checker=checker, time_limit=20.0) as grader:
        try:
            grader.check_workers()
        except ValueError as error:
            print("refused:", error)
        else:
            print(grader.grade_answers(["print(sum(map(int, input().split())))"], [gold])[0])
            print(grader.grade_answers(["import os\\nos.fork()\\nprint(5)"], [gold])[0])
            print(grader.kept_from)
"""


def without_layers(how):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(UNCONFINED), how],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="the layers are Linux's")
def test_a_kernel_that_cannot_confine_is_refused_unless_allowed():
    out, _ = without_layers("landlock")
    assert "must be kept from files, network, processes" in out
    assert "does not keep them from files; take Linux 5.13" in out and "--allow-unconfined" in out
    out, _ = without_layers("landlock and filter")
    assert "does not keep them from files, network, processes" in out
    out, err = without_layers("allowed: landlock and filter")
    assert out.splitlines() == ["correct", "wrong", "()"], "the audit hook still ends a fork"
    assert "run without being kept from files, network, processes" in err


def test_the_filter_refuses_what_the_kernel_headers_name():
    """Numbers of calls, read from the system's own headers where they are installed."""
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    numbers = set(refused_calls("x86_64"))
    assert len(numbers) == len(refused_calls("x86_64"))
    assert filter_instructions("riscv64") is None
    assert len(filter_instructions("aarch64") or b"") % 8 == 0
    if not header.is_file():
        pytest.skip("no kernel headers")
    text = header.read_text()
    named = {
        words[1].removeprefix("__NR_"): int(words[2])
        for words in map(str.split, text.splitlines())
        if len(words) == 3 and words[1].startswith("__NR_")
    }
    for name in ("fork", "execve", "socket", "kill", "ptrace", "unlink", "mount", "memfd_create"):
        assert named[name] in numbers, name
    for name in ("read", "write", "mmap", "exit_group", "futex", "brk", "close"):
        assert named[name] not in numbers, name


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
    ],
)
def test_an_assert_is_evaluated_outside(text, values, holds):
    assert Assert(text).holds(values) is holds


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
    with pytest.raises(ValueError, match="no plain value"):
        decode(json.loads(json.dumps(encode([object()]))))


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
        (float("nan"), 1.0, False),
        (10**400, 1.0, False),
    ],
)
def test_returned_values_are_compared_with_those_of_json(found, expected, equal):
    assert same(found, expected) is equal
