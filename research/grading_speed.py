"""Measures what grading costs, beside math-verify called for one answer after another.

    python -m research.grading_speed --out data/results/grading

Answers are made up, since none may be copied: 234 problems with 256 answers each, 59,904. Of the
golds 175 are plainly written numbers, 23 fractions in LaTeX and 36 other LaTeX, as many as in AIME,
AMC and MATH-500 level 5. The baseline calls `verify(parse(gold), parse(answer))`, both sides in a
box, one answer after another in this process, with math-verify's own time limits. Two things decide
the ratio, and real runs differ in both, so several values of each are reported: how many different
answers a problem gets, and the order, since math-verify keeps its last 20 parses and so profits
where the answers to one problem come in a row. The baseline is timed on a part, whole problems or
whole samples, and its time for all is extrapolated from that. Both are timed in seconds of CPU, the
workers' included, once everything is imported: another process on the machine changes them little.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment

SAMPLES, INTEGERS, FRACTIONS, OTHERS = 256, 175, 23, 36
# Completions that the baseline is timed on: whole samples, and whole problems.
BASELINE = {
    "by sample": 4 * (INTEGERS + FRACTIONS + OTHERS),
    "by problem": (INTEGERS + FRACTIONS + OTHERS) // 6 * SAMPLES,
}

LATEX = [r"%d\sqrt{%d}", r"(%d, %d)", r"[%d, %d)", r"%d + %d i", r"%dx^2 + %dx",
         r"\frac{%d \pi}{%d}", r"\left( %d, \frac{\pi}{%d} \right)", r"%d - \sqrt{%d}"]  # fmt: skip


def answers(rng: random.Random, number: int, distinct: int) -> tuple[str, list[str]]:
    """A gold and 256 answers: the right one written in two ways, and `distinct` - 2 wrong ones."""
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    if number < INTEGERS:
        gold = str(a * b)
        right = [gold, f"{a * b}.0"]
        wrong = [str(a * b + i) for i in range(1, distinct)]
    else:
        form = r"\frac{%d}{%d}" if number < INTEGERS + FRACTIONS else rng.choice(LATEX)
        if form.startswith("["):
            b += 200  # an interval that is empty equals any other empty one for math-verify
        gold = form % (a, b)
        right = [gold, f"${gold}$"]
        wrong = [form % (a + i, b) for i in range(1, distinct)]
    pool = right + wrong[: max(0, distinct - 2)]
    share = rng.betavariate(0.6, 0.9)
    weights = [share / 2] * 2 + [(1 - share) / (i + 1) for i in range(len(pool) - 2)]
    return gold, rng.choices(pool, weights[: len(pool)], k=SAMPLES)


def completions(distinct: int) -> tuple[list[str], list[str]]:
    """59,904 completions, ordered by problem, and their golds."""
    rng = random.Random(0)
    numbers = list(range(INTEGERS + FRACTIONS + OTHERS))
    rng.shuffle(numbers)  # so that the baseline's part has every kind
    texts, golds = [], []
    for number in numbers:
        gold, given = answers(rng, number, distinct)
        texts += [f"Some working out.<SOLUTION>{answer}</SOLUTION>" for answer in given]
        golds += [gold] * SAMPLES
    return texts, golds


def one_after_another(texts: list[str], golds: list[str]) -> list[bool]:
    """The baseline: what a script does without a grader of its own."""
    from math_verify import parse, verify

    return [
        verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{extract_answer(text)}}}"))
        for text, gold in zip(texts, golds, strict=True)
    ]


def cpu_seconds(grader: Grader) -> float:
    """CPU seconds so far of this process, the grader's workers and the children that they had."""
    processes = [pid for item in grader._workers.all if item.process for pid in (item.process.pid,)]
    ticks = 0
    for pid in processes + [item.pid for item in grader._workers.all if item.pid]:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))  # its own and its ended children's
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def time_grading(distinct: int, order: str) -> dict:
    """CPU seconds of both ways, for `distinct` answers per problem, in one of the orders."""
    texts, golds = completions(distinct)
    if order == "by sample":
        turned = [i for sample in range(SAMPLES) for i in range(sample, len(texts), SAMPLES)]
        texts, golds = [texts[i] for i in turned], [golds[i] for i in turned]
    one_after_another(["<SOLUTION>x</SOLUTION>"], ["x"])  # pays for the imports
    part = BASELINE[order]
    started = time.process_time()
    plain = one_after_another(texts[:part], golds[:part])
    baseline = (time.process_time() - started) * len(texts) / part
    with Grader(workers=2, boxed=True) as grader:
        # Starts the workers, as the baseline has its imports.
        grader.grade_many(["<SOLUTION>x+1</SOLUTION>", "<SOLUTION>x+2</SOLUTION>"], ["1+x", "2+x"])
        started = cpu_seconds(grader)
        grades = grader.grade_many(texts, golds)
        ours = cpu_seconds(grader) - started
    return {
        "distinct_per_problem": distinct,
        "order": order,
        "completions": len(texts),
        "distinct_pairs": len(set(zip(texts, golds, strict=True))),
        "baseline_timed_on": part,
        "baseline_seconds": round(baseline, 1),
        "ours_seconds": round(ours, 2),
        "ratio": round(baseline / ours, 1),
        "grades_that_differ_in_that_part": sum(
            a != (b is Grade.CORRECT) for a, b in zip(plain, grades, strict=False)
        ),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/grading"),
        help="folder for evaluation.json (default: %(default)s)",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result = {
        "grading": [
            time_grading(distinct, order)
            for order in ("by sample", "by problem")
            for distinct in (8, 24, 64)
        ],
        "environment": environment(),
    }
    write_json(options.out / "evaluation.json", result)
    print(json.dumps({k: v for k, v in result.items() if k != "environment"}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
