"""A first user's study: 60 questions of their own, two methods, two seeds, two kills, a resume."""

import json
import os
import signal
import subprocess
import sys
import time

import pandas
import pytest

from sage_unsloth.problems import arithmetic
from sage_unsloth.study.worker import scale_adapter

WORDS = ["study", "--smoke", "--from", "arithmetic-base", "--data", "mine.csv"]
WORDS += ["--benchmarks", "own=held_out.csv", "--columns", "problem=ask", "answer=total"]
WORDS += ["--group", "kind", "--methods", "grpo=0.05", "mine:rule=0.2", "--seeds", "2"]
WORDS += ["--claims", "mine:rule=0.2>grpo=0.05@1", "--free", "early", "scale", "--out", "out"]


def start(folder):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "sage_unsloth", *WORDS],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill_once(folder, pattern, how):
    """Starts the study, kills it once a file of this pattern is there, and returns what it said."""
    process = start(folder)
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    process.send_signal(how)
    return process.communicate(timeout=300)[0]


@pytest.mark.long
def test_sixty_questions_of_ones_own(tmp_path):
    rows = arithmetic.problems("train")[:60]
    table = [
        {"ask": row["problem"], "total": int(row["answer"]), "kind": row["family"]} for row in rows
    ]
    frame = pandas.DataFrame(table)
    frame.to_csv(tmp_path / "mine.csv", index=False)
    frame[-20:].to_csv(tmp_path / "held_out.csv", index=False)
    (tmp_path / "mine.py").write_text(
        "from sage_unsloth.objective.guides import BranchGuide\nrule = BranchGuide(ratio=0.4)\n"
    )
    # Ctrl-C in a training step: it is saved. SIGKILL of the parent: its children end by themselves.
    said = kill_once(tmp_path, "out/runs/*/metrics.jsonl", signal.SIGINT)
    assert "To resume: python -m sage_unsloth study" in said
    assert "2 points x 2 training seeds: grpo beta=0.05, mine:rule beta=0.2" in said
    assert "The time is estimated after the first run" in said
    kill_once(tmp_path, "out/results/*_seed-1.json", signal.SIGKILL)
    complete = {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/results/*.json")}
    last = start(tmp_path)
    said = last.communicate(timeout=900)[0]
    assert last.returncode == 0, said[-4000:]
    for file, changed in complete.items():
        assert file.stat().st_mtime_ns == changed, f"{file} was made twice"
    assert "Against the start model: pass@1" in said and "Written to out" in said

    out = tmp_path / "out"
    report = json.loads((out / "report.json").read_text())
    own = report["sets"]["own"]
    assert list(own["points"]) == ["start", "grpo beta=0.05", "mine:rule beta=0.2"]
    assert own["num_samples"]["start"] == 4 * own["num_samples"]["grpo beta=0.05"]
    assert max(map(int, own["ks"])) * 2 <= own["num_samples"]["grpo beta=0.05"]
    assert set(own["lines"]) <= {"mixture", "scale", "early"} and own["groups"]["curves"]
    (claim,) = report["claims"]
    assert claim["claim"] == "mine:rule beta=0.2>grpo beta=0.05@1" and claim["runs_complete"] == 0
    (dose,) = report["dose"]
    assert dose["point"] == "mine:rule beta=0.2" and dose["wrong"] > 0
    text = (out / "report.md").read_text()
    assert "Σ log q, correct | Σ log q, wrong" in text
    data = json.loads((out / "records.json").read_text())
    assert len(data["runs"]) == 4 and len(data["variants"]) == 2 * 4
    later = data["start"]["sets"]["own"]["later"]
    counts = zip(data["start"]["sets"]["own"]["correct"], later["correct"], strict=True)
    assert later["num_samples"] == 3 * own["num_samples"]["grpo beta=0.05"]
    assert all(0 <= part <= whole for whole, part in counts)
    for run in (*data["runs"], data["start"]):
        assert run["environment"]["packages"]["sage_unsloth"] and run["environment"]["code_tree"]
    assert (out / "report.md").read_text().startswith("# Study: mine.csv from arithmetic-base")
    assert (out / "frontier.png").stat().st_size > 1000
    assert not list(out.glob("processes/*"))

    # Each run is one of `train`: its folder has what train leaves.
    run = out / "runs" / "grpo_beta-0.05_seed-1"
    assert {"adapter", "run.json", "metrics.jsonl"} <= {file.name for file in run.iterdir()}
    seeds = [
        json.loads((folder / "run.json").read_text())["settings"]["seed"]
        for folder in sorted((out / "runs").iterdir())
        if folder.is_dir()
    ]
    assert sorted(seeds) == [1, 1, 2, 2]
    again = start(tmp_path)
    said = again.communicate(timeout=300)[0]
    assert again.returncode == 0 and "processes left" not in said


def test_a_scaled_adapter_changes_the_weights_by_the_factor(tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"lora_alpha": 32, "r": 16}')
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"weights")
    folder = scale_adapter(tmp_path / "adapter", 0.25, tmp_path / "scaled" / "0.25")
    assert json.loads((folder / "adapter_config.json").read_text()) == {"lora_alpha": 8.0, "r": 16}
    assert (folder / "adapter_model.safetensors").read_bytes() == b"weights"
    assert scale_adapter(tmp_path / "adapter", 0.25, folder) == folder
