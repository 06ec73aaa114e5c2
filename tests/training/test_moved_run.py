"""A run moves from machine to machine: on a drive that is mounted elsewhere, or as a dataset."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sage_unsloth.training.stage import METRICS, read_metrics

ROOT = Path(__file__).parents[2]
RUN = ("--smoke", "--set", "max_steps=4", "save_steps=2", "preflight_prompts=2")


def start(*arguments):
    command = [sys.executable, "-m", "sage_unsloth", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def train(runs):
    return start(
        "train", "--algorithm", "sage-token", "--from", runs / "sft", "--out", runs / "rl", *RUN
    )


def finish(process, code=0):
    said, _ = process.communicate()
    assert process.returncode == code, said


@pytest.mark.long
def test_a_run_that_moved_ends_as_one_that_stayed(tmp_path):
    """Taken away by SIGTERM in one process, copied, and resumed in another from a folder of another
    name; nothing is left of the first.
    """
    drive, dataset, working = (
        tmp_path / name for name in ("drive/runs", "input/mine", "working/runs")
    )
    finish(
        start(
            "sft", "--model", "arithmetic-base", "--out", drive / "sft", "--smoke", "--held-out", 2
        )
    )
    shutil.copytree(drive, tmp_path / "stayed")

    taken_away = train(drive)
    deadline = time.monotonic() + 600
    while not ((drive / "rl" / METRICS).is_file() and read_metrics(drive / "rl")):
        assert taken_away.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    taken_away.send_signal(signal.SIGTERM)
    finish(taken_away, 143)
    steps = len(read_metrics(drive / "rl"))
    assert 1 <= steps < 4 and not (drive / "rl" / "adapter").exists()

    shutil.move(drive, dataset)
    shutil.copytree(dataset, working)
    shutil.rmtree(dataset)
    finish(train(working))
    finish(train(tmp_path / "stayed"))

    rows, expected = (read_metrics(runs / "rl") for runs in (working, tmp_path / "stayed"))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for key in ("loss", "reward", "kl", "sage/guide_mean"):
        assert [row[key] for row in rows] == [row[key] for row in expected], key
    found, stayed = (
        load_file(runs / "rl" / "adapter" / "adapter_model.safetensors")
        for runs in (working, tmp_path / "stayed")
    )
    assert set(found) == set(stayed)
    assert all(torch.equal(found[name], stayed[name]) for name in found)
