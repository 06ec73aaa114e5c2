"""What both stages share: rows, settings, trackers, checkpoints."""

import json

import pytest

from sage_unsloth.records import read_jsonl
from sage_unsloth.training import (
    check_rows,
    check_tracker,
    in_words,
    last_checkpoint,
    read_metrics,
)


def test_metrics_after_a_resume_count_once(tmp_path):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [lines[0], lines[2]]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([{"problem": "1+1"}], r"row 0 lacks 'answer' and has \['problem'\]; rename"),
        ([{"question": "1+1", "answer": "2"}], r"lacks 'problem' and has \['answer', 'question'\]"),
        (
            [{"problem": "1", "answer": "2"}, {"problem": "1", "answer": ""}],
            "'answer' must be a non-empty text; row 1 has ''",
        ),
        ([{"problem": "1", "answer": 2}], "row 0 has 2"),
        ([{"problem": None, "answer": "2"}], "row 0 has None"),
    ],
)
def test_bad_rows_are_named(rows, message):
    with pytest.raises(ValueError, match=message):
        check_rows(rows, ("problem", "answer"))


def checkpoint(folder, step, weights="adapter_model.safetensors", state='{"global_step": 1}'):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", weights):
        (path / name).touch()
    (path / "trainer_state.json").write_text(state)
    return path


def test_the_newest_complete_checkpoint_counts(tmp_path, caplog):
    assert last_checkpoint(tmp_path) is None
    checkpoint(tmp_path, 9)
    ten = checkpoint(tmp_path, 10, weights="model.safetensors")
    (checkpoint(tmp_path, 11) / "optimizer.pt").unlink()
    checkpoint(tmp_path, 12, state='{"global')
    (tmp_path / "checkpoint-other").mkdir()
    assert last_checkpoint(tmp_path) == ten, "by number, not by name"
    assert caplog.text.count("is incomplete and is passed over") == 2
    (ten / "model.safetensors").unlink()
    assert last_checkpoint(tmp_path).name == "checkpoint-9"


def test_trackers_are_checked_before_anything_is_loaded():
    check_tracker("none")
    with pytest.raises(ValueError, match="one of none, tensorboard, trackio, wandb; got 'mlflow'"):
        check_tracker("mlflow")
    with pytest.raises(ValueError, match="pip install trackio, or leave it out"):
        check_tracker("trackio")


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.3, "12 s"), (600, "10 min"), (7200, "2.0 h"), (99.4, "99 s")]
)
def test_durations_in_words(seconds, text):
    assert in_words(seconds) == text
