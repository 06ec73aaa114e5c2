"""The quickstart as a user runs it, at smoke size: the real command, twice, then with other
settings.
"""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sage_unsloth import quickstart
from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.metrics import Estimate, pass_at_k
from sage_unsloth.training.figures import moving_average, plot_training

LEFT_BEHIND = (
    "report.json",
    "run.json",
    "pass_at_k.png",
    "pass_at_k.csv",
    "training.png",
    "training.csv",
)


def command(*arguments, folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "sage_unsloth", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    done = command("quickstart", "--smoke", "--out", "run", folder=folder, PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder, done


@pytest.mark.slow
def test_quickstart_leaves_everything_it_promises(finished):
    folder, done = finished
    out = folder / "run"
    for name in LEFT_BEHIND:
        assert (out / name).stat().st_size > 100, name
    for name in ("sft", "grpo", "sage-branch"):
        assert (out / "samples" / f"{name}.jsonl").exists()
    report = json.loads((out / "report.json").read_text())
    assert list(report["pass_at_k"]["all problems"]) == list(quickstart.MODELS)
    assert report["settings"]["rlvr"]["seed"] == 3407
    assert report["environment"]["packages"]["unsloth"]
    assert report["training"]["SAGE-Branch"]["steps"] == 2
    for part in ("Estimate:", "pass@1", "SAGE-Branch - GRPO", "report.json"):
        assert part in done.stdout


@pytest.mark.slow
def test_second_run_says_that_it_is_complete(finished, monkeypatch, capsys):
    folder, first = finished
    monkeypatch.chdir(folder)
    assert main(["quickstart", "--smoke", "--out", "run"]) == 0
    again = capsys.readouterr().out
    assert "run is complete" in again
    table = first.stdout[
        first.stdout.index("all problems (") : first.stdout.index("Written to")
    ].strip()
    assert table in again


@pytest.mark.slow
def test_another_process_leaves_the_same_to_the_last_bit(finished, tmp_path):
    """Weights, metrics, completions, records, figures' tables and report; Python's order of sets is
    another one.
    """
    done = command("quickstart", "--smoke", "--out", "run", folder=tmp_path, PYTHONHASHSEED="2")
    assert done.returncode == 0, done.stderr[-4000:]
    one, other = (timeless_files(folder / "run") for folder in (finished[0], tmp_path))
    assert one.keys() == other.keys()
    weights = [name for name in one if name.endswith(".safetensors")]
    assert len(weights) == 4 and "sage-branch/completions.jsonl" in one
    assert [name for name in one if one[name] != other[name]] == []


def timeless_files(out):
    """The content of every file of a quickstart, without seconds, dates and ids of runs."""
    changing = {
        "seconds",
        "step_time",
        "run",
        "seconds_this_time",
        "environment",
        "model_path",
        "date",
    }
    changing |= {"train_runtime", "train_samples_per_second", "train_steps_per_second"}

    def steady(value):
        if isinstance(value, dict):
            # PEFT keeps these in a set, whose order is another one in each process.
            value = {k: sorted(v) if k == "target_modules" else v for k, v in value.items()}
            return {k: steady(v) for k, v in value.items() if k not in changing}
        return value

    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.suffix == ".json":
            found[name] = steady(json.loads(path.read_text()))
        elif path.suffix == ".jsonl":
            found[name] = [steady(json.loads(line)) for line in path.read_text().splitlines()]
        elif path.name == "training.csv":
            with path.open(newline="") as file:
                found[name] = [steady(row) for row in csv.DictReader(file)]
        elif path.is_file() and path.name != "training_args.bin" and path.suffix != ".lock":
            found[name] = path.read_bytes()
    return found


@pytest.mark.slow
def test_folder_with_other_settings_is_refused(finished, monkeypatch, capsys):
    folder, _ = finished
    monkeypatch.chdir(folder)
    assert main(["quickstart", "--out", "run"]) == 2
    error = capsys.readouterr().err
    assert "error:" in error and "Traceback" not in error
    for part in ("rlvr.max_steps was 2 and is 100", "choose another --out"):
        assert part in error


@pytest.mark.parametrize("out", ["file", "/proc/nothing"])
def test_unusable_folders_are_refused_without_a_traceback(tmp_path, monkeypatch, capsys, out):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["quickstart", "--out", out]) == 2
    error = capsys.readouterr().err
    assert "error:" in error and "Traceback" not in error


def counts(rows, values):
    records = []
    for row, (correct, n) in zip(rows, values, strict=True):
        for sample in range(n):
            text = "17=10+7;<end_working_out><SOLUTION>1</SOLUTION>" if sample else "nothing"
            records.append(
                {
                    "problem_id": row["id"],
                    "sample": sample,
                    "completion": text,
                    "num_tokens": 3,
                    "finish_reason": "stop",
                    "extracted": "1" if sample else None,
                    "grade": "correct" if sample < correct else "wrong",
                }
            )
    return records


def test_report_by_hand():
    rows = [{"id": "a", "family": "usual"}, {"id": "b", "family": "rare"}]
    config = quickstart.QuickstartConfig()
    config = replace(config, sampling=replace(config.sampling, num_samples=4))
    samples = {name: counts(rows, [(i, 4), (0, 4)]) for i, name in enumerate(quickstart.MODELS)}
    report = quickstart.make_report(config, rows, samples)
    assert report["num_problems"] == {"all problems": 2, "family: usual": 1, "family: rare": 1}
    for i, name in enumerate(quickstart.MODELS):
        for k in (1, 2, 4):
            expected = pass_at_k(4, i, k)
            assert report["pass_at_k"]["family: usual"][name][str(k)]["mean"] == pytest.approx(
                expected
            )
            assert report["pass_at_k"]["all problems"][name][str(k)]["mean"] == pytest.approx(
                expected / 2
            )
        assert report["pass_at_k"]["family: rare"][name]["4"]["mean"] == 0
    difference = report["differences"]["all problems"]["SAGE-Branch - GRPO"]["1"]
    assert difference["mean"] == pytest.approx((2 / 4 - 1 / 4) / 2)
    assert report["behaviour"]["GRPO"]["in_format"] == 6 / 8
    assert report["behaviour"]["GRPO"]["routes"] == {"tens": 6 / 8, "none": 2 / 8}
    text = quickstart.summary(report)
    assert "GRPO         0.125" in text


def test_problems_are_spread_over_families():
    rows = [
        {"id": i, "family": name}
        for i, name in enumerate(["usual"] * 50 + ["rare"] * 35 + ["far"] * 15)
    ]
    assert quickstart.spread(rows, None) == quickstart.spread(rows, 100) == rows
    few = quickstart.spread(rows, 5)
    assert {row["family"] for row in few} == {"usual", "rare", "far"}
    assert len({row["id"] for row in few}) == 5


def test_figures_are_drawn_from_the_tables_beside_them(tmp_path):
    curve = {k: Estimate(0.1 * k, 0.05 * k, 0.12 * k) for k in (1, 2, 4)}
    plot_pass_at_k({"all": {"a": curve, "b": curve}}, tmp_path / "p.png", "note")
    table = np.genfromtxt(tmp_path / "p.csv", delimiter=",", names=True, dtype=None, encoding=None)
    assert table["mean"].tolist() == pytest.approx([0.1, 0.2, 0.4] * 2)
    rows = [{"step": s, "reward": 0.1 * s, "kl/ref_k3": 0.0} for s in (1, 2, 3)]
    plot_training({"GRPO": rows}, tmp_path / "t.png", "note")
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 4
    assert moving_average([0.0, 3.0, 6.0], 3) == [1.5, 3.0, 4.5]
