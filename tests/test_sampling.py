"""Sampling: records, seeds, resuming after a kill at any byte, counts."""

from dataclasses import replace

import pytest

from sage_unsloth import arithmetic
from sage_unsloth.models import data_folder, load_policy
from sage_unsloth.quickstart import BASE_MODEL
from sage_unsloth.rewards import Grade, grade
from sage_unsloth.sampling import SamplingConfig, correct_counts, sample_and_grade

CONFIG = SamplingConfig(num_samples=6, max_completion_length=48, batch_size=8)
ROWS = arithmetic.problems("test")[:4]


@pytest.fixture(scope="module")
def policy(unsloth_module):
    return load_policy(data_folder() / BASE_MODEL)


@pytest.fixture(scope="module")
def records(policy, tmp_path_factory):
    return sample_and_grade(
        CONFIG, *policy, ROWS, tmp_path_factory.mktemp("samples") / "samples.jsonl"
    )


def test_every_problem_gets_every_sample_once(records):
    assert sorted((r["problem_id"], r["sample"]) for r in records) == sorted(
        (row["id"], sample) for row in ROWS for sample in range(6)
    )
    assert len({r["completion"] for r in records}) > 6, "samples differ"


def test_records_hold_what_was_sampled_and_its_grade(records, policy):
    _, tokenizer = policy
    answers = {row["id"]: row["answer"] for row in ROWS}
    for record in records:
        assert record["grade"] == grade(record["completion"], answers[record["problem_id"]])
        assert tokenizer.eos_token not in record["completion"]
        assert tokenizer.pad_token not in record["completion"]
        assert record["finished"] or record["num_tokens"] == CONFIG.max_completion_length
        assert 0 < record["num_tokens"] <= len(record["completion"]) + 1
        assert record["seed"] == CONFIG.seed + record["batch"]
    assert any(record["finished"] for record in records)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.55, 0.999])
def test_a_run_cut_anywhere_ends_the_same(policy, records, tmp_path, share):
    path = tmp_path / "samples.jsonl"
    whole = sample_and_grade(CONFIG, *policy, ROWS, path)
    assert whole == records
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    again = sample_and_grade(CONFIG, *policy, ROWS, path)
    assert again == records


def test_a_complete_file_is_not_sampled_again(policy, records, tmp_path, monkeypatch):
    path = tmp_path / "samples.jsonl"
    sample_and_grade(CONFIG, *policy, ROWS, path)
    model, tokenizer = policy
    monkeypatch.setattr(model, "generate", lambda **_: pytest.fail("nothing is missing"))
    assert sample_and_grade(CONFIG, model, tokenizer, ROWS, path) == records


def test_another_seed_draws_other_samples(policy, records, tmp_path):
    other = sample_and_grade(replace(CONFIG, seed=1), *policy, ROWS, tmp_path / "samples.jsonl")
    assert [r["completion"] for r in other] != [r["completion"] for r in records]


def test_other_settings_are_refused(policy, records, tmp_path):
    path = tmp_path / "samples.jsonl"
    sample_and_grade(CONFIG, *policy, ROWS, path)
    with pytest.raises(ValueError, match=r"temperature was 1.0 and is 0.5"):
        sample_and_grade(replace(CONFIG, temperature=0.5), *policy, ROWS, path)
    with pytest.raises(ValueError, match="problem_ids was"):
        sample_and_grade(CONFIG, *policy, ROWS[:2], path)


def test_counts_by_hand():
    rows = [{"id": "a"}, {"id": "b"}]
    grades = {"a": [Grade.CORRECT, Grade.WRONG], "b": [Grade.TIMED_OUT, Grade.UNPARSABLE]}
    records = [
        {"problem_id": p, "sample": i, "grade": g.value}
        for p, gs in grades.items()
        for i, g in enumerate(gs)
    ]
    assert correct_counts(records, rows, 2).tolist() == [1, 0]
    with pytest.raises(ValueError, match="'b' has 1; run the same command again"):
        correct_counts(records[:-1], rows, 2)
