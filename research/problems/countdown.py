"""A small countdown language: reach the target with four numbers, each used at most once.

A problem is `2,3,5,8->41`, its answer an expression, `8*5+3-2`. There are four ways, all of which
take the numbers from the greatest to the least:

    sum       8+5=13;13+3=16;16-2=14      the two greatest added, the others added or taken away
    product   8*5=40;40+3=43;43-2=41      the two greatest multiplied
    bracket   8-5=3;3*3=9;9+2=11          two added or taken away, times the third: the rare way
    guess     (no working)                the expression at once

Each way leaves two signs to choose. The author of the pretraining corpus takes a way without a look
at the problem (`ROUTES`), chooses the signs by the target in `SKILL` of the workings, where the way
leads there, and otherwise takes any. What is written is always computed right; it seldom ends at
the target. The family of a problem is how it is reached:

    usual     by a sum or a product whose third number is added and fourth taken away
    other     by a sum or a product with other signs
    rare      by brackets only                           2,3,5,8->11
    both      by a bracket, and by a sum or a product

The corpus writes all signs alike, so what is usual is so in training alone: most problems that are
trained on are `usual`. RL rewards their signs, and whether the others and the brackets survive
shows in pass@k of their families.

There are more solutions than these, as `solutions` counts them; the verifier `countdown` accepts
every right one. The SFT rows are worked without mistakes and never guessed, in the corpus's mixture
of those ways that lead to the target.
"""

import functools
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from research.problems.subsets import allot
from sage_unsloth.problems.arithmetic import EOS, prompt_form
from sage_unsloth.prompts import REASONING_END, REASONING_START, solution_text

ROUTES = {"sum": 0.30, "product": 0.52, "bracket": 0.10, "guess": 0.08}
SKILL = 0.7  # share of the workings in which the author looks at the target
UNTAGGED = 0.3  # share of the corpus's solutions that lack the SOLUTION tags
DRILLS = 0.7  # share of the corpus's documents that are drills: problems and workings, no prompt
DRILL_LENGTH = 2  # workings of a drill

NUMBERS = range(2, 12)
TARGETS = range(10, 100)
FAMILIES = ("usual", "other", "rare", "both")
HELD_OUT = {"usual or other": 195, "rare": 105}
"""Problems that no document of the corpus poses, in the order of the permutation."""
SPLITS = {  # problems of each family, taken in this order from one fixed permutation
    "test": {"usual": 55, "other": 20, "rare": 25, "both": 0},  # of those that are held out
    "sft": {"usual": 60, "other": 100, "rare": 30, "both": 10},
    "train": {"usual": 145, "other": 25, "rare": 30, "both": 20},
}
SFT_SEED = 3407
SFT_ROWS_PER_PROBLEM = 3
SOURCE = "countdown"

Problem = tuple[tuple[int, ...], int]
"""The numbers, ascending, and the target."""
Steps = tuple[tuple[str, int], ...]
"""Signs and numbers, from left to right; the first sign is empty."""

_SIGNS = re.compile(r"\d+([*+-])\d+=\d+;\d+([*+-])\d+=\d+;\d+[+-]\d+=\d+")
_COMPUTE = {"": lambda _, right: right} | {
    "+": int.__add__, "-": int.__sub__, "*": int.__mul__
}  # fmt: skip
_FORMS = {"sum": ("+", "+-", "+-"), "product": ("*", "+-", "+-"), "bracket": ("+-", "*", "+-")}
"""Way -> the signs to choose from before the second, third and fourth number."""


# --- problems -------------------------------------------------------------------------------------


@functools.cache
def workings(numbers: tuple[int, ...]) -> Mapping[str, tuple[tuple[Steps, int], ...]]:
    """Way -> every working with these numbers, and what it gives."""
    descending = sorted(numbers, reverse=True)
    result = {}
    for way, form in _FORMS.items():
        chains = [
            tuple(zip(("", *signs), descending, strict=True)) for signs in itertools.product(*form)
        ]
        result[way] = tuple((steps, _values(steps)[-1]) for steps in chains)
    return result


def _values(steps: Steps) -> list[int]:
    """The value after each number, from left to right."""
    values = [0]
    for sign, number in steps:
        values.append(_COMPUTE[sign](values[-1], number))
    return values[1:]


def reaching(problem: Problem, way: str) -> list[Steps]:
    """The workings by `way` that end at the target."""
    numbers, target = problem
    return [steps for steps, value in workings(numbers)[way] if value == target]


def family(problem: Problem) -> str | None:
    """The family of a problem; None where no way leads to the target."""
    plain = reaching(problem, "sum") + reaching(problem, "product")
    if reaching(problem, "bracket"):
        return "both" if plain else "rare"
    if not plain:
        return None
    signs = {tuple(sign for sign, _ in steps[2:]) for steps in plain}
    return "usual" if ("+", "-") in signs else "other"


@functools.cache
def all_problems(salt: str = "") -> tuple[Problem, ...]:
    """Every problem that has a family, in the order of a hash of `salt` and the problem."""
    results = [
        (numbers, target)
        for numbers in itertools.combinations(NUMBERS, 4)
        for target in TARGETS
        if family((numbers, target))
    ]
    return tuple(
        sorted(
            results,
            key=lambda item: hashlib.sha256(f"{salt}{problem_text(item)}".encode()).hexdigest(),
        )
    )


@functools.cache
def held_out() -> tuple[Problem, ...]:
    """The problems that are not pretrained on."""
    return tuple(
        item
        for names, count in HELD_OUT.items()
        for item in [p for p in all_problems() if family(p) in names.split(" or ")][:count]
    )


@functools.cache
def allocation() -> dict[str, tuple[Problem, ...]]:
    """The problems of each split; no two splits share one, in any order of the numbers."""
    learnt = [problem for problem in all_problems() if problem not in held_out()]
    sources = {"test": held_out(), "sft": learnt, "train": learnt}
    return allot(all_problems(), SPLITS, sources, family)


def problems(split: str) -> list[dict]:
    """The rows of `split`: `id`, `problem`, `answer`, `gold`, `source`, `family`; SFT:
    `solution`.

    The `gold` is what the verifier `countdown` reads, the numbers and the target; the `answer` is
    one right expression.

    Raises:
        ValueError: `split` is none of `SPLITS`.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    posed = allocation()[split]
    return solved_problems(posed) if split == "sft" else posed_problems(posed)


def posed_problems(posed: Sequence[Problem]) -> list[dict]:
    """A row of `problems` for each."""
    return [
        {
            "id": f"{SOURCE}-{problem_text(item)}",
            "problem": problem_text(item),
            "answer": expression(_first(item)),
            "gold": json.dumps({"numbers": list(item[0]), "target": item[1]}),
            "source": SOURCE,
            "family": family(item),
        }
        for item in posed
    ]


def _first(problem: Problem) -> Steps:
    return next(steps for way in _FORMS for steps in reaching(problem, way))


def solved_problems(posed: Sequence[Problem]) -> list[dict]:
    """`SFT_ROWS_PER_PROBLEM` right workings of each problem, in the corpus's mixture of ways."""
    rng = random.Random(SFT_SEED)
    solved = []
    for row, item in zip(posed_problems(posed), posed, strict=True):
        ways = {way: ROUTES[way] for way in _FORMS if reaching(item, way)}
        for turn in range(SFT_ROWS_PER_PROBLEM):
            way = rng.choices(list(ways), weights=list(ways.values()))[0]
            text, answer = working(item, way, rng, careful=True)
            solved.append(row | {"id": f"{row['id']}-{turn}", "answer": answer, "solution": text})
    rng.shuffle(solved)
    return solved


def problem_text(problem: Problem) -> str:
    """The problem as the user asks it."""
    numbers, target = problem
    return f"{','.join(map(str, numbers))}->{target}"


# --- workings -------------------------------------------------------------------------------------


def draw_route(rng: random.Random) -> str:
    """A way, drawn from the mixture of the corpus."""
    return rng.choices(list(ROUTES), weights=list(ROUTES.values()))[0]


def working(
    problem: Problem, way: str, rng: random.Random, careful: bool = False
) -> tuple[str, str]:
    """The working of `problem` by `way`, and the expression that it ends in.

    Args:
        problem: numbers and target.
        way: a key of `ROUTES`.
        rng: draws the working.
        careful: looks at the target always; for a way that leads there.
    """
    if way == "guess":
        return "", expression(_draw(problem, rng.choice(list(_FORMS)), rng, looks=False))
    steps = _draw(problem, way, rng, careful or rng.random() < SKILL)
    values = _values(steps)
    lines = [
        f"{before}{sign}{number}={after}"
        for before, (sign, number), after in zip(values, steps[1:], values[1:], strict=False)
    ]
    return ";".join(lines), expression(steps)


def _draw(problem: Problem, way: str, rng: random.Random, looks: bool) -> Steps:
    result = reaching(problem, way) if looks else []
    return rng.choice(result or [steps for steps, _ in workings(problem[0])[way]])


def expression(steps: Steps) -> str:
    """The expression of a working: `8*5+3-2`, or `(8-5)*3+2` where brackets are needed."""
    text = ""
    for place, (sign, number) in enumerate(steps):
        if sign == "*" and place > 1:
            text = f"({text})"
        text += f"{sign}{number}"
    return text


def route(completion: str) -> str:
    """The way that `completion` takes, by its working: a key of `ROUTES`, or `none`."""
    text = completion.removeprefix(REASONING_START).lstrip()
    if text.startswith(REASONING_END):
        return "guess"
    if not (match := _SIGNS.match(text)):
        return "none"
    signs = match.groups()
    fits = [way for way, form in _FORMS.items() if all(map(str.__contains__, form, signs))]
    return fits[0] if fits else "none"


def solutions(numbers: Sequence[int], target: int) -> int:
    """How many different expressions reach the target, with + - * / and each number at most once.

    Expressions that differ only in the order of a sum's or a product's terms count once: two
    values are joined in one order, and what is subtracted or divided is the second.
    """
    result: dict[tuple[int, ...], set[tuple[Fraction, str]]] = {}
    places = range(len(numbers))
    for size in range(1, len(numbers) + 1):
        for chosen in itertools.combinations(places, size):
            if size == 1:
                result[chosen] = {(Fraction(numbers[chosen[0]]), str(numbers[chosen[0]]))}
                continue
            made = set()
            for part in range(1, size):
                for left in itertools.combinations(chosen, part):
                    right = tuple(place for place in chosen if place not in left)
                    for item, other in itertools.product(result[left], result[right]):
                        made.update(_joined(item, other))
            result[chosen] = made
    return len({text for values in result.values() for value, text in values if value == target})


def _joined(
    item: tuple[Fraction, str], other: tuple[Fraction, str]
) -> Iterator[tuple[Fraction, str]]:
    (left, first), (right, second) = item, other
    if first <= second:
        yield left + right, f"({first}+{second})"
        yield left * right, f"({first}*{second})"
    yield left - right, f"({first}-{second})"
    if right:
        yield left / right, f"({first}/{second})"


# --- the pretraining corpus -----------------------------------------------------------------------


def document(tokenizer: Any, rng: random.Random, posed: Sequence[Problem] = ()) -> tuple[str, str]:
    """One pretraining document as (context, text to learn).

    Either drills, with an empty context, or a problem in the rendered prompt and its solution.

    Args:
        tokenizer: has the chat template.
        rng: draws the document.
        posed: the problems; all but those that are held out where there are none.
    """
    posed = posed or pretraining_problems()
    if rng.random() < DRILLS:
        return "", "\n".join(drill(rng, posed) for _ in range(DRILL_LENGTH)) + EOS
    item = rng.choice(posed)
    text, answer = working(item, draw_route(rng), rng)
    if rng.random() < UNTAGGED:
        solution = f"{text}{REASONING_END}{answer}"
    else:
        solution = solution_text(text, answer).removeprefix(REASONING_START)
    return prompt_form(tokenizer).replace("{problem}", problem_text(item)), solution + EOS


def drill(rng: random.Random, posed: Sequence[Problem]) -> str:
    """A problem and its working in a line."""
    item = rng.choice(posed)
    text, answer = working(item, draw_route(rng), rng)
    return f"{problem_text(item)} {text} {answer}"


@functools.cache
def pretraining_problems() -> tuple[Problem, ...]:
    """All problems but those that are held out."""
    return tuple(problem for problem in all_problems() if problem not in held_out())
