r"""Measures what answers that hang can cost: `python -m research.grading_attack`.

A batch of different answers, each of which would take minutes or for ever, with ordinary answers
among them, is graded by two workers. `through the grader` is what happens in a run: most are
refused before a worker sees them. `workers alone` puts all of them to the workers, as if no rule
refused any: that is the budget of a batch (`grading.workers`). `memory` puts many different
expressions to one worker and looks at its memory after each.
"""

import argparse
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.cost import costs_too_much
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import TYPICAL
from sage_unsloth.grading.worker import Worker
from sage_unsloth.grading.workers import CUT_SHORT, LATE, Workers
from sage_unsloth.prompts import SOLUTION_END, SOLUTION_START
from sage_unsloth.runs.files import write_json
from sage_unsloth.runs.record import environment

FUNCTION = "sage_unsloth.grading.mathematics:compare_math"
GOLD = r"\sqrt{2}+x"
# Twelve families that reach the limit; each takes a number, so that no two answers are equal.
HANGING = {
    "modulo of a power": r"3^{{10^{{8}}+{n}}} \mod 7",
    "tower": r"10^{{10^{{10}}}}+{n}",
    "integral": r"\int_0^\infty e^{{-x^3}}\sin(x^2+{n}) dx",
    "sum": r"\sum_{{k=1}}^{{10^7}} k^{{k}}+{n}",
    "product": r"\prod_{{k=1}}^{{10^6}} (k^2+{n})",
    "determinant": r"\det(\begin{{pmatrix}}" + r"\\".join(
        "&".join(f"x^{i}+{j}y^{j}" for j in range(7)) for i in range(7)
    ) + r"\end{{pmatrix}})+{n}",
    "matrix of ones": r"\operatorname{{ones}}(20000,20{n:03d})",
    "factorial": r"(10^6+{n})!",
    "binomial": r"\binom{{100000000}}{{50000{n:03d}}}",
    "power of a sum": r"(x+y+z+{n})^{{200}}",
    "radicals": r"(1+\sqrt{{2}}+\sqrt{{3}}+\sqrt{{5}})^{{25}}(1+\sqrt{{11}}+x)^{{25}}+{n}",
    "eigenvalues": r"\operatorname{{eigenvalues}}(\begin{{pmatrix}}a&b&c&d\\d&e&f&1\\g&h&i&{n}\\"
    r"1&2&3&x\end{{pmatrix}})",
}  # fmt: skip
# Of those that are read at all, the ones that no rule of `cost` may refuse here.
PAST_THE_RULES = (
    r"(1+\sqrt{{2}}+\sqrt{{3}}+\sqrt{{5}}+\sqrt{{7}})^{{25}}(1+\sqrt{{11}}+x)^{{25}}+{n}",
    r"\tan(\frac{{1}}{{\tan(\tan(\tan(\tan(\tan(x+{n})))))}})",
    r"(x+y+z+a+b+{n})^{{29}}(x-y)^{{29}}",
)
ORDINARY = [
    (r"x+\sqrt{2}", True),
    (r"\frac{2}{\sqrt{2}}+x", True),
    (r"x+\frac{\sqrt{8}}{2}", True),
    (r"x-\sqrt{2}", False),
    (r"\sqrt{3}+x", False),
]


def hanging(count: int) -> list[str]:
    """So many different answers, of all families in turn."""
    families = list(HANGING.values())
    return [families[n % len(families)].format(n=n) for n in range(count)]


def batch(answers: list[str]) -> list[tuple[str, bool | None]]:
    """The answers with the ordinary ones among them, and whether each of these is right."""
    found: list[tuple[str, bool | None]] = [(answer, None) for answer in answers]
    middle = len(found) // 2
    return [*found[:middle], *ORDINARY, *found[middle:]]


def through_the_grader(answers: list[str], workers: int, time_limit: float) -> dict[str, Any]:
    """Seconds and grades of one batch, graded as in training."""
    rows = batch(answers)
    texts = [f"{SOLUTION_START}{answer}{SOLUTION_END}" for answer, _ in rows]
    with Grader(workers, time_limit) as grader:
        for worker in grader._workers.all:
            worker.start()
        started = time.perf_counter()
        extracted = [grader.extract(text) for text in texts]
        verdicts = grader.judge_answers(extracted, [GOLD] * len(texts))
        seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 1),
        "grades": dict(Counter(verdict.grade.value for verdict in verdicts)),
        "kinds": dict(Counter(verdict.kind.value for verdict in verdicts)),
        "ordinary answers graded right": sum(
            (verdict.grade is Grade.CORRECT) == right
            for verdict, (_, right) in zip(verdicts, rows, strict=True)
            if right is not None
        ),
        "of": len(ORDINARY),
    }


def workers_alone(count: int, workers: int, time_limit: float) -> dict[str, Any]:
    """The same with answers that all reach the workers."""
    answers = [PAST_THE_RULES[n % len(PAST_THE_RULES)].format(n=n) for n in range(count)]
    rows = batch(answers)
    pool = Workers(FUNCTION, workers, time_limit, 1.0, TYPICAL)
    try:
        for worker in pool.all:
            worker.start()
        started = time.perf_counter()
        values = pool.ask([(answer, GOLD) for answer, _ in rows])
        seconds = time.perf_counter() - started
    finally:
        pool.stop()
    ended = [value for value in values if value is not LATE and value is not CUT_SHORT]
    return {
        "seconds": round(seconds, 1),
        "refused by no rule": sum(not costs_too_much(answer, GOLD) for answer in answers),
        "late": values.count(LATE),
        "cut short": values.count(CUT_SHORT),
        "came to an end": len(ended),
        "ordinary answers that came to an end": sum(
            value is not LATE and value is not CUT_SHORT
            for value, (_, right) in zip(values, rows, strict=True)
            if right is not None
        ),
        "of": len(ORDINARY),
    }


def memory(questions: int) -> dict[str, Any]:
    """Resident memory of one worker's child, MiB, over many large and different expressions."""
    worker = Worker(FUNCTION, 20.0, 1.0, TYPICAL)
    seen, children = [], set()
    try:
        worker.start()
        first = _resident(worker.pid)
        for n in range(questions):
            terms = "+".join(f"{n + k}x^{{{k}}}y" for k in range(1, 15))
            worker.ask((terms, f"{n}x+y"))
            if worker.pid is not None:
                seen.append(_resident(worker.pid))
                children.add(worker.pid)
    finally:
        worker.stop()
    return {
        "questions": questions,
        "MiB at the start": first,
        "MiB at most": max(seen),
        "MiB in the last tenth, at most": max(seen[-max(1, len(seen) // 10) :]),
        "children": len(children),
    }


def _resident(pid: int | None) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return round(int(status.partition("VmRSS:")[2].split()[0]) / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/grading"), help="folder")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds an answer")
    parser.add_argument("--questions", type=int, default=200, help="of the part on memory")
    options = parser.parse_args()
    result = {
        "answers": options.answers,
        "workers": options.workers,
        "time limit, s": options.time_limit,
        "environment": environment(),
    }
    common = (options.workers, options.time_limit)
    parts = {
        "through the grader": lambda: through_the_grader(hanging(options.answers), *common),
        "workers alone": lambda: workers_alone(options.answers, *common),
        "memory": lambda: memory(options.questions),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for name, measure in parts.items():
        before = os.getloadavg()[0]
        result[name] = measure() | {"load of the machine before": round(before, 1)}
        print(f"{name}: {result[name]}", flush=True)
        write_json(options.out / "attack.json", result)


if __name__ == "__main__":
    main()
