"""Records of an older grader: graded again where the set is drawn on, refused in a comparison."""

import json

import pytest
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.record_tables import Comparable, read_sets
from sage_unsloth.sampling.record_files import read_samples, read_set
from sage_unsloth.sampling.record_sets import sample_and_grade

FIVES = [row | {"answer": "5"} for row in ROWS]  # the table draws digits
OLD = "math 2, math-verify 0.9.0"


def draw(path, model="m"):
    path.parent.mkdir(parents=True, exist_ok=True)
    return sample_and_grade(CONFIG, Table(), FIVES, path, model=model, benchmark="arithmetic")


def old_set(path, model="m"):
    """A set as an older version left it: its label, no kinds, and every grade wrong."""
    now = draw(path, model)
    lines = [
        {k: v for k, v in row.items() if k != "kind"} | {"grade": "wrong", "grader": OLD}
        for row in now
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return now


def test_sets_of_two_graders_are_refused_and_the_same_evaluation_mends_it(tmp_path, capsys):
    folder = tmp_path / "evaluation"
    now = old_set(folder / "a.jsonl", "a")
    draw(folder / "b.jsonl", "b")
    assert main(["compare", str(folder), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "Run evaluate on each again" in message and OLD in message
    assert 0 < sum(record["grade"] == "correct" for record in now) < len(now)
    draw(folder / "a.jsonl", "a")
    assert [r["grade"] for r in read_samples(folder / "a.jsonl")] == [r["grade"] for r in now]
    assert len(read_sets([folder / "a.jsonl", folder / "b.jsonl"])) == 2


def test_a_set_that_is_half_regraded_is_refused_alone(tmp_path):
    old_set(tmp_path / "m.jsonl")
    settings, records = read_set(tmp_path / "m.jsonl")
    records[0]["grader"] = "math 99"
    with pytest.raises(ValueError, match="graded alike"):
        Comparable().add(tmp_path / "m.jsonl", settings, records)
