"""Grades answers that nobody would write, and reports what became of them: `python
tests/fuzz_grading.py --count 10000`.

Every answer must get a grade, within the limit, whatever it does to its worker; this process must
neither die nor grow, and no answer may cost it more than `CALLER_SECONDS` of CPU and `CALLER_MIB`.
The kind "grammar" takes the grader's own tokens, each at its extremes. The answers come from a seed
alone, so an answer that breaks something can be made again: `--start NUMBER --count 1`.
"""

import argparse
import json
import random
import resource
import sys
import time
import tracemalloc
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue
from statistics import median

from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.checkers import ROLES
from sage_unsloth.grading.expressions import FUNCTIONS
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.grading.units import LABELS, SCALES, UNITS
from sage_unsloth.runs.files import read_jsonl, write_json
from sage_unsloth.runs.record import environment

ANSWERS = Path(__file__).resolve().parent.parent / "data" / "adversarial_answers.jsonl"
CALLER_SECONDS, CALLER_MIB = 0.05, 10.0
START = 30.0  # seconds beside the limit, for the successor of a killed worker on a busy machine
COMMANDS = (
    r"\frac", r"\dfrac", r"\sqrt", r"\sqrt[3]", r"\int", r"\sum_{n=1}^{9}", r"\prod",
    r"\lim_{x\to 0}", r"\binom", r"\text", r"\mathbb", r"\left(", r"\right)", r"\left[", r"\right]",
    r"\{", r"\}", r"\begin{pmatrix}", r"\end{pmatrix}", r"\\", "&", r"\infty", r"\pi", r"\cdot",
    r"\times", r"\div", r"\pm", r"\mp", r"\le", r"\ge", r"\ne", r"\in", r"\cup", r"\cap",
    r"\setminus", r"\emptyset", r"\log", r"\ln", r"\sin", r"\arctan", r"\circ", r"\%", r"\$", r"\,",
    r"\!", r"\quad", r"\overline", r"\lfloor", r"\rceil", r"\pmod", r"\gcd", r"\mathrm",
    r"\operatorname", r"\boxed", r"\tag", r"\def", r"\input", r"\write18",
)  # fmt: skip
SYMBOLS = (
    "+", "-", "*", "/", "^", "_", "=", "<", ">", "!", ",", ";", ":", "(", ")", "[", "]", "{", "}",
    "|", "$", "%", "'", " ",
)  # fmt: skip
ODD = (
    "\x00", "\x07", "\x1b[2J", "\x1b]0;owned\x07", "\r", "\n", "\x7f", "\u200b", "\u200d", "\u202e",
    "\u2066", "\ufeff", "\ufffd", "\ud800", "\udfff", "\U000e0041", "\u0301" * 40, "\u0660",
    "\u096b", "\u2155", "\u00b2", "\u2460", "\u06dd", "\u216b", "٣", "½", "𝟘", "١٢", "١/٢",
    "\u2028", "\u2029", "🙂", "ﷺ", "İ", "ß", "‮42‬",
)  # fmt: skip
CODE = (
    "__import__('os').system('TOUCH')", "().__class__.__base__.__subclasses__()",
    "exec('import os')", "eval('1+1')", "open('FILE','w').write('x')", "lambda: 0",
    "[x for x in ().__class__.__mro__]", "{{7*7}}", "${{7*7}}", "{{config}}", "$(touch FILE)",
    "`touch FILE`", "; TOUCH", "| TOUCH #", "' or 1=1 --", "<script>alert(1)</script>", "%s%n%x",
    "{0}", "{0.__class__}", r"\write18{TOUCH}", r"\input{/etc/passwd}",
    "Symbol('x').__init__.__globals__", "S('__import__(\"os\")')", "sympify('1')",
    "!!python/object/apply:os.system ['TOUCH']", "cos__import__", "E**(E**E)", "N(pi, 10**9)",
    "factorial(10**9)",
)  # fmt: skip
# Every sign and command of the grammar, and the insides of names that it makes by itself.
GRAMMAR = (
    *(rf"\{name}" for name in FUNCTIONS), *FUNCTIONS, *UNITS, *SCALES, *sorted(LABELS), r"\frac",
    r"\frac{", r"\sqrt", r"\sqrt[", r"\binom", r"\root", r"\of", r"\over", r"\choose", "^", "_",
    "**", "!", "'", '"', "...", r"\ldots", r"\infty", r"^\circ", "|", r"\lfloor", r"\rfloor",
    r"\lceil", r"\rceil", r"\begin{pmatrix}", r"\end{pmatrix}", r"\begin{array}{cc}", "&", r"\\",
    r"\text{", r"\text{ and }", r"\text{ cm}", r"\mathbb{R}", r"\mathbb{N}", r"\emptyset", r"\{",
    r"\}", "(", ")", "[", "]", "{", "}", r"\cup", r"\setminus", r"\mid", r"\in", r"\le", r"\ge",
    r"\ne", "<", ">", "=", "is", "and", "or", r"\lor", r"\land", r"\approx", r"\pm", r"\mp",
    r"\cdot", r"\times", r"\div", "/", "*", "+", "-", ",", ";", ":", "%", r"\%", "$", r"\$", "€",
    "Rs.", "USD", "repeating", "since", "because", "for all", "in total", "per", "x", "y", "n",
    "e", "i", "d", "dx", "E[", "T", "f(", "C(", r"\Gamma(", "cis", "log2(", "P(", r"\Delta",
    r"\vec{a}", r"\hat{p}", r"\overline{", r"\deriv{0}", r"\deriv8", "0xFF", "0b1", "base",
    "the point", "Area =", "The answer is", "~~", "~", "\udfff", "x_\udfff", "\u0305", "½", "²",
    "₂",
)  # fmt: skip
EXTREMES = (
    "0", "1", "-1", "0.5", ".5", "5.", "1e5000", "1e-5000", "2.5e5000", "1e10000000", "1e400",
    "1e401", "9" * 300, "9" * 301, "1" * 1_999, "0." + "3" * 1_500, "1,000", "1 000", "170",
    "300", "301", "1000", "0.(3)", r"0.\overline{72}", r"0.\overline{" + "7" * 500 + "}",
    "0.333...", "0." + "12" * 400 + "...",
)  # fmt: skip
GOLDS = (
    "42", "7/4", "0.5", "-3", "100000", r"\frac{\pi}{2}", "(1,2)", "x^2+1", r"\{1,2\}", "[0,1)",
    r"3\sqrt{13}", "1+2i", r"25\%", r"\text{east}",
)  # fmt: skip


def code(rng: random.Random, file: str = "/dev/shm/sage_unsloth_owned") -> str:
    return rng.choice(CODE).replace("TOUCH", f"touch {file}").replace("FILE", file)


def unicode_text(rng: random.Random) -> str:
    """Any code points, surrogates included."""
    planes = (0x80, 0x250, 0x2000, 0x2500, 0x10000, 0x110000)
    return "".join(chr(rng.randrange(rng.choice(planes))) for _ in range(rng.randrange(1, 200)))


def latex(rng: random.Random) -> str:
    """Commands, symbols and numbers in any order."""

    def piece() -> str:
        kind = rng.randrange(10)
        if kind < 4:
            return rng.choice(COMMANDS) + rng.choice(("", "{x}", "{2}{3}", "{", " "))
        return (
            rng.choice(SYMBOLS) if kind < 7 else number(rng) if kind < 9 else rng.choice("abxyzin")
        )

    return "".join(piece() for _ in range(rng.randrange(1, 40)))


def expression(rng: random.Random, depth: int = 0) -> str:
    """LaTeX that is well formed."""
    if depth > rng.randrange(1, 7):
        return rng.choice(
            (str(rng.randrange(100)), "x", "y", r"\pi", "e", "i", f"{rng.random():.3f}")
        )
    a, b = expression(rng, depth + 1), expression(rng, depth + 1)
    return rng.choice(
        (
            rf"\frac{{{a}}}{{{b}}}",
            rf"\sqrt{{{a}}}",
            f"({a})^{{{b}}}",
            f"{a} + {b}",
            f"{a} - {b}",
            rf"{a} \cdot {b}",
            f"({a}, {b})",
            rf"\{{{a}, {b}\}}",
            rf"\left[{a}, {b}\right)",
            f"{a} = {b}",
            rf"\sin({a})",
            rf"\log_{{{a}}}({b})",
            f"{a}!",
            f"|{a}|",
            rf"\begin{{pmatrix}}{a} & {b}\\{b} & {a}\end{{pmatrix}}",
            rf"\int_0^{{{a}}} {b} dx",
            rf"\sum_{{n=1}}^{{{a}}} {b}",
            rf"{a} \cup {b}",
            rf"x \in {a}",
            rf"\binom{{{a}}}{{{b}}}",
            rf"\lim_{{x\to {a}}} {b}",
            rf"{a} \le {b}",
        )
    )


def grammar(rng: random.Random) -> str:
    """Tokens of the grammar: one many times over, or some in any order, numbers extreme."""
    if rng.random() < 0.4:
        unit = rng.choice(GRAMMAR + EXTREMES) + rng.choice(("", "", " ", "2", "x", "{"))
        return (unit * rng.choice((1, 2, 30, 300, 1_000)))[:2_000]
    pieces = (
        rng.choice(EXTREMES if rng.random() < 0.3 else GRAMMAR)
        + rng.choice(("", " ", "{2}", "(x)"))
        for _ in range(rng.choice((1, 2, 3, 5, 8, 20, 100)))
    )
    return "".join(pieces)[:2_000]


def nested(rng: random.Random) -> str:
    before, after = rng.choice(
        (
            ("{", "}"),
            ("(", ")"),
            (r"\frac{1}{", "}"),
            (r"\sqrt{", "}"),
            ("2^{", "}"),
            (r"\left(", r"\right)"),
            ("-", ""),
            ("|", "|"),
            (r"\{", r"\}"),
            ("[", "]"),
            ("**", "**"),
            ("$", "$"),
            ("x_{", "}"),
            (r"\text{", "}"),
            (r"\sin(", ")"),
            ("f(", ")"),
            ("", "!"),
        )
    )
    depth = rng.choice((2, 5, 10, 30, 100, 300, 900))
    inside = rng.choice(("1", "x", "42", ""))
    return before * depth + inside + after * rng.choice((depth, depth, depth - 1, depth + 1))


def number(rng: random.Random) -> str:
    digits = str(rng.randrange(1, 10 ** rng.choice((1, 2, 3, 9, 30))))
    return rng.choice(
        (
            digits,
            f"-{digits}",
            f"{digits}.{digits}",
            f"1e{digits}",
            f"{digits}%",
            f"{digits}/{rng.randrange(9)}",
        )
    )


def huge(rng: random.Random) -> str:
    """Short to write, and more than a machine can hold."""
    n = rng.choice((3, 9, 99, 10**6, 10**30))
    return rng.choice(
        (
            f"{n}^{{{n}^{{{n}}}}}",
            f"{n}**{n}**{n}",
            f"10^{{{n}}}",
            f"{n}!!!",
            f"({n}!)!",
            f"1e{n}",
            f"1/{n}^{n}",
            "9" * rng.choice((100, 1000, 1999, 2001, 4301)),
            "0." + "0" * 1500 + "1",
            f"\\sum_{{k=1}}^{{{n}}} k^k",
            f"(x+1)^{{{n}}}",
            f"\\binom{{{n}}}{{{n // 2}}}",
            f"\\sqrt[{n}]{{{n}}}",
            f"\\log_{{{n}}} {n}^{{{n}}}",
            f"\\prod_{{k=1}}^{{{n}}} k",
            f"(x+y+z+1)^{{{n}}} = (x+y)^{{{n}}}",
            f"\\int_0^{{{n}}} e^{{x^{{{n}}}}} dx",
            f"\\sin({n}^{{{n}}})",
            f"{n} \\bmod {n}^{{{n}}}",
        )
    )


def tags(rng: random.Random) -> str:
    """A whole completion of tags, boxes and thoughts in any order."""
    parts = (
        "<SOLUTION>",
        "</SOLUTION>",
        "<SOLUTION",
        "</SOLUTION",
        "<start_working_out>",
        "<end_working_out>",
        r"\boxed{",
        "}",
        "42",
        "x",
        "<think>",
        "</think>",
        "<|im_end|>",
        "\n",
        "<solution>",
        "<SOLUTION><SOLUTION>",
        "<\u200bSOLUTION>",
    )
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 30)))


def odd(rng: random.Random) -> str:
    """A sound answer with characters in it that are no text, or do not look like what they are."""
    text = list(rng.choice(GOLDS))
    for _ in range(rng.randrange(1, 5)):
        text.insert(rng.randrange(len(text) + 1), rng.choice(ODD))
    return "".join(text)


def long(rng: random.Random) -> str:
    unit = rng.choice(
        (
            "1",
            "x+",
            "{",
            "}",
            "(",
            r"\frac{1}{2}",
            "<SOLUTION>",
            " ",
            "\x00",
            "é",
            r"\boxed{",
            "$",
            "**",
            "1,",
        )
    )
    return unit * (rng.choice((1_999, 2_000, 2_001, 100_000, 1_000_000)) // len(unit) + 1)


def mutated(rng: random.Random, rows: list[dict]) -> str:
    """One of the published adversarial answers with parts deleted, doubled, moved or changed."""
    text = rng.choice(rows)["completion"][:3_000]
    for _ in range(rng.randrange(1, 6)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        text = rng.choice(
            (
                text[:a] + text[b:],
                text[:b] + text[a:],
                text[:a] + rng.choice(ODD) + text[a:],
                text[:a] + rng.choice(SYMBOLS) + text[a:],
                text[:a] + rng.choice(COMMANDS) + text[a:],
                text[b:] + text[:b],
            )
        )[:6_000]
    return text


KINDS = {
    "unicode": unicode_text, "latex": latex, "expression": expression, "nested": nested,
    "grammar": grammar, "huge": huge, "tags": tags, "odd": odd, "long": long, "code": code,
    "mutated": mutated,
}  # fmt: skip
WEIGHTS = dict.fromkeys(KINDS, 4) | {
    "huge": 0.5,
    "long": 1,
    "nested": 1,
    "mutated": 6,
    "expression": 6,
    "grammar": 12,
}


def make(seed: int, number: int, rows: list[dict]) -> tuple[str, str, str]:
    """(kind, completion, gold) of one number."""
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices(list(WEIGHTS), WEIGHTS.values())[0]
    text = KINDS[kind](rng, rows) if kind == "mutated" else KINDS[kind](rng)
    if kind not in ("tags", "mutated"):
        before, after = rng.choice(
            (("<SOLUTION>", "</SOLUTION>"),) * 4
            + ((r"\boxed{", "}"), ("<SOLUTION> $", "$ </SOLUTION>"))
        )
        text = f"{rng.choice(('', 'so: ', code(rng)))}{before}{text}{after}"
    return kind, text, rng.choice(GOLDS)


def cost_to_the_caller(completion: str, gold: str) -> tuple[float, float]:
    """CPU seconds and MiB that an answer takes in the process that grades, the worker aside."""
    answer = extract_answer(completion, boxed=True)
    MATH.plainly("1", gold)  # what is remembered of a gold
    seconds = float("inf")
    for _ in range(2):  # the collector of what is kept of other answers may run in one of them
        began = time.thread_time()
        MATH.plainly(answer, gold)
        seconds = min(seconds, time.thread_time() - began)
    tracemalloc.start()
    MATH.plainly(answer, gold)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 2**20


def fuzz(
    count: int,
    *,
    seed: int = 0,
    start: int = 0,
    workers: int = 1,
    time_limit: float = 5.0,
    minutes: float = float("inf"),
) -> dict:
    """Grades answers `start` to `start + count` one at a time; returns what became of them, as
    `fuzz.json` has it.

    Raises:
        AssertionError: an answer took longer than the limit and a new worker's start.
    """
    rows = read_jsonl(ANSWERS)
    graders, roles = SimpleQueue(), Grader(checker=ROLES)
    ended = time.monotonic() + 60 * minutes

    def one(number: int) -> tuple[int, str, Grade, float, float, tuple[float, float]] | None:
        if time.monotonic() > ended:
            return None
        kind, completion, gold = make(seed, number, rows)
        grader = graders.get()
        try:
            began = time.perf_counter()
            grade = grader.grade_many([completion], [gold])[0]
            seconds = time.perf_counter() - began
        finally:
            graders.put(grader)
        assert seconds < time_limit + START, f"answer {number} took {seconds:.1f} s"
        began = time.perf_counter()
        roles.grade_many([completion], ["A is a knight"])
        seconds_of_roles = time.perf_counter() - began
        cost = cost_to_the_caller(completion, gold) if workers == 1 else (0.0, 0.0)
        return number, kind, grade, seconds, seconds_of_roles, cost

    with ExitStack() as stack, ThreadPoolExecutor(workers) as threads:
        every = [stack.enter_context(Grader(1, time_limit, boxed=True)) for _ in range(workers)]
        for grader in every:
            grader.grade_many(["<SOLUTION>x + 1</SOLUTION>"], ["1 + x"])
            graders.put(grader)
        before = _memory()
        numbers = range(start, start + count)
        found = list(tqdm(threads.map(one, numbers), total=count, unit="answer", mininterval=10))
        deaths = sum(worker.deaths for grader in every for worker in grader._workers.all)
    found = [row for row in found if row is not None]
    grades = Counter(row[2] for row in found)
    slowest = sorted(found, key=lambda row: row[3], reverse=True)[:10]
    return {
        "answers": len(found),
        "seed": seed,
        "start": start,
        "time_limit_seconds": time_limit,
        "grades": {grade.value: grades[grade] for grade in Grade},
        "by_kind": {
            kind: {g.value: n for g in Grade if (n := sum(row[1:3] == (kind, g) for row in found))}
            for kind in KINDS
        },
        "correct": [row[0] for row in found if row[2] is Grade.CORRECT],
        "caller": {
            "most_cpu_seconds": round(max(row[5][0] for row in found), 4),
            "most_mib": round(max(row[5][1] for row in found), 2),
        },
        "slowest": [
            {"seconds": round(seconds, 2), "kind": kind, "number": number, "grade": grade.value}
            for number, kind, grade, seconds, *_ in slowest
        ],
        "median_seconds": round(median(row[3] for row in found), 4),
        "slowest_roles_seconds": round(max(row[4] for row in found), 3),
        "workers_ended_over_an_answer": deaths,
        "kept_from": sorted(
            {name for grader in every for name in grader._workers.all[0].kept_from}
        ),
        "parent_peak_mib": {"after the first answer": before, "at the end": _memory()},
        "rules": MATH.label,
        "environment": environment(),
    }


def _memory() -> float:
    """The most that this process has held, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first answer")
    parser.add_argument("--time-limit", type=float, default=5.0, help="seconds an answer")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    if options.count == 1:
        rows = read_jsonl(ANSWERS)
        print(ascii(make(options.seed, options.start, rows))[:4_000])
    result = fuzz(
        options.count,
        seed=options.seed,
        start=options.start,
        workers=options.workers,
        time_limit=options.time_limit,
        minutes=options.minutes,
    )
    print(json.dumps({k: v for k, v in result.items() if k != "environment"}, indent=1))
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)


if __name__ == "__main__":
    main()
