r"""Compares our grader with math-verify on the golds of real benchmarks.

    python -m research.second_opinion --benchmark math500=math500.jsonl --out FILE

Three answers to each gold: itself, the answer in its worked solution (the last `\boxed{}`, or what
follows `####`), and the gold of the next row. Where the graders differ, the case is listed, for a
person to decide.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

from research.red_team_forms import shape
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.extraction import closing_brace
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.runs.files import read_jsonl, write_json
from sage_unsloth.runs.record import environment

LISTED = 60
SOLUTIONS = ("solution", "answer")
"""Columns that may hold a worked solution."""


def final_answer(solution: str) -> str | None:
    """The answer at the end of a worked solution, or None."""
    if "####" in solution:
        return solution.rpartition("####")[2].strip()
    start = solution.rfind(r"\boxed{") + len(r"\boxed")
    end = closing_brace(solution, start) if start > len(r"\boxed") else None
    return None if end is None else solution[start + 1 : end].strip()


def pairs_of(rows: list[dict]) -> list[tuple[str, str, str]]:
    """(what the answer is, answer, gold) of a benchmark's rows."""
    golds = [str(row["answer"]).rpartition("####")[2].strip() for row in rows]
    pairs = []
    for number, (row, gold) in enumerate(zip(rows, golds, strict=True)):
        pairs.append(("the gold", gold, gold))
        solutions = [final_answer(str(row.get(column, ""))) for column in SOLUTIONS]
        pairs += [("its solution's answer", text, gold) for text in solutions if text is not None]
        pairs.append(("another gold", golds[(number + 1) % len(golds)], gold))
    return list(dict.fromkeys(pairs))


def compare(pairs: list[tuple[str, str, str]]) -> dict:
    """Counts by what the answer is and by both grades, and the cases in which they differ."""
    answers, golds = [pair[1] for pair in pairs], [pair[2] for pair in pairs]
    with Grader() as grader, Grader(checker=get_verifier("math-verify")) as other:
        grades = grader.grade_answers(answers, golds)
        other_grades = other.grade_answers(answers, golds)
    counts: Counter[str] = Counter()
    differ = []
    for (kind, answer, gold), first, second in zip(pairs, grades, other_grades, strict=True):
        counts[f"{kind}: ours {first.value}, math-verify {second.value}"] += 1
        if (first is Grade.CORRECT) != (second is Grade.CORRECT):
            both = {"ours": first.value, "math-verify": second.value}
            differ.append(
                {"kind": kind, "shape": shape(gold), "answer": answer, "gold": gold} | both
            )
    return {"pairs": len(pairs), "counts": dict(sorted(counts.items())), "differ": differ}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--benchmark", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = {}
    for argument in options.benchmark:
        name, _, path = argument.partition("=")
        results[name] = compare(pairs_of(read_jsonl(path)))
    with Grader() as grader:
        label = grader.checker.label
    result = {
        "rules": label,
        "second": get_verifier("math-verify").label,
        "benchmarks": {
            name: result | {"differ": result["differ"][:LISTED], "differing": len(result["differ"])}
            for name, result in results.items()
        },
        "environment": environment(),
    }
    write_json(options.out, result)
    shown = {name: matches["counts"] for name, matches in result["benchmarks"].items()}
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
