"""The other embedded tasks for the installed `study`.

python -m sage_unsloth study --task research.tasks:countdown --reduced
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from research.data import COUNTDOWN_MODEL, DATA, FRESH_COUNTDOWN_MODEL, FRESH_MODEL
from research.problems import arithmetic_forms, fresh
from research.problems import countdown as first_countdown
from sage_unsloth.grading.checker import Checker
from sage_unsloth.grading.countdown import COUNTDOWN
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.problems.benchmarks import Benchmark
from sage_unsloth.problems.subsets import over_families
from sage_unsloth.study.tasks import Task, arithmetic_task, guess_product


def arithmetic_in_other_forms() -> Task:
    """The embedded task, and two sets out of distribution: those of `data/results/benchmark`."""
    task = arithmetic_task()
    swapped = over_families(arithmetic_forms.swapped_problems(), 50)
    with_zeros = over_families(arithmetic_forms.round_problems(), 36)
    others = (("swapped", swapped), ("round", with_zeros))
    more = [
        replace(_benchmark("arithmetic", rows, guess_product, MATH), name=name)
        for name, rows in others
    ]
    return replace(task, benchmarks=(*task.benchmarks, *more))


def arithmetic_fresh() -> Task:
    """The embedded task on problems, and with a base model, that nothing else was tried on."""
    return _drawn_anew(arithmetic_task(), fresh.ARITHMETIC, FRESH_MODEL, guess_product)


def countdown() -> Task:
    """Reaching a target with four numbers, on a tiny base model of its own."""
    task = arithmetic_task()
    assert task.sft is not None
    test = first_countdown.problems("test")
    return replace(
        task,
        name="countdown",
        title="embedded countdown, 0.7 M parameters",
        model=str(DATA / COUNTDOWN_MODEL),
        sft_rows=first_countdown.problems("sft"),
        rows=first_countdown.problems("train"),
        benchmarks=(_benchmark("countdown", test, guess_working, COUNTDOWN),),
        verifier=COUNTDOWN,
        sft=replace(task.sft, max_steps=120, learning_rate=1e-3),
    )


def countdown_fresh() -> Task:
    """Countdown on problems, and with a base model, that nothing else was tried on."""
    return _drawn_anew(countdown(), fresh.COUNTDOWN, FRESH_COUNTDOWN_MODEL, guess_working)


TASKS: dict[str, Callable[[], Task]] = {
    "arithmetic": arithmetic_task,
    "arithmetic-fresh": arithmetic_fresh,
    "countdown": countdown,
    "countdown-fresh": countdown_fresh,
}


def blind_chances(task: str, problem_ids: Sequence[str]) -> np.ndarray | None:
    """(P,) chances of one blind attempt at test problems; None for a task that is not embedded."""
    if task not in TASKS:
        return None
    chances = {row["id"]: row["guess"] for row in TASKS[task]().benchmarks[0].rows}
    return np.array([chances[item] for item in problem_ids])


def guess_working(row: dict) -> float:
    """The chance that a working with these numbers, drawn at random, reaches the target."""
    numbers, target = row["id"].removeprefix("countdown-").split("->")
    by_way = first_countdown.workings(tuple(map(int, numbers.split(","))))
    values = [value for made in by_way.values() for _, value in made]
    return values.count(int(target)) / len(values)


def _drawn_anew(
    task: Task, language: fresh.Fresh, model: str, guess: Callable[[dict], float]
) -> Task:
    name = f"{task.name}-fresh"
    return replace(
        task,
        name=name,
        title=task.title.replace(",", " drawn anew,"),
        model=str(DATA / model),
        sft_rows=language.problems("sft"),
        rows=language.problems("train"),
        benchmarks=(_benchmark(name, language.problems("test"), guess, task.verifier),),
    )


def _benchmark(
    name: str, rows: Sequence[dict], guess: Callable[[dict], float], checker: Checker
) -> Benchmark:
    """A test set, each problem with the chance of a blind attempt."""
    guessed = [row | {"guess": guess(row)} for row in rows]
    return Benchmark(name="test", rows=guessed, provenance=[{"embedded": name}], checker=checker)
