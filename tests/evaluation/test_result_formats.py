"""Results in the formats of others: lines by their schema, logs of inspect_ai, files of the hub."""

import json
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries
from jsonschema import Draft202012Validator
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.hub_results import (
    eval_results,
    model_index,
    model_rows,
    named_model,
    write_eval_results,
    yaml_text,
)
from sage_unsloth.evaluation.inspect_writer import NO_TEXT, inspect_log
from sage_unsloth.evaluation.record_tables import keep_texts, read_texts
from sage_unsloth.evaluation.sample_logs import ReadingOptions, log_sets, read_log
from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.sampling.grading_records import regraded_line
from sage_unsloth.sampling.record_files import read_samples, read_settings, records_schema
from sage_unsloth.sampling.record_sets import sample_and_grade, sample_seed


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A record set of a table's answers, of 4 problems with 6 samples each.

    An answer is the last digit of its seed; the first one of each problem is right.
    """
    file = tmp_path_factory.mktemp("out") / "samples" / "arithmetic" / "table.jsonl"
    rows = [row | {"answer": str(sample_seed(CONFIG.seed, row["id"], 0) % 10)} for row in ROWS]
    file.parent.mkdir(parents=True)
    sample_and_grade(CONFIG, Table(), rows, file, model="table", benchmark="arithmetic")
    keep_texts(file, {row["id"]: row["problem"] for row in rows})
    return file


# --- lines
# -----------------------------------------------------------------------------------


def test_lines_are_as_the_schema_says(drawn):
    validator = Draft202012Validator(records_schema())
    lines = [json.loads(line) for line in drawn.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 24
    lines += [regraded_line(lines[0])]  # as `regrade` appends it
    for line in lines:
        validator.validate(line)
    for change in ({"num_tokens": -1}, {"finish_reason": "eos"}, {"grade": "right"}, {"more": 1}):
        assert not validator.is_valid(lines[0] | change), change
    for name in ("problem_id", "completion", "grader"):
        assert not validator.is_valid({k: v for k, v in lines[0].items() if k != name}), name
    # What was drawn before its grader failed has no grade yet.
    graded = ("extracted", "grade", "kind", "grader")
    assert validator.is_valid({k: v for k, v in lines[0].items() if k not in graded})


def test_the_schema_names_every_grade_and_kind():
    schema = records_schema()
    Draft202012Validator.check_schema(schema)
    assert set(schema["$defs"]["outcome"]["enum"]) == {grade.value for grade in Grade}
    assert set(schema["$defs"]["kind"]["enum"]) == {kind.value for kind in Kind}


# --- inspect_ai
# -----------------------------------------------------------------------------------


def test_a_record_set_becomes_a_log_of_inspect(drawn, tmp_path, capsys):
    assert main(["convert", str(drawn.parent), "--to", "inspect", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    assert str(path) in capsys.readouterr().out
    log = json.loads(path.read_text(encoding="utf-8"))
    records = {(r["problem_id"], r["sample"]): r for r in read_samples(drawn)}
    assert (log["version"], log["status"]) == (2, "success")
    assert log["eval"]["config"]["epochs"] == 6
    assert log["eval"]["dataset"]["sample_ids"] == [row["id"] for row in ROWS]
    assert log["eval"]["model_generate_config"]["temperature"] == 1.0
    assert "top_k" not in log["eval"]["model_generate_config"]  # -1 is all, which others call none
    for sample in log["samples"]:
        record = records.pop((sample["id"], sample["epoch"] - 1))
        right = record["completion"] == f"<SOLUTION>{record['gold']}</SOLUTION>"
        assert sample["scores"]["sage_unsloth"]["value"] == ("C" if right else "I")
        assert sample["output"]["completion"] == record["completion"]
        assert sample["input"] == read_texts(drawn)[record["problem_id"]]
    assert records == {}
    shares = [s["scores"]["sage_unsloth"]["value"] == "C" for s in log["samples"]]
    metrics = log["results"]["scores"][0]["metrics"]
    assert metrics["accuracy"]["value"] == pytest.approx(sum(shares) / 24)
    assert metrics["pass@1"]["value"] == pytest.approx(sum(shares) / 24)
    assert metrics["pass@4 low"]["value"] <= metrics["pass@4"]["value"]


def test_a_log_that_we_wrote_is_read_again(drawn, tmp_path):
    main(["convert", str(drawn), "--to", "inspect", "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.json")
    (found,) = log_sets([read_log(path)], [], ReadingOptions())
    right = {
        (f"arithmetic/{r['problem_id']}", r["sample"])
        for r in read_samples(drawn)
        if r["grade"] == "correct"
    }
    assert found.correct.sum() == len(right) >= 4
    assert {
        (problem, sample)
        for problem, row in zip(found.problems, found.correct, strict=True)
        for sample in range(6)
        if row[sample]
    } == right


def test_a_set_without_texts_says_so(drawn):
    recorded = read_settings(drawn)
    recorded["environment"]["date"] = "2026-01-02T03:04:05+00:00"
    log = inspect_log(recorded, read_samples(drawn), {})
    assert {sample["input"] for sample in log["samples"]} == {NO_TEXT}
    assert log["eval"]["created"] == "2026-01-02T03:04:05+00:00"


def test_texts_beside_a_set_grow(tmp_path):
    file = tmp_path / "b" / "m.jsonl"
    assert read_texts(file) == {}
    keep_texts(file, {"a": "1"})
    keep_texts(file, {"b": "2"})
    keep_texts(file, {"a": "1"})
    assert read_texts(file) == {"a": "1", "b": "2"}


def test_convert_takes_record_sets(drawn, tmp_path, capsys):
    (log,) = (Path(__file__).parent / "logs").glob("inspect*/*.eval")
    assert main(["convert", str(log), "--to", "hub", "--out", str(tmp_path)]) == 2
    assert "convert takes record sets" in capsys.readouterr().err


# --- the hub
# -----------------------------------------------------------------------------------

SOURCE = {
    "hub_id": "openai/gsm8k",
    "config": "main",
    "split": "test",
    "revision": "abc123",
    "rows": 1319,
}


def report(**datasets):
    def row(benchmark, problems=1319, **more):
        return {"benchmark": benchmark, "problems": problems, "samples": 8, "seeds": 1} | more

    curve = {"1": {"mean": 0.41237, "low": 0.39, "high": 0.44}}
    curve["8"] = {"mean": 0.9, "low": None, "high": None}
    return {
        "table": [row("gsm8k", model=model) for model in ("base", "sage")]
        + [row("own", problems=7, model="sage")],
        "pass_at_k": {
            "gsm8k": {"base": curve, "sage": curve},
            "own": {"sage": curve},
        },
        "datasets": {"gsm8k": [SOURCE], "own": [{"file": "own.jsonl", "rows": 7}]} | datasets,
        "sampling": {"temperature": 0.6},
        "environment": {"date": "2026-11-22T05:00:00+00:00"},
    }


def test_a_score_is_written_as_the_hub_reads_it(tmp_path):
    entries, reasons = eval_results(report(), "sage", {"gsm8k": "gsm8k_main"})
    assert reasons == {
        "own": "its problems (7 of 7) are not those of one data set of the hub, but from "
        r"own.jsonl. Evaluate all of one, by its name on the hub: no local copy (NAME=FILE, "
        "--data), no repairs"
    }
    (file,) = write_eval_results(tmp_path, entries)
    assert file == tmp_path / ".eval_results" / "gsm8k.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8")))
    assert entry == EvalResultEntry(
        dataset_id="openai/gsm8k",
        task_id="gsm8k_main",
        value=41.24,
        dataset_revision="abc123",
        date="2026-11-22T05:00:00+00:00",
        notes="pass@1, mean over 8 samples of each problem at temperature 0.6, 95 % [39, 44]; "
        "sage_unsloth",
    )


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        (
            [SOURCE | {"rows": 2000}],
            r"(1,319 of 2,000) are not all of openai/gsm8k. Evaluate without --problems",
        ),
        ([SOURCE, SOURCE], "(1,319 of 2,638) are not those of one data set"),
        (
            [SOURCE, {"file": "repairs.jsonl", "rows": 3, "repairs": []}],
            "(1,319 of 1,319) are not those of one data set of the hub, but from openai/gsm8k, "
            r"repairs.jsonl. Evaluate all of one",
        ),
        ([], "(1,319) are not those of one data set of the hub. Evaluate"),
    ],
)
def test_part_of_a_data_set_is_no_score_of_it(sources, reason):
    entries, reasons = eval_results(report(gsm8k=sources), "sage")
    assert entries == {} and reason in reasons["gsm8k"]


def test_the_model_index_is_read_by_the_hubs_client():
    index = model_index(report(), "me/mine", "sage")
    card = ModelCard(f"---\n{yaml_text({'model-index': index})}---\n# mine\n")
    assert card.data.model_name == "me/mine"
    found = {(r.dataset_type, r.metric_type): r for r in card.data.eval_results or []}
    assert {key: r.metric_value for key, r in found.items()} == {
        ("openai/gsm8k", "pass@1"): 41.24,
        ("openai/gsm8k", "pass@8"): 90.0,
        ("own", "pass@1"): 41.24,
        ("own", "pass@8"): 90.0,
    }
    first = found["openai/gsm8k", "pass@1"]
    assert (first.dataset_config, first.dataset_split) == ("main", "test")
    assert first.metric_name and "95 % [39, 44]" in first.metric_name
    assert "no interval" in (found["own", "pass@8"].metric_name or "")


def test_whose_results_they_are():
    assert named_model(report(), None) is None
    assert named_model(report(), "sage") == "sage"
    assert named_model({"pass_at_k": {}}, None) is None
    with pytest.raises(ValueError, match="one of base, sage, got 'other'"):
        model_rows(report(), "other")
    with pytest.raises(ValueError, match="--task must name benchmarks of the report, gsm8k"):
        eval_results(report(), "base", {"x": "y"})


def test_hostile_names_stay_text():
    text = yaml_text([{"name": "a: b\n- c\u202e", "x": "!!python/object:os.system"}])
    assert yaml.safe_load(text) == [{"name": "a: b\n- c\ufffd", "x": "!!python/object:os.system"}]


def test_convert_writes_the_hubs_files_and_says_what_it_left_out(drawn, tmp_path, capsys):
    assert main(["convert", str(drawn), "--to", "hub", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "table on arithmetic: nothing written, because its problems (4) are not those of" in out
    assert "No result file was written." in out
    assert (tmp_path / "report" / "comparison.html").is_file()
