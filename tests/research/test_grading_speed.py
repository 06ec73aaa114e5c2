"""The made-up answers of the measurement are as described."""

from research import grading_speed
from sage_unsloth.grading.mathematics import plain_number


def test_the_made_up_answers_are_what_the_benchmark_says():
    texts, golds = grading_speed.completions(24)
    assert len(texts) == len(golds) == 234 * 256
    plain = sum(plain_number(gold) is not None for gold in dict.fromkeys(golds))
    assert 180 < plain <= 198, "175 numbers and 23 fractions, some of them equal"
    per_problem = [len(set(texts[i : i + 256])) for i in range(0, len(texts), 256)]
    assert 15 < sum(per_problem) / 234 <= 24
