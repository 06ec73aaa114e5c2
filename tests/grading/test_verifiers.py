"""Verifiers by name, and as a function of one's own."""

import json
import sys
import textwrap

import pytest

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.verifiers import VERIFIERS, get_verifier
from sage_unsloth.own_code import OwnCodeError

RIGHT, WRONG, NONE = Grade.CORRECT, Grade.WRONG, Grade.UNPARSABLE
SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
CASES = {
    "text": [
        ("Paris", "Paris", RIGHT),
        (" Paris\n", "Paris", RIGHT),
        ("Cafe\u0301", "Café", RIGHT),  # one character written as two
        ("paris", "Paris", WRONG),
        ("Paris or Rome", "Paris", WRONG),
        ("", "Paris", NONE),
        ("x" * 2_001, "Paris", NONE),
    ],
    "number": [
        ("42", "42", RIGHT),
        (r"\boxed{42.0}", "42", RIGHT),
        ("1,000", "1e3", RIGHT),
        (r"\frac{3}{4}", "0.75", RIGHT),
        ("0.333333", "1/3", WRONG),
        ("42 eggs", "42", NONE),
        ("6 * 7", "42", NONE),
        ("nan", "42", NONE),
    ],
    "number:0.01": [
        ("101", "100", RIGHT),
        ("101.1", "100", WRONG),
        ("0.009", "0", RIGHT),
        ("0.33", "1/3", RIGHT),
        ("-100", "100", WRONG),
    ],
    "choice": [
        ("C", "C", RIGHT),
        ("(C)", "C", RIGHT),
        ("c", "(C)", RIGHT),
        ("C. Paris", "C", RIGHT),
        ("The answer is (C)", "C", RIGHT),
        (r"\boxed{C}", r"\text{(C)}", RIGHT),
        ("J", "J", RIGHT),
        ("B", "C", WRONG),
        ("C or D", "C", WRONG),
        ("C D", "C", WRONG),
        ("C, not D", "C", WRONG),
        ("(C) and (B)", "C", WRONG),
        ("Cats", "C", NONE),
        ("C=A", "C", NONE),
        ("3", "C", NONE),
    ],
    "regex": [
        ("abc", "[a-c]+", RIGHT),
        ("abcd", "[a-c]+", WRONG),
        ("x abc", "abc", WRONG),  # as a whole
        ("[a-c]+", "[a-c]+", WRONG),
    ],
    "json": [
        ('{"n": 3}', SCHEMA, RIGHT),
        ('```json\n{"n": 3, "m": null}\n```', SCHEMA, RIGHT),
        ('{"n": "3"}', SCHEMA, WRONG),
        ("{}", SCHEMA, WRONG),
        ('{"n": 3', SCHEMA, NONE),
        ("[NaN]", "true", NONE),
        ("[" * 5_000, "true", NONE),
    ],
    "roles": [
        ("B: knave; A: knight", "A is a knight, B is a knave", RIGHT),
        ("A is a knave, B is a knave", "A is a knight, B is a knave", WRONG),
    ],
    "math-verify": [
        (r"\sqrt{117}", r"3\sqrt{13}", RIGHT),
        ("2, 1", r"\{1, 2\}", RIGHT),
        ("43", "42", WRONG),
    ],
    "math": [(r"\sqrt{117}", r"3\sqrt{13}", RIGHT), ("43", "42", WRONG)],
}
BAD_GOLDS = {
    "text": " ",
    "math-verify": " ",
    "number": "forty",
    "choice": "CD",
    "regex": "(",
    "json": "no JSON",
    "roles": "42",
    "countdown": '{"numbers": [2, "3"], "target": 5}',
    "python": "42",
    "reasoning-gym": '{"task": "chain_sum"}',
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_verifier_accepts(name):
    with Grader(checker=get_verifier(name)) as grader:
        answers, golds, grades = zip(*CASES[name], strict=True)
        found = grader.grade_answers(answers, golds)
    wrong = [
        (a[:40], g[:40], f.value) for a, g, e, f in zip(answers, golds, grades, found, strict=True)
        if f is not e
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("name", BAD_GOLDS)
def test_a_gold_that_a_verifier_cannot_read_is_refused(name):
    with pytest.raises(ValueError, match=r"a gold|the tests of a program"):
        get_verifier(name).check_gold(BAD_GOLDS[name])


def test_every_verifier_is_tested_and_has_its_own_label():
    assert set(VERIFIERS) - {"math"} == set(BAD_GOLDS)
    assert len({checker.label for checker in VERIFIERS.values()}) == len(VERIFIERS)
    assert get_verifier("math") is MATH and get_verifier(MATH) is MATH
    assert get_verifier("number:0.5").label != get_verifier("number").label


def test_what_never_ends_is_killed():
    with Grader(time_limit=1.0, checker=get_verifier("regex")) as grader:
        golds = ["(a+)+b", "a+"]
        assert grader.grade_answers(["a" * 60, "aa"], golds) == [Grade.TIMED_OUT, RIGHT]


def test_reasoning_gyms_own_scorer_takes_entries_of_a_file():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=5)[0]
    gold = json.dumps({"task": "chain_sum", "entry": entry})
    with Grader(checker=get_verifier("reasoning-gym")) as grader:
        found = grader.grade_answers([entry["answer"], "-1", None], [gold] * 3)
    assert found == [RIGHT, WRONG, NONE]


@pytest.mark.parametrize(
    "name, message",
    [
        ("maths", "a verifier is one of math, math-verify, number, text"),
        ("number:some", "number:TOLERANCE takes a number"),
        ("number:-1", "number:TOLERANCE takes a number"),
        ("number:2", "below 1"),
        ("no_module_of_mine:f", "no_module_of_mine is not there"),
        ("json.:dumps", "must be importable"),
        ("json:no_such", "got 'no_such'"),
    ],
)
def test_an_unknown_verifier_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        get_verifier(name)


# --- of one's own ---------------------------------------------------------------------------------

OWN = """
    import math

    def near(answer, gold):
        if not answer.strip("-.0123456789") == "":
            return None
        return 1 - abs(float(answer) - float(gold))

    def same(answer, gold):
        return answer == gold

    def breaks(answer, gold):
        return {"right": True}

    def divides(answer, gold):
        return 1 / (float(answer) - 1)

    def alone(answer):
        return True

    def writes(answer, gold):
        open("owned", "w")
        return True

    def hangs(answer, gold):
        while True:
            pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Names a function of a module in the working directory, where a user's lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("my_verifiers", None)
    (tmp_path / "my_verifiers.py").write_text(textwrap.dedent(OWN))
    return "my_verifiers:{}".format


def test_a_verifier_of_ones_own(own):
    checker = get_verifier(own("near"))
    assert checker.label.startswith("my_verifiers:near ")
    with Grader(checker=checker) as grader:
        grader.check_workers()
        found = grader.grade_answers(["2.0", "1.5", "two", None], ["2"] * 4)
        assert found == [RIGHT, WRONG, NONE, NONE]
    import my_verifiers  # pyright: ignore[reportMissingImports]

    with Grader(checker=get_verifier(my_verifiers.same)) as grader:
        assert grader.grade_answers(["a", "b"], ["a", "a"]) == [RIGHT, WRONG]


def test_its_label_changes_with_its_source(own, tmp_path):
    before = get_verifier(own("same")).label
    (tmp_path / "my_verifiers.py").write_text("def same(answer, gold):\n    return True\n")
    assert get_verifier(own("same")).label != before


def test_one_takes_an_answer_and_a_gold(own):
    with pytest.raises(ValueError, match=r"my_verifiers:alone takes \(answer\): too many"):
        get_verifier(own("alone"))


def test_one_that_raises_names_itself_and_its_line(own, caplog):
    grader = Grader(checker=get_verifier(own("divides")))
    with grader, pytest.raises(OwnCodeError) as found:
        grader.grade_answers(["2", "1"], ["7", "8"])
    assert (
        "the verifier my_verifiers:divides must return True, False, a number or None, but it "
        in (str(found.value))
    )
    assert (
        "raised ZeroDivisionError: float division by zero at my_verifiers.py:16, in divides for "
        "the answer '1' and the gold '8'"
    ) in str(found.value)
    assert 'my_verifiers.py", line 16, in divides' in caplog.text
    assert "direct cause" not in caplog.text


def test_one_that_breaks_hangs_or_leaves_its_process(own, tmp_path):
    with (
        Grader(checker=get_verifier(own("breaks"))) as grader,
        pytest.raises(RuntimeError, match=r"my_verifiers:breaks must return True, False, a number"),
    ):
        grader.grade_answers(["1"], ["1"])
    for name in ("hangs", "writes"):
        with Grader(time_limit=1.0, checker=get_verifier(own(name))) as grader:
            assert grader.grade_answers(["1"], ["1"]) == [Grade.TIMED_OUT]
    assert not (tmp_path / "owned").exists()


def test_one_without_a_module_is_refused():
    with pytest.raises(ValueError, match="a function at the top of a module"):
        get_verifier(lambda answer, gold: True)
