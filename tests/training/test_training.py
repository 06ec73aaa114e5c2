"""What both stages share: rows, settings, trackers, checkpoints."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from sage_unsloth.runs.checkpoints import last_checkpoint
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.stopping import Stop
from sage_unsloth.training.ledger import Ledger
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.stage import (
    check_rows,
    check_tracker,
    read_metrics,
)
from sage_unsloth.training.step_log import StepLog


def test_metrics_after_a_resume_count_once(tmp_path):
    lines = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 2, "loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_metrics(tmp_path) == [lines[0], lines[2]]
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([{"problem": "1+1"}], r"row 0 lacks 'answer' and has \['problem'\]"),
        ([{"question": "1+1", "answer": "2"}], r"lacks 'problem' and has \['answer', 'question'\]"),
        (
            [{"problem": "1", "answer": "2"}, {"problem": "1", "answer": ""}],
            "'answer' must be a non-empty text, but row 1 has ''",
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
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        torch.save({"step": step}, path / name)
    save_file({"weight": torch.ones(1000)}, path / weights)
    (path / "trainer_state.json").write_text(state)
    return path


@pytest.mark.smoke
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


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors"]
)
def test_a_file_cut_short_makes_a_checkpoint_incomplete(tmp_path, name):
    older, newer = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    assert last_checkpoint(tmp_path) == newer
    content = (newer / name).read_bytes()
    (newer / name).write_bytes(content[: len(content) // 2])
    assert last_checkpoint(tmp_path) == older


def test_a_missing_shard_makes_a_checkpoint_incomplete(tmp_path):
    path = checkpoint(tmp_path, 1, weights="model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert last_checkpoint(tmp_path) is None
    save_file({"weight": torch.ones(10)}, path / "model-00002-of-00002.safetensors")
    assert last_checkpoint(tmp_path) == path


def test_trackers_are_checked_before_anything_is_loaded(monkeypatch):
    check_tracker("none")
    with pytest.raises(ValueError, match="one of none, tensorboard, wandb, trackio, got 'mlflow'"):
        check_tracker("mlflow")
    check_tracker("trackio")
    monkeypatch.setitem(sys.modules, "trackio", None)  # as where it is not installed
    with pytest.raises(ValueError, match="pip install trackio"):
        check_tracker("trackio")


def run_folder(folder, steps, save_steps):
    """A run that has logged `steps` optimizer steps."""
    (folder / "run.json").write_text(json.dumps({"free_settings": {"save_steps": save_steps}}))
    rows = "".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text(rows)
    return folder


@pytest.mark.parametrize(
    ("steps", "began", "now", "refused"),
    [
        (28, 20, 20, True),
        (20, 20, 20, False),  # killed while it wrote its first checkpoint
        (28, 20, 50, False),  # asked for now: the first one is due after 50
        (28, 50, 20, False),
        (0, 20, 20, False),
    ],
)
def test_a_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path, steps, began, now, refused):
    folder = run_folder(tmp_path, steps, began)
    ledger = Ledger(folder, "sft")
    ledger.check_checkpoints(folder / "checkpoints" / "checkpoint-20", now)
    if not refused:
        ledger.check_checkpoints(None, now)
        return
    with pytest.raises(ValueError, match=r"28 steps and has none complete.*move metrics.jsonl"):
        ledger.check_checkpoints(None, now)


def test_what_was_sampled_before_the_first_step_goes_with_its_settings(tmp_path):
    """Under new settings none of these files could be continued."""
    ledger, config = Ledger(tmp_path, "rlvr"), RlvrConfig()
    settings = {"stage": "rlvr", "model": "m", "max_completion_length": 64}
    ledger.begin(settings, config, "m")
    (tmp_path / "held-out").mkdir()
    names = ("preflight.jsonl", "preflight.settings.json", "guide_dose.json", "rehearsal.jsonl",
             "rehearsal.settings.json", "held-out/step-000000.jsonl",
             "held-out/step-000000.settings.json")  # fmt: skip
    for name in names:
        (tmp_path / name).write_text("{}")
    ledger.begin(settings, config, "m")
    assert all((tmp_path / name).exists() for name in names)
    ledger.begin(settings | {"max_completion_length": 32}, config, "m")
    assert not any((tmp_path / name).exists() for name in names)


def test_a_result_without_a_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"adapter is there and .*metrics.jsonl has none"):
        Ledger(tmp_path, "rlvr").complete(tmp_path / "adapter")
    with pytest.raises(ValueError, match="train again"):
        Ledger(run_folder(tmp_path, 0, 1), "rlvr").complete(tmp_path / "adapter")
    (tmp_path / "checkpoints").mkdir()
    Ledger(run_folder(tmp_path, 1, 1), "rlvr").complete(tmp_path / "adapter")
    assert not (tmp_path / "checkpoints").exists()


def test_rows_are_on_disk_and_the_trainer_keeps_the_last_alone(tmp_path):
    """It would write all of them into each checkpoint, more with every step."""
    from transformers import TrainerControl, TrainerState

    log = StepLog(tmp_path / "metrics.jsonl", "test", Stop(), lambda step, row: {"extra": step})
    state, control = TrainerState(max_steps=3), TrainerControl()
    log.on_train_begin(None, state, control)
    log.take({"step": 0})
    assert not log.path.exists(), "a run that has trained no step takes other settings"
    for step in (1, 2, 3):
        log.on_step_begin(None, state, control)
        state.global_step = step
        logs = {"loss": f"{step / 2}"}
        state.log_history.append(logs)
        log.on_log(None, state, control, logs=logs)
    log.on_log(None, state, control, logs={"train_runtime": 1.0})
    log.on_train_end(None, state, control)
    log.take({"step": 3})
    first, *rows, last = read_jsonl(log.path)
    assert (first, last) == ({"step": 0}, {"step": 3})
    assert [(row["step"], row["loss"], row["extra"]) for row in rows] == [
        (1, 0.5, 1),
        (2, 1.0, 2),
        (3, 1.5, 3),
    ]
    assert [entry["step"] for entry in state.log_history] == [3]
