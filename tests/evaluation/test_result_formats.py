"""Results in the formats of others: lines by their schema, files of the hub."""

import json

import pytest
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, ModelCardData, parse_eval_result_entries
from jsonschema import Draft202012Validator
from table_engine import CONFIG, ROWS, Table

from sage_unsloth.evaluation.hub_results import (
    card_results,
    eval_results,
    model_rows,
    named_model,
    write_eval_results,
    yaml_text,
)
from sage_unsloth.evaluation.record_tables import keep_texts, read_texts
from sage_unsloth.grading.checker import Grade, Kind
from sage_unsloth.sampling.grading_records import regraded_line
from sage_unsloth.sampling.record_files import records_schema
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
    lines += [regraded_line(lines[0])]  # as one that was graded again
    counted = lines[1] | {"counted": " dozens"}  # as where a problem counts dozens
    lines += [counted, regraded_line(counted), lines[2] | {"token_ids": [5, 3]}]
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


def test_texts_beside_a_set_grow(tmp_path):
    file = tmp_path / "b" / "m.jsonl"
    assert read_texts(file) == {}
    keep_texts(file, {"a": "1"})
    keep_texts(file, {"b": "2"})
    keep_texts(file, {"a": "1"})
    assert read_texts(file) == {"a": "1", "b": "2"}


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
    entries = eval_results(report(), "sage")
    assert entries.keys() == {"gsm8k"}, "the other's problems are of no data set of the hub"
    write_eval_results(tmp_path, entries)
    file = tmp_path / ".eval_results" / "gsm8k.yaml"
    (entry,) = parse_eval_result_entries(yaml.safe_load(file.read_text(encoding="utf-8")))
    assert entry == EvalResultEntry(
        dataset_id="openai/gsm8k",
        task_id="gsm8k",
        value=41.24,
        dataset_revision="abc123",
        date="2026-11-22T05:00:00+00:00",
        notes="pass@1, mean over 8 samples of each problem at temperature 0.6, 95 % [39, 44]; "
        "sage_unsloth",
    )


@pytest.mark.parametrize(
    "sources",
    [
        [SOURCE | {"rows": 2000}],
        [SOURCE, SOURCE],
        [{"file": "gsm8k.jsonl", "rows": 1319}],
        [],
    ],
)
def test_part_of_a_data_set_is_no_score_of_it(sources):
    assert eval_results(report(gsm8k=[SOURCE]), "sage").keys() == {"gsm8k"}
    assert eval_results(report(gsm8k=sources), "sage") == {}


def test_the_model_index_is_read_by_the_hubs_client():
    data = ModelCardData(model_name="me/mine", eval_results=card_results(report(), "sage"))
    card = ModelCard(f"---\n{yaml_text(data.to_dict())}---\n# mine\n")
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


def test_hostile_names_stay_text():
    text = yaml_text([{"name": "a: b\n- c\u202e", "x": "!!python/object:os.system"}])
    assert yaml.safe_load(text) == [{"name": "a: b\n- c\ufffd", "x": "!!python/object:os.system"}]
