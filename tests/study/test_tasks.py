"""Data of a user's own as a study's task: groups, guesses, settings."""

import json

import pytest

from sage_unsloth.__main__ import main
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.problems.columns import parse_columns
from sage_unsloth.study.tasks import own_task

TRAINING = [{"ask": f"{i}+{i % 3}=?", "total": str(i % 4), "kind": "sum"} for i in range(8)]
HELD_OUT = [
    {"ask": f"{i}*2=?", "total": str(i), "kind": "far" if i > 2 else "near", "luck": 0.1 * i}
    for i in range(5)
]


@pytest.fixture
def files(tmp_path):
    for name, rows in (("mine", TRAINING), ("held_out", HELD_OUT)):
        lines = "\n".join(json.dumps(row) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines + "\n")
    return tmp_path


def make(files, **options):
    return own_task(
        start="arithmetic-base",
        data=str(files / "mine.jsonl"),
        benchmarks=[f"own={files / 'held_out.jsonl'}"],
        columns=parse_columns(["problem=ask", "answer=total"], None, None),
        show=lambda text: None,
        **options,
    )


def test_groups_and_the_guess_of_a_training_answer(files):
    task = make(files, group="kind", beta=0.3)
    rows = task.benchmarks[0].rows
    assert [row["family"] for row in rows] == ["near"] * 3 + ["far"] * 2
    # Training has each of 0 to 3 twice among 8 rows, and never 4.
    assert [row["guess"] for row in rows] == [0.25] * 4 + [0.0]
    assert len(task.rows) == 8 and task.rlvr.beta == 0.3 and task.common == {"beta": 0.3}
    assert task.sampling.temperature == task.rlvr.temperature, "asked as it is trained"


def test_a_guess_may_be_a_number_or_a_column(files):
    assert {row["guess"] for row in make(files, guess="0.25").benchmarks[0].rows} == {0.25}
    chances = [row["guess"] for row in make(files, guess="luck").benchmarks[0].rows]
    assert chances == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])


def test_training_and_evaluation_have_one_verifier(files):
    task = make(files, verifier="text", sampling={"num_samples": 6})
    assert task.verifier == task.benchmarks[0].checker == get_verifier("text")
    assert task.sampling.num_samples == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "level"}, "'level' must be a column of every row of own"),
        ({"guess": "1.5"}, r"the chance of a guess must be in \[0, 1\]"),
        ({"guess": "kindness"}, "'kindness' must be a column of every row"),
        ({"verifier": "no-such"}, "verifier"),
    ],
)
def test_what_cannot_be_is_refused(files, options, message):
    with pytest.raises(ValueError, match=message):
        make(files, **options)


def test_what_names_no_task_is_a_message(tmp_path, monkeypatch, capsys):
    (tmp_path / "no_task_of_mine.py").write_text(
        "def needy(rows): ...\ndef broken(): return {}[1]\n"
    )
    monkeypatch.chdir(tmp_path)
    for words, message in {
        "--task no_task_of_mine:needy": "without arguments, but no_task_of_mine:needy raised Type",
        "--task no_task_of_mine:broken": "no_task_of_mine:broken raised KeyError: 1",
        "--task arithmetic --set temperature=0.8": "its own data and settings, got temperature",
        "--data rows.jsonl": "--benchmarks, or --task, got ['--data']",
        "--n 4": "--benchmarks, or --task, got none",
    }.items():
        assert main(["study", *words.split()]) == 2
        assert message in capsys.readouterr().err
