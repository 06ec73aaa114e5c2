"""Record sets: seeds, resuming after a kill at any byte, growing, grading again, refusals."""

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from table_engine import CONFIG, ROWS, Table, base_engine

from sage_unsloth.grading import grader
from sage_unsloth.grading.checker import Grade
from sage_unsloth.grading.extraction import extract_answer
from sage_unsloth.grading.grader import grade
from sage_unsloth.grading.mathematics import MATH
from sage_unsloth.prompts import render_prompt
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.sampling import record_files
from sage_unsloth.sampling.counts import correct_matrix
from sage_unsloth.sampling.engines import SamplingConfig
from sage_unsloth.sampling.record_files import read_samples, read_settings, settings_path
from sage_unsloth.sampling.record_sets import (
    EngineError,
    prompt_ids,
    sample_and_grade,
    sample_seed,
)


@pytest.fixture(scope="module")
def engine(unsloth_module):
    return base_engine()


def draw(config, engine, rows, path, **options):
    options = {"model": "base", "benchmark": "arithmetic"} | options
    return sample_and_grade(config, engine, rows, path, **options)


@pytest.fixture(scope="module")
def drawn(engine, tmp_path_factory):
    """The file of a set, and the records that drawing it returned."""
    path = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    return path, draw(CONFIG, engine, ROWS, path)


@pytest.fixture
def records(drawn):
    return drawn[1]


def test_every_problem_gets_every_sample_once(records):
    assert [(r["problem_id"], r["sample"]) for r in records] == [
        (row["id"], sample) for row in ROWS for sample in range(6)
    ]
    assert len({r["completion"] for r in records}) > 6, "samples differ"


def test_records_hold_what_was_sampled_and_its_grade(records, engine):
    answers = {row["id"]: row["answer"] for row in ROWS}
    for record in records:
        assert list(record) == [
            "run",
            "model",
            "benchmark",
            "problem_id",
            "sample",
            "seed",
            "completion",
            "num_tokens",
            "finish_reason",
            "gold",
            "extracted",
            "grade",
            "kind",
            "grader",
        ]
        assert record["gold"] == answers[record["problem_id"]]
        assert record["grade"] == grade(record["completion"], record["gold"])
        assert record["finish_reason"] == "stop" or record["num_tokens"] == 48
        assert 0 < record["num_tokens"] <= len(record["completion"]) + 1
        assert record["seed"] == sample_seed(CONFIG.seed, record["problem_id"], record["sample"])
    assert records[0]["grader"].startswith("math 4, mpmath 1.")


@pytest.mark.smoke
def test_the_seed_of_a_completion_by_hand():
    digest = hashlib.sha256(b'[3407, "aime24/60", 5]').hexdigest()
    assert sample_seed(3407, "aime24/60", 5) == int(digest, 16) >> (256 - 52)
    seeds = {sample_seed(s, p, i) for s in (1, 2) for p in ("a", "b", "1") for i in range(100)}
    assert len(seeds) == 600


def test_the_prompt_is_that_of_training_byte_for_byte(engine, unsloth_module):
    from sage_unsloth.prompts import prompt_messages

    tokenizer = engine.tokenizer
    trained = tokenizer.apply_chat_template(  # as TRL's trainer renders a row's `prompt`
        prompt_messages(ROWS[0]["problem"]),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
    )
    ids = prompt_ids(tokenizer, ROWS[0]["problem"])
    assert ids == trained
    assert tokenizer.decode(ids) == render_prompt(tokenizer, ROWS[0]["problem"])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.55, 0.999])
def test_a_run_cut_anywhere_ends_the_same(engine, drawn, tmp_path, share):
    whole, records = drawn
    path = tmp_path / "samples.jsonl"
    shutil.copy(settings_path(whole), settings_path(path))
    data = whole.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    again = draw(CONFIG, engine, ROWS, path)
    assert share or again == records, "the same batches draw the same"
    assert [r["problem_id"] for r in again] == [r["problem_id"] for r in records]
    # Batches begin elsewhere now, and rounding may tip a completion over.
    assert sum(a != b for a, b in zip(again, records, strict=True)) <= 1


def test_a_kill_at_any_byte_loses_no_more_than_the_cut_line(tmp_path):
    path = tmp_path / "samples.jsonl"
    whole = draw(CONFIG, Table(), ROWS[:2], path)
    data = path.read_bytes()
    for cut in range(0, len(data), 97):
        path.write_bytes(data[:cut])
        engine = Table()
        assert draw(CONFIG, engine, ROWS[:2], path) == whole
        assert engine.drawn.total() == len(whole) - data[:cut].count(b"\n") - (
            data[cut : cut + 1] == b"\n"
        )


@pytest.mark.smoke
def test_only_what_is_missing_is_drawn(tmp_path):
    path = tmp_path / "samples.jsonl"
    first = draw(CONFIG, Table(), ROWS[:2], path)
    more = Table()
    grown = draw(replace(CONFIG, num_samples=9, batch_size=5), more, ROWS, path)
    assert more.drawn.total() == 4 * 9 - 2 * 6 and max(more.drawn.values()) == 1
    assert [r for r in grown if r in first] == first
    lines = read_jsonl(path)[12:]
    assert [r["sample"] for r in lines[:2]] == [0, 0], "all problems first, with few samples"
    assert [r["sample"] for r in lines[-4:]] == [8] * 4
    nothing = Table()
    fewer = draw(replace(CONFIG, num_samples=3), nothing, ROWS[1:3], path)
    assert not nothing.drawn
    assert {(r["problem_id"], r["sample"]) for r in fewer} == {
        (row["id"], sample) for row in ROWS[1:3] for sample in range(3)
    }


def test_an_engine_that_dies_keeps_what_was_drawn(tmp_path):
    path = tmp_path / "samples.jsonl"
    with pytest.raises(
        EngineError, match=r"MemoryError: out of GPU memory.* saved in .*same command again"
    ):
        draw(CONFIG, Table(fail_at=16), ROWS, path)
    assert len(read_samples(path)) == 16
    rest = Table()
    assert len(draw(CONFIG, rest, ROWS, path)) == 24
    assert rest.drawn.total() == 8


@pytest.mark.long
def test_a_kill_of_the_process_keeps_what_was_drawn(tmp_path):
    path = tmp_path / "samples.jsonl"
    code = (
        "import os, sys; sys.path.insert(0, 'tests'); import table_engine as t\n"
        "from sage_unsloth.sampling.record_sets import sample_and_grade\n"
        "class Dying(t.Table):\n"
        "    def draw(self, *a):\n"
        "        if self.drawn.total() >= 16: os.kill(os.getpid(), 9)\n"
        "        return super().draw(*a)\n"
        f"sample_and_grade(t.CONFIG, Dying(), t.ROWS, {str(path)!r}, model='base', "
        "benchmark='arithmetic')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == -9, done.stderr.decode()[-2000:]
    assert len(read_samples(path)) == 16
    assert len(draw(CONFIG, Table(), ROWS, path)) == 24


def test_another_seed_draws_other_samples(engine, records, tmp_path):
    other = draw(replace(CONFIG, seed=1), engine, ROWS, tmp_path / "samples.jsonl")
    assert [r["completion"] for r in other] != [r["completion"] for r in records]


def test_another_set_is_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    draw(CONFIG, Table(), ROWS, path)
    for field in dataclasses.fields(SamplingConfig):
        if field.name in ("num_samples", "batch_size", "grade_seconds"):
            continue
        changed = {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "max_completion_length": 9,
            "seed": 1,
        }
        with pytest.raises(
            ValueError, match=rf"sampling\.{field.name} was .* and is {changed[field.name]}"
        ):
            draw(replace(CONFIG, **{field.name: changed[field.name]}), Table(), ROWS, path)
    for options in ({"model": "other"}, {"benchmark": "other"}, {"identity": {"weights": "abc"}}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}|weights was absent"):
            draw(CONFIG, Table(), ROWS, path, **options)
    with pytest.raises(ValueError, match=r"but 1 in .* differ, 'arithmetic-.* the first"):
        draw(CONFIG, Table(), [ROWS[0] | {"problem": "1*1=?"}], path)
    other = Table()
    other.name = "vllm"
    with pytest.raises(ValueError, match=r'engine was "table" and is "vllm"'):
        draw(CONFIG, other, ROWS, path)


def test_a_set_is_graded_again_without_drawing(tmp_path):
    path = tmp_path / "samples.jsonl"
    before = draw(CONFIG, Table(), ROWS, path)
    size = path.stat().st_size
    rows = [ROWS[0] | {"answer": before[0]["extracted"]}, *ROWS[1:]]  # a gold that was repaired
    newer = replace(MATH, version=99)
    engine = Table()
    after = draw(CONFIG, engine, rows, path, checker=newer)
    assert not engine.drawn
    assert path.stat().st_size > size, "the file only grows"
    assert [r["completion"] for r in after] == [r["completion"] for r in before]
    assert after[0]["grade"] == "correct" and before[0]["grade"] == "wrong"
    assert {r["grader"] for r in after} == {f"{newer.label}, evaluation extraction 2"}
    lines = read_jsonl(path)
    assert len(lines) == 48 and set(lines[-1]) == {
        "problem_id",
        "sample",
        "extracted",
        "gold",
        "grade",
        "kind",
        "grader",
    }
    size = path.stat().st_size
    assert draw(CONFIG, Table(), rows, path, checker=newer) == after
    assert path.stat().st_size == size, "and once is enough"


def test_a_repaired_gold_alone_grades_again(tmp_path):
    path = tmp_path / "samples.jsonl"
    before = draw(CONFIG, Table(), ROWS, path)
    row = ROWS[2] | {
        "answer": next(r["extracted"] for r in before if r["problem_id"] == ROWS[2]["id"])
    }
    after = draw(CONFIG, Table(), [*ROWS[:2], row, ROWS[3]], path)
    changed = [b["problem_id"] for a, b in zip(before, after, strict=True) if a != b]
    assert changed == [row["id"]] * 6
    assert "correct" in {r["grade"] for r in after}
    assert len(read_jsonl(path)) == 24 + 6


def by_problem(records):
    """Records on disk in the order in which drawing them returns them."""
    return sorted(
        records, key=lambda r: ([row["id"] for row in ROWS].index(r["problem_id"]), r["sample"])
    )


def test_a_set_is_read_once_and_what_is_returned_is_what_is_on_disk(tmp_path, monkeypatch):
    path, read = tmp_path / "samples.jsonl", []
    real = record_files.read_samples
    monkeypatch.setattr(record_files, "read_samples", lambda path: read.append(path) or real(path))
    few = draw(replace(CONFIG, num_samples=2), Table(), ROWS, path)
    assert few == by_problem(real(path)) and not read, "there was nothing to read"
    all_rows = draw(CONFIG, Table(), ROWS, path)
    assert all_rows == by_problem(real(path)) and read == [path]
    again = draw(CONFIG, Table(), ROWS, path, checker=replace(MATH, version=99))
    assert again == by_problem(real(path)) != all_rows and read == [path, path]


def test_an_answer_is_extracted_once(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(
        grader,
        "extract_answer",
        lambda text, **options: found.append(text) or extract_answer(text, **options),
    )
    records = draw(CONFIG, Table(), ROWS, tmp_path / "samples.jsonl")
    assert sorted(found) == sorted(record["completion"] for record in records)


def test_two_processes_on_one_set_are_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    with (
        exclusive_lock(path),
        pytest.raises(ValueError, match=r"one process at a time may write to .*samples\.jsonl"),
    ):
        draw(CONFIG, Table(), ROWS, path)


@pytest.mark.parametrize(
    ("number", "remedy"), [(3, "Upgrade sage_unsloth"), (1, "Choose another --out")]
)
def test_other_formats_are_refused(tmp_path, number, remedy):
    path = tmp_path / "samples.jsonl"
    draw(CONFIG, Table(), ROWS, path)
    recorded = json.loads(settings_path(path).read_text())
    settings_path(path).write_text(json.dumps(recorded | {"format": number}))
    with pytest.raises(ValueError, match=rf"format 2, but .* is of format {number}\. {remedy}"):
        draw(CONFIG, Table(), ROWS, path)


def test_samples_without_settings_are_refused(tmp_path):
    path = tmp_path / "samples.jsonl"
    draw(CONFIG, Table(), ROWS, path)
    assert read_settings(path)["settings"]["sampling"]["temperature"] == 1.0
    settings_path(path).unlink()
    with pytest.raises(ValueError, match=r"there is no .*samples\.settings\.json"):
        draw(CONFIG, Table(), ROWS, path)


def test_a_box_counts_where_there_is_no_tag(tmp_path):
    records = draw(CONFIG, Table(text=r"so \boxed{{{}}}"), ROWS[:1], tmp_path / "s.jsonl")
    assert {r["extracted"] for r in records} == {str(r["seed"] % 10) for r in records}
    assert {r["grade"] for r in records} <= {"wrong", "correct"}


def test_counts_by_hand():
    grades = {"a": [Grade.CORRECT, Grade.WRONG], "b": [Grade.TIMED_OUT, Grade.UNPARSABLE]}
    records = [
        {"problem_id": p, "sample": i, "grade": g.value}
        for p, gs in grades.items()
        for i, g in enumerate(gs)
    ]
    assert correct_matrix(records).tolist() == [[True, False], [False, False]]
    assert correct_matrix(records, ["b", "a"], 2).sum(axis=1).tolist() == [0, 1]
    assert correct_matrix(records[::-1], ["a"]).tolist() == [[True, False]], "in any order"
    for wrong in (records[:-1], [*records[:3], records[3] | {"sample": 2}], records[:2]):
        with pytest.raises(ValueError, match=r"'b' has \d. Run evaluate again"):
            correct_matrix(wrong, ["a", "b"], 2)
    with pytest.raises(ValueError, match="must have 2 samples, but 'b' of m on toy has 1"):
        correct_matrix(records[:-1], of="m on toy")
    with pytest.raises(ValueError, match="must have 1 samples, but 'a' has 2"):
        correct_matrix(records, ["a"], 1)


def test_what_was_drawn_is_kept_where_grading_fails(tmp_path, monkeypatch):
    from sage_unsloth.grading.grader import Grader

    def broken(self, extracted, answers):
        raise RuntimeError("a worker does not start")

    path, table = tmp_path / "samples.jsonl", Table()
    monkeypatch.setattr(Grader, "judge_answers", broken)
    with pytest.raises(RuntimeError, match="does not start"):
        draw(CONFIG, table, ROWS, path)
    kept = read_samples(path)
    assert len(kept) == CONFIG.batch_size and "grade" not in kept[0]
    monkeypatch.undo()
    found = draw(CONFIG, table, ROWS, path)
    assert len(found) == len(ROWS) * CONFIG.num_samples
    assert all(record["grade"] and record["grader"] for record in found)
    assert max(table.drawn.values()) == 1, "nothing is drawn twice"
