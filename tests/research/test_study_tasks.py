"""The four embedded tasks are tasks of the installed study."""

import pickle

import pytest

from research.benchmark.tasks import get_task as research_task
from research.frontier.guessing import blind_arithmetic, blind_countdown
from sage_unsloth.study.tasks import get_task, shrink

NAMES = {
    "arithmetic": "arithmetic",
    "research.frontier.study_tasks:arithmetic_fresh": "arithmetic-fresh",
    "research.frontier.study_tasks:countdown": "countdown",
    "research.frontier.study_tasks:countdown_fresh": "countdown-fresh",
}


@pytest.mark.parametrize(("name", "research_name"), NAMES.items())
def test_a_study_trains_and_asks_what_the_committed_runs_did(name, research_name):
    task, other = get_task(name), research_task(research_name)
    assert (task.rlvr, task.sft, task.verifier) == (other.rlvr, other.sft, other.checker)
    assert list(task.rows) == list(other.train_rows) and task.sft_rows == other.sft_rows
    rows, test = task.benchmarks[0].rows, other.sets["test"]
    assert [{k: v for k, v in row.items() if k != "guess"} for row in rows] == list(test.rows)
    assert task.benchmarks[0].checker == test.checker
    assert task.sampling.num_samples == 2 * test.num_samples == 2 * other.sets["test"].num_samples
    blind = blind_countdown if "countdown" in research_name else blind_arithmetic
    assert [row["guess"] for row in rows] == pytest.approx([blind(row["id"]) for row in rows])


def test_a_task_travels_to_other_processes_and_has_a_small_size():
    for name in NAMES:
        task = shrink(get_task(name))
        assert pickle.loads(pickle.dumps(task)) == task
        assert task.rlvr.max_steps == 2 and task.num_problems == 4 and task.smoke


def test_an_unknown_task_is_refused():
    with pytest.raises(ValueError, match="--task must be one of arithmetic, or module:name"):
        get_task("algebra")
    with pytest.raises(ValueError, match="a task of your own must return a Task"):
        get_task("builtins:dict")
