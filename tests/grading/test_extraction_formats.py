r"""Where an answer may stand where a run has tags of its own, or boxes: cases that a policy could
try, under the rules of training and of evaluation.
"""

import pytest

from sage_unsloth.grading.extraction import END_TOKENS, extract_answer
from sage_unsloth.grading.grader import Grader
from sage_unsloth.prompts import PROJECT_PROMPT, TAGS, prompt_format

ANSWER, PLAIN, BOXED, THINK_BOXED = (
    prompt_format(None, words)
    for words in (["think-answer"], ["<a>", "</a>"], ["boxed"], ["think-boxed"])
)

CASES = [  # completion, by the rules of training, of evaluation
    (ANSWER, "w</think><answer>42</answer>", "42", "42"),
    (ANSWER, "<think>w</think>\n<answer> 42 </answer>\n", "42", "42"),
    (ANSWER, "<answer>42</answer>", "42", "42"),
    (ANSWER, "<answer>41</answer></think><answer>42</answer>", "42", "42"),
    (ANSWER, "<answer>41</answer><answer>42</answer>", None, "42"),
    (ANSWER, "<answer>42</answer> no, 41", None, "42"),
    (ANSWER, "<answer>42", None, None),
    (ANSWER, "<think><answer>42</answer>", None, None),
    (ANSWER, "</s><answer>42</answer>", None, None),
    (ANSWER, "<answer>42</s></answer></s>", "42", "42"),
    (ANSWER, "<ans\u200bwer>42</answer>", "42", "42"),
    # The project's own tags are text here, and no answer.
    (ANSWER, "<SOLUTION>42</SOLUTION>", None, None),
    (ANSWER, "<start_working_out>w<answer>42</answer>", "42", "42"),
    (ANSWER, r"so \boxed{42}", None, "42"),
    (PLAIN, "w<a>42</a>", "42", "42"),
    (PLAIN, "<think>w</think><a>42</a>", "42", "42"),
    (PLAIN, "<think>w<a>42</a>", None, None),
    (PLAIN, "<a>41</a>w<a>42</a>", None, "42"),
    (BOXED, r"so it is \boxed{42}", "42", "42"),
    (BOXED, r"so it is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}", r"\frac{1}{2}"),
    (BOXED, "so **\\(\\boxed{42}\\)**.\n</s>", "42", "42"),
    (BOXED, r"\boxed{41} or \boxed{42}", None, "42"),
    (BOXED, r"\boxed{42}, or rather 41", None, "42"),
    (BOXED, r"\boxed{42}\boxed{42}", None, "42"),
    (BOXED, r"\boxed{42", None, None),
    (BOXED, r"\boxed{41} and \boxed{42", None, None),
    (BOXED, r"\boxed{\boxed{42}}", None, "42"),
    (BOXED, r"<think>\boxed{42}", None, None),
    (BOXED, r"<think>\boxed{41}</think>\boxed{42}", "42", "42"),
    (BOXED, r"</s>\boxed{42}", None, None),
    (BOXED, r"\boxed{42}</s>\boxed{41}", None, "42"),
    (BOXED, r"\boxed{42\}}", r"42\}", r"42\}"),
    (BOXED, r"\boxed{}", "", ""),
    (BOXED, "<SOLUTION>42</SOLUTION>", None, None),
    (BOXED, r"<SOLUTION>41</SOLUTION>\boxed{42}", "42", "42"),
    (THINK_BOXED, r"first \boxed{41}</think>\boxed{42}", "42", "42"),
    (THINK_BOXED, r"\boxed{42}</think> The answer is 41.", None, None),
]


@pytest.mark.parametrize(("prompt", "completion", "training", "evaluation"), CASES)
def test_where_an_answer_may_stand(prompt, completion, training, evaluation):
    assert extract_answer(completion, prompt=prompt) == training
    assert extract_answer(completion, boxed=True, prompt=prompt) == evaluation


@pytest.mark.parametrize("name", TAGS)
def test_what_sft_teaches_is_read_as_its_answer_by_both_rules(name):
    prompt = prompt_format(None, [name])
    text = prompt.solution_text(r"40+2=42, so \boxed{40} grows", "42")
    assert extract_answer(text, prompt=prompt) == "42"
    assert extract_answer(text, boxed=True, prompt=prompt) == "42"
    # The prompt may have opened the working already.
    if prompt.reasoning is not None:
        text = text.removeprefix(prompt.reasoning[0])
        assert extract_answer(text, prompt=prompt) == "42"


@pytest.mark.parametrize("token", END_TOKENS)
def test_an_end_token_ends_what_is_read_of_a_box(token):
    assert extract_answer(r"\boxed{42}" + token, prompt=BOXED) == "42"
    assert extract_answer(token + r"\boxed{42}", prompt=BOXED) is None


@pytest.mark.parametrize("piece", ["<answer>", "</answer>", "\\boxed{", "}", "<think>", "{", "\\"])
@pytest.mark.parametrize("prompt", [ANSWER, BOXED])
def test_long_texts_take_no_time(prompt, piece, time_limit=5.0):
    import time

    started = time.perf_counter()
    extract_answer(piece * 20_000, prompt=prompt)
    extract_answer(piece * 20_000, boxed=True, prompt=prompt)
    assert time.perf_counter() - started < time_limit


def test_a_grader_reads_by_its_format():
    texts = ["<answer>42</answer>", "<SOLUTION>42</SOLUTION>", r"\boxed{42}"]
    grades = {}
    for name, prompt in {"own": ANSWER, "project": PROJECT_PROMPT, "boxed": BOXED}.items():
        with Grader(prompt=prompt) as grader:
            grades[name] = [grade.value for grade in grader.grade_many(texts, ["42"] * 3)]
    assert grades == {
        "own": ["correct", "unparsable", "unparsable"],
        "project": ["unparsable", "correct", "unparsable"],
        "boxed": ["unparsable", "unparsable", "correct"],
    }
