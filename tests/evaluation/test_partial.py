"""A report on sets that a kill left: which problems and samples, by hand and from files."""

import json

import pytest
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.evaluation.partial import _lengths, largest_part
from sage_unsloth.evaluation.report import compare_sets
from sage_unsloth.evaluation.report_text import report_text
from sage_unsloth.sampling.record_sets import sample_and_grade


@pytest.mark.parametrize(
    ("least", "problems", "samples"),
    [
        ({"a": 4, "b": 4}, "ab", 4),
        ({"a": 9, "b": 1}, "ab", 1),  # all problems, however few samples
        ({"a": 9, "b": 8, "c": 0}, "ab", 8),
        ({"a": 9, "b": 2, "c": 0}, "a", 9),
        ({"a": 4, "b": 2, "c": 0}, "ab", 2),  # as many either way: more problems
        ({"a": 0}, "", 0),
        ({}, "", 0),
    ],
)
def test_the_largest_part_by_hand(least, problems, samples):
    assert largest_part(least) == (set(problems), samples)


def test_samples_count_up_to_the_first_that_is_missing_or_not_graded():
    drawn = {"a": "012", "b": "013", "c": "12", "d": "02"}
    records = [
        {"problem_id": problem, "sample": int(sample), "grade": "wrong"}
        for problem, samples in drawn.items()
        for sample in samples
    ]
    records.append({"problem_id": "d", "sample": 1})
    assert _lengths(records) == {"a": 3, "b": 2, "c": 0, "d": 1}


@pytest.fixture
def killed(tmp_path):
    """Two sets: one whole, and one with the lines of 11 of 24 completions."""
    for name, lines in (("whole", 24), ("cut", 11)):
        path = tmp_path / f"{name}.jsonl"
        identity = {"weights": name}
        sample_and_grade(
            CONFIG, Table(), ROWS, path, model=name, benchmark="toy", identity=identity
        )
        kept = path.read_text().splitlines(keepends=True)[:lines]
        path.write_text("".join(kept))
    return tmp_path


def test_a_report_on_what_both_have(killed, tmp_path):
    with pytest.raises(ValueError, match="every problem must have"):
        compare_sets([killed], tmp_path / "out")
    result = compare_sets([killed], tmp_path / "out", partial=True)
    # In rounds of 1, 1, 2 and 2 samples, 11 lines are two of each problem, and three more.
    assert result["partial"] == {"toy": {"problems": 4, "of": 4, "samples": 2, "left_out": 16 + 3}}
    assert [(row["problems"], row["samples"]) for row in result["table"]] == [(4, 2)] * 2
    line = (
        "Partial: toy with the first 2 samples of all 4 problems, which all models have; 19 "
        "further completions are left out."
    )
    assert line in report_text(result)
    assert line in (tmp_path / "out" / "comparison.html").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (killed / "cut.jsonl").read_text().splitlines()]
    right = [r["grade"] == "correct" for r in records if r["sample"] < 2]
    row = next(row for row in result["table"] if row["model"] == "cut")
    assert row["pass@1"] == pytest.approx(sum(right) / 8, abs=1e-4)


def test_sets_from_before_rounds_keep_whole_problems(killed, tmp_path):
    """Drawn problem by problem: the first ones whole, the last not at all."""
    path = killed / "cut.jsonl"
    whole = [json.loads(line) for line in (killed / "whole.jsonl").read_text().splitlines()]
    run = json.loads(path.read_text().splitlines()[0])["run"]
    order = [row["id"] for row in ROWS]
    whole.sort(key=lambda r: (order.index(r["problem_id"]), r["sample"]))
    lines = [json.dumps(r | {"run": run, "model": "cut"}) + "\n" for r in whole[:15]]
    path.write_text("".join(lines))
    result = compare_sets([killed], tmp_path / "out", partial=True)
    assert result["partial"] == {"toy": {"problems": 2, "of": 4, "samples": 6, "left_out": 12 + 3}}
    line = "the 6 samples of 2 of 4 problems that all models have; the missing ones may be"
    assert line in report_text(result)


def test_whole_sets_are_not_called_partial(killed, tmp_path):
    result = compare_sets([killed / "whole.jsonl"], tmp_path / "out", partial=True)
    text = report_text(result)
    assert "toy: nothing is left out; all models have 6 samples of 4 problems." in text
    assert "Partial" not in text and "missing" not in text
    again = compare_sets([killed / "whole.jsonl"], tmp_path / "again")
    assert result["table"] == again["table"]


def test_nothing_in_common_is_named(killed, tmp_path):
    (killed / "cut.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"those on toy have none in common. Draw more"):
        compare_sets([killed], tmp_path / "out", partial=True)
