"""The four embedded tasks are tasks of the installed study."""

import pickle

import pytest

from research.tasks import TASKS, guess_working
from sage_unsloth.grading.countdown import COUNTDOWN
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.study.tasks import get_task, guess_product, shrink

NAMES = ["arithmetic", *(f"research.tasks:{n}" for n in ("arithmetic_fresh", "countdown"))]
NAMES += ["research.tasks:countdown_fresh"]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_is_complete_and_asks_what_is_not_trained_on(name):
    task = get_task(name)
    assert TASKS[task.name]().rows == task.rows
    (test,) = task.benchmarks
    checker, guess = (COUNTDOWN, guess_working) if "countdown" in name else (MATH, guess_product)
    assert test.checker == task.verifier == checker
    assert [row["guess"] for row in test.rows] == pytest.approx([guess(r) for r in test.rows])
    seen = {row["problem"] for rows in (task.sft_rows, task.rows) for row in rows}
    assert not seen & {row["problem"] for row in test.rows}
    assert all({"id", "problem", "answer", "family"} <= row.keys() for row in test.rows)
    assert len({row["id"] for row in test.rows}) == len(test.rows)


def test_problems_out_of_distribution():
    test, swapped, with_zeros = get_task("research.tasks:arithmetic_in_other_forms").benchmarks
    seen = {row["problem"] for row in (*get_task("arithmetic").rows, *test.rows)}
    for row in (*swapped.rows, *with_zeros.rows):
        first, second = row["problem"].removesuffix("=?").split("*")
        assert int(first) * int(second) == int(row["answer"])
        assert row["problem"] not in seen
    assert (len(swapped.rows), len(with_zeros.rows)) == (50, 36)
    families = {row["problem"].split("*")[0]: row["family"] for row in with_zeros.rows}
    assert [families[f"{tens}0"] for tens in (6, 7)] == ["known", "unknown"]


@pytest.mark.parametrize("name", ["arithmetic", "countdown"])
def test_fresh_problems_are_others_and_of_the_same_families(name):
    first, fresh = TASKS[name](), TASKS[f"{name}-fresh"]()
    problems = [{row["problem"] for row in task.benchmarks[0].rows} for task in (first, fresh)]
    assert not problems[0] & problems[1]
    families = [{row["family"] for row in task.rows} for task in (first, fresh)]
    assert families[0] == families[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_task_travels_to_other_processes_and_has_a_small_size(name):
    task = shrink(get_task(name))
    assert pickle.loads(pickle.dumps(task)) == task
    assert task.rlvr.max_steps == 2 and task.num_problems == 4 and task.smoke


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="--task must be one of arithmetic, or module:name"):
        get_task("algebra")
    with pytest.raises(ValueError, match="a task of your own must return a Task"):
        get_task("builtins:dict")
