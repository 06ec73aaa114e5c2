"""How answers reached their grade: counted and shown."""

import json
import logging

import pytest

from sage_unsloth.analysis import kinds
from sage_unsloth.sampling.kinds import correct_shares, count_kinds, kinds_text
from sage_unsloth.training.stage import COMPLETIONS


def rows(step=1, **counts):
    """`number=(3, 2)`: three answers, two of them right."""
    return [
        {"step": step, "kind": kind, "grade": "correct" if i < right else "wrong"}
        | {"completion": f"{kind} {step}.{i}", "answer": "42", "extracted": "42"}
        for kind, (answers, right) in counts.items()
        for i in range(answers)
    ]


def test_counts_and_shares_by_hand():
    counts = count_kinds([*rows(number=(4, 3), text=(2, 1)), {"grade": "correct"}])
    assert counts == {
        "number": {"answers": 4, "correct": 3},
        "text": {"answers": 2, "correct": 1},
        "not recorded": {"answers": 1, "correct": 1},
    }
    assert correct_shares(counts) == {"number": 0.6, "text": 0.2, "not recorded": 0.2}
    assert kinds_text(count_kinds(rows(text=(2, 1)))) == "text 1 of 2 correct"


@pytest.fixture
def run(tmp_path):
    """A run in which answers that are right as text go from none to half of the right ones."""
    folder = tmp_path / "run"
    folder.mkdir()
    steps = [
        *rows(1, number=(8, 4)),
        *rows(2, number=(8, 4), text=(2, 1)),
        *rows(3, number=(8, 4), text=(8, 4)),
    ]
    text = "".join(json.dumps(row) + "\n" for row in steps)
    (folder / "completions.jsonl").write_text(text)
    return folder


def test_a_kind_that_grows_is_shown_and_named(run, capsys, caplog):
    with caplog.at_level(logging.WARNING):
        found = kinds.of_runs({"run": run})
    assert found["run"]["last third"]["text"] == {"answers": 8, "correct": 4}
    assert "4 of 8 (50.0% of the" in capsys.readouterr().out
    (message,) = caplog.messages
    assert "text answers were 0 %" in message and "are 50 % in the last" in message
    assert str(run / COMPLETIONS) in message


def test_a_run_whose_kinds_stay_is_not_named(tmp_path, caplog):
    text = "".join(json.dumps(row) + "\n" for step in (1, 2, 3) for row in rows(step, set=(4, 2)))
    (tmp_path / "completions.jsonl").write_text(text)
    kinds.of_runs({"run": tmp_path})
    assert not caplog.messages
    assert kinds.of_runs({"none": tmp_path / "empty"}) == {}
