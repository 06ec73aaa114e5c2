"""The quickstart as a user runs it, at smoke size: the real command, twice, then with other
settings.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

import numpy as np
import pytest
from same_run import timeless_files

from sage_unsloth import quickstart
from sage_unsloth.__main__ import main
from sage_unsloth.evaluation.families import family_report
from sage_unsloth.evaluation.figures import plot_pass_at_k
from sage_unsloth.evaluation.metrics import Estimate, pass_at_k
from sage_unsloth.problems.subsets import over_families
from sage_unsloth.training.figures import moving_average, plot_training
from sage_unsloth.training.quickstart_plan import plan

LEFT_BEHIND = (
    "report.json",
    "run.json",
    "pass_at_k.png",
    "pass_at_k.csv",
    "training.png",
    "training.csv",
    "evaluation/report.json",
    "evaluation/table.csv",
    "evaluation/differences.png",
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


@pytest.mark.long
def test_quickstart_leaves_everything_it_promises(finished):
    folder, done = finished
    out = folder / "run"
    for name in LEFT_BEHIND:
        assert (out / name).stat().st_size > 100, name
    for name in ("sft", "grpo", "sage-branch"):
        assert (out / "samples" / f"{name}.jsonl").exists()
    report = json.loads((out / "report.json").read_text())
    assert list(report["pass_at_k"]["all problems"]) == list(quickstart.MODEL_NAMES)
    assert report["settings"]["rlvr"]["seed"] == 3407
    assert report["environment"]["packages"]["unsloth"]
    training = report["training"]
    assert training["SAGE-Branch"]["steps"] == 2
    logged = [set(training[name]["last_tenth"]) for name in ("SAGE-Branch", "GRPO")]
    assert logged[0] - logged[1] == {"sage/guide_mean", "sage/share_touched"}, "GRPO has no guide"
    assert "sage/entropy" in logged[1]
    for part in ("Estimate:", "pass@1", "SAGE-Branch - GRPO", "report.json"):
        assert part in done.stdout


@pytest.mark.long
def test_second_run_says_that_it_is_complete(finished, capsys):
    folder, first = finished
    assert main(["quickstart", "--smoke", "--out", str(folder / "run")]) == 0
    again = capsys.readouterr().out
    assert "run is complete" in again
    start, end = (first.stdout.index(part) for part in ("all problems (", "Written to"))
    assert first.stdout[start:end].strip() in again


@pytest.mark.long
def test_another_process_leaves_the_same_to_the_last_bit(finished, tmp_path):
    """Weights, metrics, completions, records, figures' tables and report; Python's order of sets is
    another one, and the RL runs go side by side.
    """
    arguments = ["quickstart", "--smoke", "--out", "run", "--processes", "2"]
    done = command(*arguments, folder=tmp_path, PYTHONHASHSEED="2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "one after another: a further process would take longer" in finished[1].stdout
    assert "in parallel, 2 at a time: as requested." in done.stdout
    assert done.stderr.count("Loading Unsloth.") == 3, "what a process logs is passed on"
    for name in quickstart.MODEL_NAMES[1:]:
        assert f"{name}: 2step" in done.stderr.replace(" ", "") or "2/2" in done.stderr
    one, other = (timeless_files(folder / "run") for folder in (finished[0], tmp_path))
    assert one.keys() == other.keys()
    weights = [name for name in one if name.endswith(".safetensors")]
    assert len(weights) == 4 and "sage-branch/completions.jsonl" in one
    assert [name for name in one if one[name] != other[name]] == []


@pytest.mark.long
def test_folder_with_other_settings_is_refused(finished, capsys):
    assert main(["quickstart", "--out", str(finished[0] / "run")]) == 2
    error = capsys.readouterr().err
    for part in ("error:", "rlvr.max_steps was 2 and is 100", "Choose another --out"):
        assert part in error


def test_unusable_folders_are_refused_without_a_traceback(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (str(tmp_path / "file"), "/proc/nothing"):
        assert main(["quickstart", "--out", out]) == 2
        assert "error:" in capsys.readouterr().err


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


def test_report_by_hand(tmp_path):
    rows = [{"id": "a", "family": "usual"}, {"id": "b", "family": "rare"}]
    sampling = asdict(quickstart.QuickstartConfig().sampling)
    samples = {
        name: counts(rows, [(i, 4), (0, 4)]) for i, name in enumerate(quickstart.MODEL_NAMES)
    }
    report = family_report(rows, samples, sampling, tmp_path)
    assert report["num_problems"] == {"all problems": 2, "family: usual": 1, "family: rare": 1}
    for i, name in enumerate(quickstart.MODEL_NAMES):
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
    text = quickstart.family_tables(report)
    assert "GRPO         0.125" in text


def test_problems_are_spread_over_families():
    rows = [
        {"id": i, "family": name}
        for i, name in enumerate(["usual"] * 50 + ["rare"] * 35 + ["far"] * 15)
    ]
    assert over_families(rows, None) == over_families(rows, 100) == rows
    few = over_families(rows, 5)
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


@pytest.mark.parametrize(("steps", "lines"), [(3, ["None"]), (17, ["None"]), (18, ["-", "-"])])
def test_a_few_steps_are_drawn_as_points_and_not_as_a_course(tmp_path, monkeypatch, steps, lines):
    drawn = {}

    def save(figure, axes, path, table, note):
        drawn.update(axis=axes[0], note=note)

    monkeypatch.setattr("sage_unsloth.training.figures.save_figure", save)
    rows = [{"step": s, "reward": 0.1 * s} for s in range(1, steps + 1)]
    plot_training({"GRPO": rows}, tmp_path / "t.png", "seed 1")
    found = [line.get_linestyle() for line in drawn["axis"].get_lines()]
    assert len(found) == len(lines) and (found == ["None"]) is (lines == ["None"])
    assert (f"{steps} are too few" in drawn["note"]) is (lines == ["None"])


@pytest.mark.parametrize(("count", "minutes"), [(1, 12), (2, 8)])
def test_the_estimate_by_hand(tmp_path, count, minutes):
    config = quickstart.QuickstartConfig()
    sft = replace(config.sft, max_steps=300, batch_size=20)  # 60 s
    rl = replace(config.rlvr, max_steps=100, prompts_per_step=8, num_generations=16)  # 256 s
    sampling = replace(config.sampling, num_samples=64)  # of 100 problems, 3 models: 124.8 s
    text = plan(tmp_path, sft, ["a", "b"], rl, sampling, 100, count, "cores")
    # Beside each other they start for a second time: 30 s more.
    assert f"Estimate: {minutes} min (" in text


def test_any_algorithms_under_settings_of_ones_own():
    config = quickstart.smoke_config()
    default = quickstart.choose_algorithms(config, quickstart.QUICKSTART_ALGORITHMS, {})
    assert list(default) == ["GRPO", "SAGE-Branch"] == list(quickstart.MODEL_NAMES[1:])
    assert all(one.configure(config.rlvr) == config.rlvr for one in default.values())
    found = quickstart.choose_algorithms(
        config, ["grpo-no-kl", "sage-token"], {"epsilon_high": 0.3}
    )
    assert list(found) == ["grpo-no-kl", "sage-token"]
    assert [one.beta for one in found.values()] == [0.0, config.rlvr.beta]
    assert [one.epsilon_high for one in found.values()] == [0.3, 0.3]
    with pytest.raises(ValueError, match="grpo-no-kl is named for beta=0"):
        quickstart.choose_algorithms(config, ["grpo-no-kl"], {"beta": config.rlvr.beta})
    other = replace(config, rlvr=replace(config.rlvr, beta=0.5))
    assert [
        a.beta
        for a in quickstart.choose_algorithms(other, quickstart.QUICKSTART_ALGORITHMS, {}).values()
    ] == [0.5] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--algorithms", "grop"], "grpo"),
        (["--algorithms", "grpo", "grpo"], "algorithms must be different rows"),
        (["--set", "beta=0"], "beta"),
        (["--set", "betta=1"], "--set takes one of"),
        (["--set", "patience=2"], "--set eval_steps=50"),
    ],
)
def test_a_choice_that_cannot_be_is_refused_before_anything_is_made(
    options, message, tmp_path, capsys
):
    assert main(["quickstart", "--out", str(tmp_path / "run"), *options]) == 2
    error = capsys.readouterr().err
    assert "error:" in error and message in error
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_first_question_needs_no_code(finished, tmp_path):
    """ "And by token guides, with β = 0.5?": the same SFT model, other curves, a held-out one."""
    arguments = ["quickstart", "--smoke", "--out", "run", "--algorithms", "sage-token"]
    arguments += ["--set", "beta=0.5", "eval_steps=1", "eval_rows=4"]
    done = command(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert list(report["pass_at_k"]["all problems"]) == ["SFT", "sage-token"]
    assert report["settings"]["set"] == {"beta": 0.5, "eval_steps": 1, "eval_rows": 4}
    before = json.loads((finished[0] / "run" / "report.json").read_text())
    assert report["pass_at_k"]["all problems"]["SFT"] == before["pass_at_k"]["all problems"]["SFT"]
    settings = json.loads((tmp_path / "run" / "sage-token" / "run.json").read_text())["settings"]
    assert settings["beta"] == 0.5 and settings["guide"].startswith("TokenGuide")
    assert "eval/pass@1" in (tmp_path / "run" / "training.csv").read_text()


TOUCHY = """
from dataclasses import dataclass
from pathlib import Path

@dataclass(frozen=True)
class Touchy:
    needs = frozenset()
    causal = True

    def log_guide(self, signals, *, step, max_steps, generator=None):
        if Path("broken").exists():
            raise RuntimeError("no card today")
        return 0.1 * (signals.ref_logps < -3) * signals.mask

touchy = Touchy()
"""


@pytest.mark.long
def test_an_error_in_one_of_two_runs_names_it_and_both_are_resumed(finished, tmp_path):
    (tmp_path / "mine.py").write_text(TOUCHY)
    (tmp_path / "broken").touch()
    words = ["quickstart", "--smoke", "--out", "run", "--processes", "2"]
    words += ["--algorithms", "grpo", "mine:touchy"]
    first = command(*words, folder=tmp_path)
    assert first.returncode == 2, first.stderr[-4000:]
    assert "error: touchy stopped: RuntimeError: no card today" in first.stderr
    assert "in log_guide" in (tmp_path / "run" / "processes" / "touchy" / "log.txt").read_text()
    (tmp_path / "broken").unlink()
    again = command(*words, folder=tmp_path)
    assert again.returncode == 0, again.stderr[-4000:]
    assert not (tmp_path / "run" / "processes").exists()
    one, other = (timeless_files(folder / "run" / "grpo") for folder in (finished[0], tmp_path))
    assert [name for name in one.keys() | other.keys() if one.get(name) != other.get(name)] == []
