"""Old records and rollouts, graded again by today's rules, without drawing; a kill loses none."""

import json

import pytest
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.__main__ import main
from sage_unsloth.analysis.regrading import regrade
from sage_unsloth.evaluation.record_tables import Comparable, read_sets
from sage_unsloth.grading.grader import Grader
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.sampling import regrading
from sage_unsloth.sampling.record_files import read_samples, read_set, settings_path
from sage_unsloth.sampling.record_sets import sample_and_grade

FIVES = [row | {"answer": "5"} for row in ROWS]  # the table draws digits
OLD = "math 2, math-verify 0.9.0"


def old_set(path, model="m", boxed=True, text="<SOLUTION>{}</SOLUTION>"):
    """A set as an older version left it: its label, no kinds, and every grade wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    now = sample_and_grade(
        *(CONFIG, Table(text=text), FIVES, path),
        **dict(model=model, benchmark="arithmetic", boxed=boxed),
    )
    lines = [
        {k: v for k, v in row.items() if k != "kind"} | {"grade": "wrong", "grader": OLD}
        for row in now
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return now


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "evaluation" / "samples"


def test_a_set_gets_the_grades_that_drawing_it_today_gives(folder):
    now = old_set(folder / "m.jsonl")
    (result,) = regrade([folder])
    assert read_samples(folder / "m.jsonl") == [
        {name: new[name] for name in old} for old, new in zip(now, now, strict=True)
    ]
    right = sum(record["grade"] == "correct" for record in now)
    assert 0 < right < len(now), "the table draws both"
    assert (result.total, result.correct) == (len(now), right)
    assert result.graders == {OLD: len(now)}
    assert result.changes[("wrong", "correct")] == right
    size = (folder / "m.jsonl").stat().st_size
    (again,) = regrade([folder])
    assert not again.changes and (folder / "m.jsonl").stat().st_size == size


def test_the_rules_of_training_where_the_set_was_of_training(folder):
    text = "<SOLUTION>{}</SOLUTION> and that is all"
    old_set(folder / "lax.jsonl", "lax", text=text)
    old_set(folder / "strict.jsonl", "strict", boxed=False, text=text)
    lax, strict = regrade([folder])
    assert lax.correct > 0 == strict.correct


def test_a_kill_in_between_loses_nothing(folder, monkeypatch):
    file = folder / "m.jsonl"
    now = old_set(file)
    monkeypatch.setattr(regrading, "BATCH", 5)
    append, calls = regrading.append_jsonl, []

    def dying(path, rows):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(append(path, rows))

    monkeypatch.setattr(regrading, "append_jsonl", dying)
    with pytest.raises(KeyboardInterrupt):
        regrade([file])
    with file.open("ab") as half:
        half.write(b'{"problem_id": "ar')  # the line that was being written
    monkeypatch.setattr(regrading, "append_jsonl", append)
    (result,) = regrade([file])
    assert result.changes.total() == len(now) - 10, "what was done is not done again"
    assert [r["grade"] for r in read_samples(file)] == [r["grade"] for r in now]


def test_copies_are_graded_and_the_originals_left_alone(folder, tmp_path):
    now = old_set(folder / "m.jsonl")
    before = (folder / "m.jsonl").read_bytes()
    to = tmp_path / "again"
    for changed in (len(now), 0):
        (result,) = regrade([tmp_path / "evaluation"], to)
        assert result.changes.total() == changed
        assert result.file == (to / "samples" / "m.jsonl").resolve()
    assert (folder / "m.jsonl").read_bytes() == before
    assert [r["grade"] for r in read_samples(result.file)] == [r["grade"] for r in now]
    lines = result.file.read_text().splitlines(keepends=True)
    result.file.write_text("".join(lines[1 : len(now)]))
    with pytest.raises(ValueError, match="lacks some of"):
        regrade([tmp_path / "evaluation"], to)
    with pytest.raises(ValueError, match="--to takes one folder"):
        regrade([folder / "m.jsonl"], to)


def test_rollouts_of_a_run(tmp_path):
    file = tmp_path / "run" / "completions.jsonl"
    file.parent.mkdir()
    rows = [
        {"step": 1, "prompt": "?", "completion": text, "answer": "42", "grade": "correct"}
        for text in ("<SOLUTION>42</SOLUTION>", "<SOLUTION>42</SOLUTION> no, 43")
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (result,) = regrade([tmp_path])
    assert result.changes == {("correct", "correct"): 1, ("correct", "unparsable"): 1}
    found = read_jsonl(file)
    with Grader() as grader:
        assert {row["grader"] for row in found} == {grader.label}
    assert [row["kind"] for row in found] == ["number", "none"]
    assert found[0] == found[0] | rows[0]
    assert not regrade([tmp_path])[0].changes


def test_nothing_to_grade(tmp_path):
    with pytest.raises(ValueError, match="has none"):
        regrade([tmp_path])


def test_records_that_no_known_checker_graded_are_refused(folder):
    old_set(folder / "m.jsonl")
    text = (folder / "m.jsonl").read_text().replace(OLD, "other 1")
    (folder / "m.jsonl").write_text(text)
    with pytest.raises(ValueError, match="were by other"):
        regrade([folder])


def test_compare_refuses_to_mix_and_names_the_command_that_mends_it(folder, capsys):
    old_set(folder / "a.jsonl", "a")
    sample_and_grade(CONFIG, Table(), FIVES, folder / "b.jsonl", model="b", benchmark="arithmetic")
    out = str(folder.parent / "out")
    assert main(["compare", str(folder), "--out", out]) == 2
    message = capsys.readouterr().err
    files = f"{(folder / 'a.jsonl').resolve()} {(folder / 'b.jsonl').resolve()}"
    assert f"python -m sage_unsloth regrade {files}" in message and OLD in message
    assert main(["regrade", *files.split()]) == 0
    assert "wrong → correct" in capsys.readouterr().out
    assert len(read_sets([folder / "a.jsonl", folder / "b.jsonl"])) == 2


def test_a_set_that_is_half_regraded_is_refused_alone(folder):
    old_set(folder / "m.jsonl")
    settings, records = read_set(folder / "m.jsonl")
    records[0]["grader"] = "math 99"
    with pytest.raises(ValueError, match="graded alike"):
        Comparable().add(folder / "m.jsonl", settings, records)
    assert settings_path(folder / "m.jsonl").is_file()
