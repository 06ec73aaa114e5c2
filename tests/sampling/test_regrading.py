"""Records of an older grader: graded again where the set is drawn on, refused in a comparison."""

import json

import pytest
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.record_tables import Comparable, read_sets, record_set
from sage_unsloth.sampling import record_sets
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


def test_an_old_set_is_graded_in_batches_and_each_is_kept(tmp_path, monkeypatch):
    old_set(tmp_path / "m.jsonl")
    monkeypatch.setattr(record_sets, "REGRADED_AT_ONCE", 2)
    grade, sizes = record_sets.grade_records, []

    def counting(records, *others):
        sizes.append(len(records))
        if len(sizes) == 3:
            raise RuntimeError("killed")
        grade(records, *others)

    monkeypatch.setattr(record_sets, "grade_records", counting)
    with pytest.raises(RuntimeError, match="killed"):
        draw(tmp_path / "m.jsonl")
    assert sizes == [2, 2, 2]
    graded = [r["grader"] != OLD for r in read_samples(tmp_path / "m.jsonl")]
    assert graded[:5] == [True] * 4 + [False]


def test_a_completion_whose_line_was_deleted_is_drawn_again(tmp_path):
    """Its later grade alone is no record."""
    path = tmp_path / "m.jsonl"
    now = old_set(path)
    draw(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert len(read_samples(path)) == len(now) - 1
    draw(path)
    assert len(read_samples(path)) == len(now)


def test_a_set_without_a_completion_or_without_grades_is_a_message(tmp_path):
    path = tmp_path / "m.jsonl"
    draw(path)
    records = [{k: v for k, v in r.items() if k != "grade"} for r in read_samples(path)]
    with pytest.raises(ValueError, match=r"must be graded, but 4 of m on b are not"):
        record_set(records[:4], "m", "b", {})
    path.unlink()
    assert main(["compare", str(tmp_path), "--out", str(tmp_path / "out")]) == 2


def test_a_set_that_lacks_problems_is_compared_by_part_alone(tmp_path, capsys):
    path = tmp_path / "evaluation" / "m.jsonl"
    draw(path)
    problem = read_samples(path)[0]["problem_id"]
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if f'"{problem}"' not in line))
    words = ["compare", str(path.parent), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "every problem must have samples, but 1 of" in capsys.readouterr().err
    assert main([*words, "--partial"]) == 0
