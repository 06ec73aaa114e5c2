"""The README repeats the committed measurement, and the made-up answers are as described."""

import json
from pathlib import Path

from sage_unsloth.grading.mathematics import plain_number
from sage_unsloth.lab import grading_speed


def test_readme_says_what_the_committed_measurement_says():
    root = Path(__file__).parents[2]
    readme = " ".join((root / "README.md").read_text().split())
    result = json.loads((root / "data" / "results" / "grading" / "evaluation.json").read_text())
    ratios = {(row["order"], row["distinct_per_problem"]): row for row in result["grading"]}
    by_sample, by_problem = ratios["by sample", 24], ratios["by problem", 24]
    assert not any(row["grades_that_differ_in_that_part"] for row in result["grading"])
    assert (
        f"took {by_sample['ours_seconds']:.0f} s with two workers, `verify(parse, parse)` one "
        f"after another "
        f"{by_sample['baseline_seconds']:.0f} s where answers come sample by sample, and "
        f"{by_problem['baseline_seconds']:.0f} s"
    ) in readme
    assert f"{by_sample['ratio']:.0f} and {by_problem['ratio']:.0f} times as long" in readme
    for count, text in ((8, "{} and {} times at 8 of them"), (64, "{} and {} at 64")):
        pair = (ratios[order, count]["ratio"] for order in ("by sample", "by problem"))
        assert text.format(*(f"{ratio:.0f}" for ratio in pair)) in readme
    assert f"took {result['bootstrap']['curve_seconds']:.2f} s" in readme
    assert f"{result['sampling']['ratio']:.2f} times as long as `generate`" in readme
    differ = result["sampling"]["completions_that_differ"]
    assert (
        f"{differ['in batches of other sizes and orders']} of "
        f"{result['sampling']['completions']:,} completions" in readme
    )
    assert f"{differ['alone']} of {differ['alone, of']} alone" in readme
    listed = len((root / "data" / "adversarial_answers.jsonl").read_text().splitlines())
    assert f"lists {listed} answers" in readme


def test_the_made_up_answers_are_what_the_benchmark_says():
    texts, golds = grading_speed.completions(24)
    assert len(texts) == len(golds) == 234 * 256
    plain = sum(plain_number(gold) is not None for gold in dict.fromkeys(golds))
    assert 180 < plain <= 198, "175 numbers and 23 fractions, some of them equal"
    per_problem = [len(set(texts[i : i + 256])) for i in range(0, len(texts), 256)]
    assert 15 < sum(per_problem) / 234 <= 24
