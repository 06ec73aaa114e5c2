"""Where in a completion the answer may stand, in training and in evaluation."""

import time

import pytest

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.extraction import END_TOKENS, extract_answer
from sage_unsloth.grading.grader import Grader
from sage_unsloth.prompts import (
    REASONING_END,
    REASONING_START,
    SOLUTION_END,
    SOLUTION_START,
    solution_text,
)


def tagged(answer):
    return f"{SOLUTION_START}{answer}{SOLUTION_END}"


BOTH = [  # completion, answer
    (solution_text("41 + 1", "42"), "42"),
    ("41 + 1" + REASONING_END + tagged("42"), "42"),  # the prompt has opened the working
    ("41 + 1" + REASONING_END + "\n\n" + tagged("42") + "\n", "42"),
    (tagged(" 42\n"), "42"),
    (tagged(""), ""),
    ("a base model's words: " + tagged("42"), "42"),
    (tagged("41") + REASONING_END + tagged("42"), "42"),
    (SOLUTION_START + REASONING_END + tagged("42"), "42"),
    (rf"\boxed{{41}}{REASONING_END}" + tagged("42"), "42"),
    (f"a{REASONING_END}b{REASONING_START}c{REASONING_END}" + tagged("42"), "42"),
    ("<think>41</think>" + tagged("42"), "42"),
    # in the working, or in one that never ends
    (tagged("42") + REASONING_END, None),
    (tagged("42") + REASONING_END + "42", None),
    (REASONING_START + tagged("42"), None),
    (f"a{REASONING_END}{REASONING_START}" + tagged("42"), None),
    ("<think>" + tagged("42"), None),
    (tagged("42") + REASONING_START, None),
    # no complete tag
    ("42", None),
    ("", None),
    (SOLUTION_START + "42", None),
    ("42" + SOLUTION_END, None),
    (SOLUTION_END + SOLUTION_START, None),
    (tagged("41") + SOLUTION_START + "42", None),
    (rf"\boxed{{42}}{REASONING_END}" + SOLUTION_START, None),
    # behind the end
    ("</s>" + tagged("42"), None),
    (f"41{REASONING_END}<|im_end|>" + tagged("42"), None),
    # what is no part of an answer
    (tagged("4\u200b2\ufeff"), "42"),
    ("<SOLU\u200bTION>42</SOLUTION>", "42"),
    (tagged("42</s>"), "42"),
    (tagged("42 <|im_end|>\n<|endoftext|> "), "42"),
    (tagged("42") + "</s><pad><pad>\n", "42"),
    (tagged("a </s> b"), "a </s> b"),
]
TRAINING = [
    (tagged("42") + " I hope it is correct.", None),
    (tagged("42") + " no, wrong: it is 43", None),
    (tagged("42") + tagged("43"), None),
    (tagged("42") + SOLUTION_END, None),
    (SOLUTION_END + tagged("42"), None),
    (SOLUTION_START + tagged("42"), None),
    (tagged("42") + "</s>Next problem", None),
    (r"\boxed{42}", None),
]
EVALUATION = [
    (tagged("42") + " I hope it is correct.", "42"),
    (tagged("42") + tagged("43"), "43"),
    (tagged("42") + SOLUTION_END, "42"),
    (SOLUTION_START + tagged("42"), "42"),
    (tagged("42") + "</s>Next: " + tagged("7"), "42"),
    (rf"\boxed{{1}}{REASONING_END}\boxed{{2}}", "2"),
    (rf"\boxed{{42}}{REASONING_END} The answer is 41.", None),
    (r"<think>\boxed{42}</think> The answer is 41.", None),
    (r"so \boxed{1} and \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
    (r"\boxed{42}<|endoftext|>\boxed{7}", "42"),
    (r"\boxed{\{1\}, \}}", r"\{1\}, \}"),
    (r"\boxed{1}" + tagged("2"), "2"),
    (tagged("2") + r"\boxed{1}", "2"),
    (r"\boxed{1" + "", None),
    ("42}", None),
    ("{42}", None),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("completion", "answer"), BOTH + TRAINING)
def test_in_training(completion, answer):
    assert extract_answer(completion) == answer


@pytest.mark.smoke
@pytest.mark.parametrize(("completion", "answer"), BOTH + EVALUATION)
def test_in_evaluation(completion, answer):
    assert extract_answer(completion, boxed=True) == answer


@pytest.mark.parametrize("token", END_TOKENS)
def test_every_end_token_ends(token):
    assert extract_answer(tagged("42" + token) + token) == "42"
    assert extract_answer(token + tagged("42")) is None
    assert extract_answer(tagged("42") + token + "7", boxed=True) == "42"


@pytest.mark.parametrize("piece", [SOLUTION_START, SOLUTION_END, "</s>", " ", "\u200b", "{", "< "])
def test_it_takes_linear_time(piece):
    started = time.process_time()
    for text in (piece * 100_000, tagged(piece * 100_000 + "1"), tagged("1") + piece * 100_000):
        extract_answer(text)
        extract_answer(text, boxed=True)
    assert time.process_time() - started < 2


def test_the_grader_takes_both_and_says_so_in_its_label():
    completion = tagged("42") + " I hope it is correct."
    with Grader() as training, Grader(boxed=True) as evaluating:
        assert training.grade_many([completion], ["42"]) == [Grade.UNPARSABLE]
        assert evaluating.grade_many([completion], ["42"]) == [Grade.CORRECT]
        assert training.label.endswith(", training extraction 2")
        assert evaluating.label == training.label.replace("training", "evaluation")
