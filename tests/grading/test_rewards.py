"""The grader: what it accepts, what it must not, and that nothing a model writes can stop it."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sage_unsloth.grading import grader as rewards
from sage_unsloth.grading.checker import Checker, Grade, Kind, Verdict
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader, grade, grade_golds
from sage_unsloth.grading.mathematics import normalise, plain_number
from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.prompts import SOLUTION_END, SOLUTION_START
from sage_unsloth.runs.files import read_jsonl

TIME_LIMIT = 1.0
SLACK = 1.5  # seconds on a busy machine, beside the limit

NO_WORKER = [  # answer, gold: equal, and plain enough to need no algebra
    ("42", "42"),
    ("025", "25"),
    ("25", "025"),
    ("42.0", "42"),
    ("27", "27.0"),
    ("42.", "42"),
    ("+5", "5"),
    ("\u22125", "-5"),
    ("\u20135", "-5"),
    ("- 5", "-5"),
    ("-0", "0"),
    ("\uff11\uff12", "12"),
    ("$42$", "42"),
    ("$$42$$", "42"),
    ("**42**", "42"),
    (r"\boxed{42}", "42"),
    ("**$42$.**", "42"),
    ("1,000", "1000"),
    ("1 000 000", "1000000"),
    (r"10,\!000", "10000"),
    (r"1\,000", "1000"),
    ("1{,}000", "1000"),
    ("1\u202f000", "1000"),
    ("1e3", "1000"),
    ("1.5E-3", "0.0015"),
    (r"6.02 \times 10^{23}", "6.02e23"),
    (r"3 \cdot 10^8", "300000000"),
    ("1 3/4", "7/4"),
    ("-1 3/4", "-7/4"),
    ("84/2", "42"),
    (".5", "1/2"),
    ("42 dollars", "42"),
    ("1 point", "1"),
    (r"\frac{1}{2}", "0.5"),
    ("0.5", r"\frac12"),
    ("1 3/4", r"\frac{7}{4}"),
    (r"\dfrac{84}{2}", "42"),
    (r"-\tfrac { 7 } {4}", "-1.75"),
    (r"\frac{-7}{4}", "-7/4"),
]
NO_WORKER_WRONG = [
    ("42", "4.2"),
    ("42", "43"),
    ("42", "-42"),
    ("420", "42"),
    ("42.0000001", "42"),
    ("0.333333", "1/3"),
    ("1 3/4", "13/4"),
    ("1 3/4", "3/4"),
    ("1e3", "13"),
    ("1e-3", "1000"),
    (r"2 \times 10^{-19}", r"1 \times 10^{-19}"),  # math-verify rounds both to 0.000000
    ("1,000", "1"),
    ("42 dollars", "43"),
    ("43 = 42", "42"),
    (r"42 \text{ thousand}", "42"),
    (r"\frac{1}{2}", "2"),
    (r"\frac12", "12"),
    (r"\frac{1}{3}", "0.333333"),
    (r"\frac{2}{1}", r"\frac{1}{2}"),
]
BY_WORKER = [
    (r"1\frac{3}{4}", "7/4"),
    (r"**\frac{1}{2}**.", "0.5"),
    ("x = 42", "x=42"),
    ("(-42)", "-42"),
    ("6^2 + 6", "42"),
    ("[0, 1)", "[0,1)"),
    (r"\{2, 1\}", r"\{1, 2\}"),
    ("2i + 1", "1+2i"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    ("(3, \\pi/2)", r"\left( 3, \frac{\pi}{2} \right)"),
    # A percent sign is neither required nor forbidden: a question may ask for the number alone.
    (r"\left\{ 1, 2 \right\}.", r"\{1,2\}"),
]
BY_WORKER_WRONG = [
    ("4²", "42"),
    ("1 00", "100"),
    ("1 000,000", "1000000"),
    ("12 34", "1234"),
    ("1 3", "13"),
    ("1 7/4", "11/4"),
    ("1e3 1", "1000"),
    ("2**5", "25"),
    ("$42$ or $43$", "42"),
    ("5-", "-5"),
    ("42 x", "42"),
    ("42 dozen", "504"),
    (r"\pm 5", "5"),
    ("(0, 1)", "[0,1)"),
    ("[0, 1]", "[0,1)"),
    (r"\{1, 3\}", r"\{1, 2\}"),
]
UNPARSABLE = ["", " ", "\n", "$$", "****", "...", "42}", "{42", "42}{", "?", "\\"]
UNPARSABLE += ["> 42", r"42 \approx 42.1", "42 dozen", "43 # 42", "not 42", r"\not= 42"]
UNPARSABLE += ["43 \\boxed{42}", r"\boxed{43}, \boxed{42}", r"42}\boxed{"]
UNPARSABLE += ["{" * 100_000, "9" * 2_001, "1 " * 20_000]
# These two; the published list has more, and a slow test grades each of it.
HOSTILE = [r"10^{10^{10}}", r"\frac{1}{1+" * 60 + "1" + "}" * 60]


def tagged(answer):
    return f"{SOLUTION_START}{answer}{SOLUTION_END}"


@pytest.fixture(scope="module")
def grader():
    with Grader(time_limit=TIME_LIMIT) as grader:
        yield grader


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"1\frac{3}{4}", "7/4"),
        ("-1 3/4", "-7/4"),
        ("1 000.5", "2001/2"),
        ("2e-2", "1/50"),
    ]
    + [
        (text, None)
        for text in (
            "1/0",
            r"\frac{1}{0}",
            r"\frac123",
            r"\frac{1}{-2}",
            "1 4/3",
            "1 3/3",
            r"1\frac{3}{3}",
            "1 234/5",
            "1 000/3",
            "0,025",
            "1e1000",
            "42 x",
            "",
            ".",
        )
    ]
    + [(text, None) for text in ("4²", "½", "1½", "0x1A", "1_000", "inf", "nan", "5-", "1.2.3")],
)
def test_plain_number(text, number):
    assert plain_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize("text", [r"\{1\}", "**1", "2**3", "a_{1}", r"\sqrt{2}", "a*b"])
def test_normalise_leaves_alone_what_is_no_wrapper(text):
    assert normalise(text) == text


@pytest.mark.long
@given(st.text() | st.text("0123456789.,+-/eE$*{}\\ \n²½٤") | st.text().map(tagged))
@settings(deadline=None, max_examples=300)
def test_no_text_makes_extraction_or_normalising_raise(text):
    extract_answer(text, boxed=True)
    extract_answer(text)
    normal = normalise(text)
    assert normal is None or normalise(normal) is not None


@pytest.mark.smoke
@pytest.mark.parametrize(("answer", "gold"), NO_WORKER)
def test_plain_numbers_are_right_without_a_worker(answer, gold):
    with Grader() as grader:
        assert grader.grade_many([tagged(answer)], [gold]) == [Grade.CORRECT]
        assert grader._workers.all[0].process is None


@pytest.mark.parametrize(("answer", "gold"), NO_WORKER_WRONG)
def test_plain_numbers_are_wrong_without_a_worker(answer, gold):
    with Grader() as grader:
        assert grader.grade_many([tagged(answer)], [gold]) == [Grade.WRONG]
        assert grader._workers.all[0].process is None


@pytest.mark.parametrize(("answer", "gold"), BY_WORKER)
def test_right_by_algebra(grader, answer, gold):
    assert grader.grade_many([tagged(answer)], [gold]) == [Grade.CORRECT]


@pytest.mark.parametrize(("answer", "gold"), BY_WORKER_WRONG)
def test_wrong_by_algebra(grader, answer, gold):
    assert grader.grade_many([tagged(answer)], [gold])[0] in (Grade.WRONG, Grade.UNPARSABLE)


@pytest.mark.parametrize("answer", UNPARSABLE, ids=lambda text: repr(text[:12]))
def test_unparsable(grader, answer):
    started = time.monotonic()
    assert grader.grade_many([tagged(answer)], ["42"]) == [Grade.UNPARSABLE]
    assert time.monotonic() - started < TIME_LIMIT + SLACK


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("42 " + tagged("43"), Grade.WRONG),
        (tagged("42") + tagged("43"), Grade.UNPARSABLE),
        (tagged("43") + " 42", Grade.UNPARSABLE),
        (r"\boxed{42}", Grade.UNPARSABLE),
        ("the answer is 42", Grade.UNPARSABLE),
        (SOLUTION_START + "42", Grade.UNPARSABLE),
    ],
)
def test_only_the_inside_of_the_tag_counts(grader, completion, expected):
    assert grader.grade_many([completion], ["42"]) == [expected]


def start_worker(grader):
    """With its imports done, so that what is timed next is one answer alone."""
    (worker,) = grader._workers.all
    if worker.process is None:
        worker.start()
    return worker


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda text: text[:12])
def test_hostile_answers_end_at_the_limit_and_the_next_is_graded(grader, answer):
    start_worker(grader)
    started = time.monotonic()
    found = grader.grade_many([tagged(answer)], ["42"])[0]
    assert found is not Grade.CORRECT
    assert time.monotonic() - started < TIME_LIMIT + SLACK
    assert grader.grade_many([tagged("2+x")], ["x+2"]) == [Grade.CORRECT]


def run_script(text):
    """Runs a script, which has no `__main__` guard, in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def test_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "print('once')\n"
        "from sage_unsloth.grading.grader import Grader\n"
        "with Grader() as grader:\n"
        f"    print(*grader.grade_many([{tagged('x+1')!r}, {tagged('x+2')!r}], ['1+x', '1+x']))\n"
    )
    output = run_script(
        f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    ).stdout
    assert output.split() == ["once", "correct", "wrong"]


def test_grading_imports_no_torch():
    script = (
        "import sys, sage_unsloth.grading.grader; print('torch' in sys.modules, 'sympy' in "
        "sys.modules)"
    )
    assert run_script(script).stdout.split() == ["False", "False"]


def test_off_the_main_thread_and_from_several_at_once(grader):
    grades = {}

    def work(number):
        grades[number] = grader.grade_many([tagged(f"x+{number}")] * 2, [f"{number}+x", "x"])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20, 24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert grades == {n: [Grade.CORRECT, Grade.WRONG] for n in range(20, 24)}


def test_order_is_kept_over_two_workers():
    completions = [tagged(f"x+{number % 5}") for number in range(20)]
    with Grader(workers=2) as grader:
        grades = grader.grade_many(completions, ["x+3"] * 20)
    assert [grade is Grade.CORRECT for grade in grades] == [n % 5 == 3 for n in range(20)]


def test_equal_pairs_are_graded_once(grader, monkeypatch):
    asked = []
    monkeypatch.setattr(
        grader._workers, "ask", lambda pairs: [asked.append(p) or ["wrong", "text"] for p in pairs]
    )
    completions = [tagged("a+b"), "other words " + tagged("a+b"), tagged("a+c")]
    for _ in range(2):
        # Equal, so that nothing but this stand-in for a worker says that they are wrong.
        assert grader.grade_many(completions, ["b+a", "b+a", "c+a"]) == [Grade.WRONG] * 3
    assert asked == [("a+b", "b+a"), ("a+c", "c+a")]


def test_the_cache_forgets_the_least_recently_used(monkeypatch):
    monkeypatch.setattr(rewards, "CACHED_PAIRS", 2)
    grader = Grader()
    for answer in ("1", "2", "1", "3"):
        grader.grade_many([tagged(answer)], ["9"])
    assert list(grader._cache) == [("1", "9"), ("3", "9")]


def test_grade_of_one_completion():
    assert grade(tagged("(x+1)^2"), "x^2+2x+1") is Grade.CORRECT
    assert grade(tagged(r"9^{9^{9^{9}}}"), "42", time_limit=0.3) is Grade.WRONG, "refused early"


@pytest.mark.parametrize("gold", [None, "", "  ", 42])
def test_a_bad_gold_raises_and_is_named(grader, gold):
    with pytest.raises(ValueError, match="gold answer must") as error:
        grader.grade_many([tagged("42")], [gold])
    assert repr(gold)[:50] in str(error.value)
    assert "got " in str(error.value)


def test_a_bad_gold_raises_even_if_there_is_no_answer(grader):
    with pytest.raises(ValueError, match="gold answer must"):
        grader.grade_many(["no tag"], [""])


def test_answers_that_are_extracted_already(grader):
    completions = [tagged("42"), "no tag", r"\boxed{x+1}", tagged("(1 + x)")]
    answers = ["42", "42", "1+x", "x+1"]
    extracted = [grader.extract(completion) for completion in completions]
    assert extracted == ["42", None, None, "(1 + x)"]
    grades = grader.grade_answers(extracted, answers)
    assert grades == grader.grade_many(completions, answers)
    assert grades == ["correct", "unparsable", "unparsable", "correct"]
    with Grader(boxed=True) as evaluating:
        assert evaluating.extract(completions[2]) == "x+1"


def test_a_verdict_says_how_the_grade_was_reached(grader):
    pairs = [("42", "42"), ("43", "42"), (None, "42"), ("", "42"), ("1+x", "x+1"), ("x", "x+1")]
    verdicts = grader.judge_answers(*zip(*pairs, strict=True))
    assert verdicts == [
        ("correct", "number"),
        ("wrong", "number"),
        ("unparsable", "none"),
        ("unparsable", "none"),
        ("correct", "mathematics"),
        ("wrong", "mathematics"),
    ]
    assert all(isinstance(verdict, Verdict) for verdict in verdicts)
    assert [verdict.grade for verdict in verdicts] == grader.grade_answers(
        *zip(*pairs, strict=True)
    )


def test_golds_against_themselves(grader):
    assert grade_golds(grader, ["42", r"\frac{1}{2}"], ["42", "0.5"]) == ["correct"] * 2
    golds = ["42", "42}", r"\sqrt{2}", "?", r"\frac{", "hello)("]  # some are text, whatever it says
    assert grade_golds(grader, golds, golds) == ["correct"] * 2 + ["correct"] * 4
    assert grade_golds(grader, ["42", ""], ["42", "  "]) == ["correct", "unparsable"]
    assert grade_golds(grader, ["41"], ["42"]) == ["wrong"]


def test_lengths_must_agree(grader):
    with pytest.raises(ValueError, match="shorter"):
        grader.grade_many([tagged("42")] * 2, ["42"])


@pytest.mark.parametrize("limits", [{"workers": 0}, {"time_limit": 0}, {"memory_limit_gib": -1.0}])
def test_limits_must_be_positive(limits):
    name, value = next(iter(limits.items()))
    with pytest.raises(ValueError, match=f"{name}={value}"):
        Grader(**limits)


def test_the_reward_as_trl_calls_it(grader):
    reward = SolutionReward(grader)
    assert reward.__name__ == "solution_reward"
    assert reward.required_columns == ("answer",), "the parameters that TRL fills from the data set"
    texts = [tagged("42"), tagged("43"), "no tag", tagged(r"9^{9^{9^{9}}}")]
    values = reward(
        prompts=["?"] * 4, completions=texts, answer=["42"] * 4, completion_ids=[[1]] * 4
    )
    assert values == [1.0, 0.0, 0.0, 0.0]
    chats = [[{"role": "assistant", "content": text}] for text in texts[:2]]
    assert reward(prompts=[[]] * 2, completions=chats, answer=["42", "42"]) == [1.0, 0.0]
    assert reward.last_batch[0].items() >= {"extracted": "42", "kind": "number"}.items()
    assert reward.last_batch[0]["grader"] == grader.label
    assert reward.pop_kinds() == {"number": 2} and reward.pop_kinds() == {}
    assert reward.pop_counts() == {"correct": 2, "wrong": 3, "unparsable": 1, "timed out": 0}
    assert reward.pop_counts() == {"correct": 0, "wrong": 0, "unparsable": 0, "timed out": 0}


def test_of_several_messages_the_last_one_is_graded(grader):
    reward = SolutionReward(grader)
    turns = [{"role": "assistant", "content": tagged(number)} for number in ("41", "42")]
    assert reward(prompts=[[]] * 2, completions=[turns, turns[::-1]], answer=["42"] * 2) == [1, 0]
    assert [row["completion"] for row in reward.last_batch] == [tagged("42"), tagged("41")]
    assert reward(prompts=[[]], completions=[[]], answer=["42"]) == [0.0]


def test_a_data_set_without_answers(grader):
    with pytest.raises(ValueError, match="no column `answer`"):
        SolutionReward(grader)(prompts=["?"], completions=[tagged("42")])


ADVERSARIAL = read_jsonl(data_folder() / "adversarial_answers.jsonl")


def test_every_answer_of_the_published_list_has_the_grade_it_should():
    """Within the limit, in bounded memory, and whatever came before.

    Of those that no grader ends in time only "not correct" is expected, and half the limit is
    enough to see that they are stopped. `tagged_times`: the text so often, in one tag.
    """
    assert len(ADVERSARIAL) >= 600 and len({row["kind"] for row in ADVERSARIAL}) > 70
    wrong, largest = [], 0.0
    with (
        Grader(time_limit=TIME_LIMIT, memory_limit_gib=1.0, boxed=True) as patient,
        Grader(time_limit=TIME_LIMIT / 2, memory_limit_gib=1.0, boxed=True) as hasty,
    ):
        for row in ADVERSARIAL:
            endless = row["kind"] in ("takes for ever", "deep nesting")
            grader = hasty if endless else patient
            worker = start_worker(grader)
            text, times = row["completion"], row.get("tagged_times")
            started = time.monotonic()
            found = grader.grade_many([tagged(text * times) if times else text], [row["gold"]])[0]
            seconds = time.monotonic() - started
            expected = row["grade"]
            right = found != "correct" if expected == "not correct" else found == expected
            if not right or seconds > TIME_LIMIT + SLACK:
                wrong.append((row["kind"], text[:80], row["gold"], found, round(seconds, 1)))
            largest = max(largest, peak_gib(worker))
    assert not wrong
    assert 0 < largest < 1.0, f"a worker took {largest:.2f} GiB"


def peak_gib(worker):
    """The most memory that a worker has held, GiB; 0 for one that was killed."""
    if worker.pid is None:
        return 0.0
    status = Path(f"/proc/{worker.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 2**20


def test_answers_of_one_normal_form_are_compared_once(grader, monkeypatch):
    asked = []
    monkeypatch.setattr(
        grader._workers,
        "ask",
        lambda pairs: [asked.append(p) or ["correct", "text"] for p in pairs],
    )
    grader.grade_many([tagged(text) for text in ("a+d", "$a+d$", "**a+d**.")], ["d+a"] * 3)
    assert asked == [("a+d", "d+a")]


def test_another_checker_has_its_own_say():
    odd = Checker(
        name="odd",
        version=3,
        packages=("math-verify", "no-such-package"),
        plainly=lambda answer, gold: Verdict(
            Grade.CORRECT if answer == gold[::-1] else Grade.WRONG, Kind.TEXT
        ),
    )
    with Grader(checker=odd) as grader:
        assert grader.grade_many([tagged("ab"), tagged("ba")], ["ba", "ba"]) == ["correct", "wrong"]
    assert odd.label == f"odd 3, math-verify {version('math-verify')}, no-such-package None"
