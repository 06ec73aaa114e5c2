"""Trackers, by the real packages: what they leave on disk is read back."""

import json
import os
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest

from sage_unsloth.training.trackers import Tracked, Trackio

ROWS = [
    {"step": 0, "eval/pass@1": 0.25},
    {"step": 1, "seconds": 0.5, "reward": "0.5", "kl/ref_k3": 0.0, "loss": 0.1},
    {"step": 2, "seconds": 0.5, "reward": 0.75, "kl/ref_k3": 0.125, "eval/pass@1": 0.5},
]
COMPLETIONS = [
    {"step": 2, "completion": "a | <b>\n7", "grade": "correct"},
    {"step": 2, "completion": "no", "grade": "wrong"},
]


def feed(report_to, folder, rows=ROWS, resumed=0):
    """What a run tells its callbacks."""
    folder.mkdir(exist_ok=True)
    record = {"settings": {"beta": 0.05}, "environment": {"date": "2026-11-22"}}
    (folder / "run.json").write_text(json.dumps(record))
    samples = folder / "completions.jsonl"
    tracked = Tracked(report_to, folder, samples)
    state = SimpleNamespace(global_step=resumed, is_world_process_zero=True)
    tracked.on_train_begin(None, state, None)
    for row in rows:
        state.global_step = row["step"]
        if row["step"] == 2:
            samples.write_text("".join(json.dumps(one) + "\n" for one in COMPLETIONS))
        tracked.on_log(None, state, None, logs=row)
        tracked.on_step_end(None, state, None)
    tracked.on_log(None, state, None, logs={"train_runtime": 3.0})  # of no step
    tracked.on_train_end(None, state, None)


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=True)
    events.Reload()
    tags = events.Tags()
    values = {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in tags["scalars"]
    }
    texts = {name: events.Tensors(name)[-1] for name in tags["tensors"]}
    return values, texts


def test_tensorboard_has_the_runs_own_names(tmp_path):
    feed("tensorboard", tmp_path)
    values, texts = scalars(tmp_path)
    assert values == {
        "eval/pass@1": [(0, 0.25), (2, 0.5)],
        "seconds": [(1, 0.5), (2, 0.5)],
        "reward": [(1, 0.5), (2, 0.75)],
        "kl/ref_k3": [(1, 0.0), (2, 0.125)],
        "loss": [(1, pytest.approx(0.1))],
    }
    (table,) = texts.values()
    text = table.tensor_proto.string_val[0].decode()
    head, line, first, second = text.split("\n")
    assert head == "| completion | grade |" and line.count("---") == 2
    assert "<b>" not in first.replace("\\<b", "") and second == "| no | wrong |"


def test_steps_that_are_trained_again_replace_the_old_ones(tmp_path):
    feed("tensorboard", tmp_path)
    feed("tensorboard", tmp_path, [ROWS[2] | {"reward": 1.0}], resumed=1)
    values, _ = scalars(tmp_path)
    assert values["reward"] == [(1, 0.5), (2, 1.0)]


def wandb_records(file):
    """The records of an offline run's file: blocks of 32 KiB, each record with a header of seven
    bytes (checksum, length, place of the part), as in LevelDB's logs.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = file.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if place % 32768 > 32768 - 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, parts = Record(), parts if parts else b""
            record.ParseFromString(parts)
            parts = b""
            yield record


def test_wandb_is_offline_and_has_the_runs_own_names(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "")  # so that what the run sets is undone
    monkeypatch.delenv("WANDB_MODE")
    feed("wandb", tmp_path)
    import wandb

    wandb.teardown()  # as at the end of the process: its service writes the rest
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, config = {}, {}
    for record in wandb_records(file):
        for item in record.history.item:
            name = item.key or ".".join(item.nested_key)
            history.setdefault(name, []).append(json.loads(item.value_json))
        for item in record.run.config.update:
            config[item.key] = json.loads(item.value_json)
    assert history["reward"] == [0.5, 0.75] and history["eval/pass@1"] == [0.25, 0.5]
    assert history["_step"] == [0, 1, 2] and config["beta"] == 0.05
    assert any(name.startswith("completions") for name in history)
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/completions*.json")
    assert json.loads(table.read_text())["data"] == [
        [row["completion"], row["grade"]] for row in COMPLETIONS
    ]


def trackio_rows(folder, name):
    """step -> what trackio's own reader says, over all rows of a run; in a process of its own,
    since trackio reads one folder.
    """
    code = (
        "import json, trackio; (run,) = trackio.Api().runs('sage_unsloth'); "
        "from trackio.sqlite_storage import SQLiteStorage as S; "
        "print(json.dumps([run.name, run.config, S.get_logs('sage_unsloth', run.name)]))"
    )
    environment = os.environ | {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    run, config, rows = json.loads(done.stdout.splitlines()[-1])
    assert run == name
    rows = [{k: v for k, v in row.items() if k != "timestamp"} for row in rows]
    return config, sorted(rows, key=lambda row: (row["step"], len(row)))


def test_trackio_is_in_the_runs_folder_under_its_own_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/else")  # would send the run away
    run = tmp_path / "a run"
    feed("trackio", run)
    config, rows = trackio_rows(run, "a run")
    assert config["beta"] == 0.05
    *metrics, second, table = rows
    assert metrics == [
        {"step": 0, "eval/pass@1": 0.25},
        {"step": 1, "seconds": 0.5, "reward": 0.5, "kl/ref_k3": 0.0, "loss": 0.1},
    ]
    table, second = sorted((second, table), key=len)
    assert second == {"seconds": 0.5, "reward": 0.75, "kl/ref_k3": 0.125, "eval/pass@1": 0.5} | {
        "step": 2
    }
    cells = table["completions"]["_value"]
    assert cells == [{k: v for k, v in row.items() if k != "step"} for row in COMPLETIONS]
    # Trained again from step 2 on: each step is there once.
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    feed("trackio", run, [ROWS[2] | {"reward": 1.0}], resumed=1)
    _, again = trackio_rows(run, "a run")
    assert [row["reward"] for row in again if "reward" in row] == [0.5, 1.0]
    assert len(again) == 4


def test_trackio_that_ends_leaves_the_run_going(tmp_path, caplog):
    (tmp_path / "run.json").write_text('{"settings": {}}')
    tracker = Trackio(tmp_path, 0)
    tracker.process.kill()
    tracker.process.wait()
    for step in (1, 2):
        tracker.metrics(step, {"reward": 1.0})
    tracker.close()
    assert [record.getMessage().count("trackio has ended") for record in caplog.records] == [1]


def test_trackio_that_cannot_start_says_why(tmp_path, monkeypatch):
    (tmp_path / "run.json").write_text('{"settings": {}}')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "trackio.py").write_text("raise RuntimeError('no database today')")
    monkeypatch.syspath_prepend(str(broken))
    with pytest.raises(ValueError, match=r"no database today.*. Fix it, or set report_to=none"):
        Trackio(tmp_path, 0)


def test_the_mode_that_was_set_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    feed("wandb", tmp_path)
    assert not list(tmp_path.glob("wandb/offline-run-*"))


def test_other_processes_write_nothing(tmp_path):
    tracked = Tracked("tensorboard", tmp_path, tmp_path / "completions.jsonl")
    state = SimpleNamespace(global_step=0, is_world_process_zero=False)
    tracked.on_train_begin(None, state, None)
    tracked.on_log(None, state, None, logs=ROWS[1])
    tracked.on_train_end(None, state, None)
    assert not list(tmp_path.iterdir())
