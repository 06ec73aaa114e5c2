r"""Measures what the grader accepts and refuses on the golds of real benchmarks.

    python -m research.red_team --benchmark math500=math500.jsonl --out red_team.json

Each distinct gold, or a sample of those of one shape, is written in ways that are right and ways
that are wrong (`red_team_forms`), and the grader's word on each is counted by class: false accepts
are wrong writings graded correct, false rejects right ones that are not. A wrong writing that was
accepted, and a list of keys that no gold should open to, are tried on every gold of the benchmark.
"""

import argparse
import json
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

from research.red_team_forms import Writing, shape, writings
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.grader import Grader, grade_golds
from sage_unsloth.problems.benchmarks import load_benchmark
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment

KEYS = (
    r"0.0\text{ J}", "0.0 m", "x", "y = x", "1 = 1", "0 = 0", "x = x", "A", "(A)", "A or B", "A=B",
    r"\infty", r"\emptyset", r"\{\}", "()", "(,)", r"\text{ }", "i", "e", "?", "none", "the answer",
    r"\mathbb{R}", r"(-\infty, \infty)", r"x \in \mathbb{R}", "all", "n", "any", "0/0", "nan",
    "True",
    r"\pm 1", "1, 2, 3, 4, 5", r"\frac{0}{0}", "0^0", r"\infty - \infty", r"0 \cdot \infty", "!",
    r"\boxed{}", "x > 0", "x \\neq 0", r"1 \pm 1", "1 or 2 or 3", "-1, 0, 1", r"\text{answer}",
)  # fmt: skip
BATCH = 2_000


def sample_golds(golds: list[str], per_shape: int, rng: random.Random) -> list[str]:
    """The distinct golds, of each shape at most `per_shape`."""
    shapes: dict[str, list[str]] = defaultdict(list)
    for gold in dict.fromkeys(golds):
        shapes[shape(gold)].append(gold)
    return [
        gold
        for result in shapes.values()
        for gold in (result if len(result) <= per_shape else rng.sample(result, per_shape))
    ]


def attack(golds: list[str], grader: Grader, per_shape: int, seed: int) -> dict:
    """What became of the writings of these golds, and of the keys; see the module."""
    rng = random.Random(seed)
    chosen = sample_golds(golds, per_shape, rng)
    own = grade_golds(grader, chosen, chosen)
    failing = [
        gold for gold, result in zip(chosen, own, strict=True) if result is not Grade.CORRECT
    ]
    chosen = [gold for gold in chosen if gold not in failing]
    tried: list[tuple[str, Writing]] = []
    for gold in chosen:
        seen: dict[str, Writing] = {}
        for writing in writings(gold, rng):
            seen.setdefault(writing.text, writing)
        tried += [(gold, writing) for writing in seen.values()]
    grades: list[Grade] = []
    for start in range(0, len(tried), BATCH):
        part = tried[start : start + BATCH]
        grades += grader.grade_answers([w.text for _, w in part], [gold for gold, _ in part])
    classes: dict[str, Counter] = defaultdict(Counter)
    examples: dict[str, list[list[str]]] = defaultdict(list)
    accepted: dict[str, str] = {}
    for (gold, writing), grade in zip(tried, grades, strict=True):
        count = classes[writing.family]
        right = grade is Grade.CORRECT
        count["right" if writing.right else "wrong"] += 1
        if right != writing.right:
            count["false_accepts" if right else "false_rejects"] += 1
            if len(examples[writing.family]) < 5:
                examples[writing.family].append([writing.text, gold, grade.value])
        if right and not writing.right:
            accepted[writing.text] = gold
    return {
        "golds": len(set(golds)),
        "golds_tried": len(chosen),
        "golds_not_their_own": failing,
        "classes": {name: dict(count) for name, count in sorted(classes.items())},
        "examples": dict(examples),
        "keys": _keys(accepted, chosen, grader),
    }


def _keys(accepted: dict[str, str], golds: list[str], grader: Grader) -> dict:
    """Wrong writings that are right for several golds, by how many; the worst are named."""
    shown = list(accepted)[:30]  # an answer that opens several is among any so many
    opened = {}
    for text in dict.fromkeys((*KEYS, *shown)):
        grades = grader.grade_answers([text] * len(golds), golds)
        right = sum(grade is Grade.CORRECT for grade in grades)
        if right > 1:
            opened[text] = right
    worst = sorted(opened.items(), key=lambda item: -item[1])
    return {
        "tried": len(set(KEYS) | set(shown)),
        "right_for_several": len(opened),
        "worst": worst[:8],
    }


def totals(results: dict[str, dict]) -> dict:
    """Counts and rates over all benchmarks, and by class."""
    classes: dict[str, Counter] = defaultdict(Counter)
    for result in results.values():
        for name, count in result["classes"].items():
            classes[name].update(count)
    every = Counter()
    for count in classes.values():
        every.update(count)
    return {
        **{name: every[name] for name in ("wrong", "false_accepts", "right", "false_rejects")},
        "false_accept_rate": round(every["false_accepts"] / max(1, every["wrong"]), 6),
        "false_reject_rate": round(every["false_rejects"] / max(1, every["right"]), 6),
        "right_for_several": sum(r["keys"]["right_for_several"] for r in results.values()),
        "golds_not_their_own": sum(len(r["golds_not_their_own"]) for r in results.values()),
        "classes": {name: dict(count) for name, count in sorted(classes.items())},
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        required=True,
        metavar="NAME=FILE",
        help="golds of this file, as load_benchmark reads it; repeat it for several",
    )
    parser.add_argument("--per-shape", type=int, default=60, help="golds (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds an answer")
    parser.add_argument("--out", type=Path, required=True, help="file for the result")
    options = parser.parse_args()
    results = {}
    with Grader(workers=options.workers, time_limit=options.time_limit) as grader:
        label = grader.checker.label
        for argument in options.benchmark:
            name, _, path = argument.partition("=")
            golds = [row["answer"] for row in load_benchmark(name, path).rows]
            results[name] = attack(golds, grader, options.per_shape, options.seed)
    result = {
        "checker": label,
        "per_shape": options.per_shape,
        "seed": options.seed,
        "total": totals(results),
        "benchmarks": results,
        "environment": environment(),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, result)
    print(json.dumps({"checker": label, **result["total"]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
