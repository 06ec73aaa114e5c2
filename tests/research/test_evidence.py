"""The benchmark: its runs, its report by hand, its verdicts, a run of seconds in real processes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from research.benchmark.claims import CLAIMS, judge
from research.benchmark.command import main
from research.benchmark.design import BenchmarkConfig, Run, all_algorithms
from research.benchmark.records import Records
from research.benchmark.report import make_report
from research.benchmark.tasks import TASKS, get_task
from research.benchmark.text import markdown, readme_section
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.study.verdicts import verdict
from sage_unsloth.training.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]


# --- what is run ----------------------------------------------------------------------------------


def test_runs_come_seed_by_seed_and_the_grid_last():
    config = BenchmarkConfig(algorithms=("grpo", "sage-branch"), seeds=(4, 5), grid_seeds=1)
    runs = config.runs()
    assert [run.name for run in runs[:4]] == [
        "grpo_seed-4",
        "sage-branch_seed-4",
        "grpo_seed-5",
        "sage-branch_seed-5",
    ]
    assert len(runs) == 4 + 8, "the ninth cell is the run sage-branch itself"
    assert runs[4].name == "sage-branch_threshold-0.8_ratio-0.1_seed-4"
    guide = runs[4].row().guide
    assert (guide.threshold, guide.ratio) == (0.8, 0.1)
    assert len({run.name for run in runs}) == len(runs)


def test_the_default_set_fits_into_100_minutes_on_two_cores():
    config, task = BenchmarkConfig(), get_task("arithmetic")
    samples = sum(len(one.rows) * one.num_samples for one in task.sets.values())
    each = task.rlvr.max_steps * task.seconds["step"] + samples * task.seconds["completion"]
    assert len(config.seeds) == 8 and set(config.algorithms) <= set(all_algorithms())
    assert len(config.runs()) * each / 2 <= 100 * 60


def test_all_algorithms_are_the_whole_table_without_the_teacher():
    assert len(all_algorithms()) == len(ALGORITHMS) - 1
    assert "sage-teacher" not in all_algorithms()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"task": "mathematics"}, "--task must be one of"),
        ({"algorithms": ("sage-branch",)}, "grpo must be among"),
        ({"algorithms": ("grpo", "grpo")}, "different values"),
        ({"algorithms": ("grpo", "sage-teacher")}, "no teacher"),
        ({"algorithms": ("grpo", "sage-brunch")}, "Did you mean 'sage-branch'"),
        ({"seeds": (1, 1)}, "different values"),
        ({"beta": 0.0}, "beta must be > 0"),
        ({"seeds": (1,), "grid_seeds": 2}, "grid_seeds must be in"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        BenchmarkConfig(**given)


@pytest.mark.parametrize("name", TASKS)
def test_sets_are_disjoint_from_what_is_trained_on(name):
    task = get_task(name)
    assert next(iter(task.sets)) == "test"
    seen = {row["problem"] for rows in (task.sft_rows, task.train_rows) for row in rows}
    for one in task.sets.values():
        assert not seen & {row["problem"] for row in one.rows}
        assert all({"id", "problem", "answer", "family"} <= row.keys() for row in one.rows)
        assert len({row["id"] for row in one.rows}) == len(one.rows)


def test_problems_out_of_distribution():
    for rows in (arithmetic.swapped_problems(), arithmetic.round_problems()):
        for row in rows:
            first, second = row["problem"].removesuffix("=?").split("*")
            assert int(first) * int(second) == int(row["answer"])
    assert len(arithmetic.swapped_problems()) == 100 and len(arithmetic.round_problems()) == 72
    families = {row["problem"].split("*")[0]: row["family"] for row in arithmetic.round_problems()}
    assert [families[f"{tens}0"] for tens in (6, 7)] == ["known", "unknown"]


# --- the report -----------------------------------------------------------------------------------


def records(correct: dict[tuple[str, int | None], list[int]], cells=()) -> dict:
    """A benchmark of two problems with 4 samples; the rare way makes half of what is correct,
    rounded down.
    """
    runs = []
    for (algorithm, seed), counts in correct.items():
        test = {
            "correct": counts,
            "rare": [2, 1],
            "rare_correct": [count // 2 for count in counts],
            "mean_tokens": 20.0,
            "in_format": 1.0,
        }
        steps = 0 if seed is None else 6
        training = (
            {"reward": [0.1 * (step + (seed or 0)) for step in range(steps)]} if steps else {}
        )
        threshold, ratio = cells[len(runs)] if len(runs) < len(cells) else (None, None)
        runs.append(
            {
                "algorithm": algorithm,
                "seed": seed,
                "threshold": threshold,
                "ratio": ratio,
                "sets": {"test": test, "other": test},
                "training": training,
            }
        )
    one = {"title": "x", "problems": ["a", "b"], "families": ["usual", "rare"], "num_samples": 4}
    return {
        "task": "arithmetic",
        "title": "two problems",
        "rare_route": "round-up",
        "sets": {"test": one, "other": one},
        "runs": runs,
        "settings": {
            "rlvr": {
                "max_steps": 6,
                "prompts_per_step": 1,
                "num_generations": 2,
                "learning_rate": 0.1,
            },
            "sampling": {"temperature": 1.0},
        },
        "environment": {"packages": {"unsloth": "1", "torch": "2"}, "date": "2026-01-01T00:00:00"},
    }


COUNTS = {
    ("sft", None): [1, 1],
    ("grpo", 2): [3, 0], ("sage-branch", 2): [4, 1],
    ("grpo", 1): [2, 0], ("sage-branch", 1): [4, 0],
}  # fmt: skip


def test_report_by_hand():
    report = make_report(records(COUNTS))
    assert report["seeds"] == [1, 2]
    levels = report["pass_at_k"]["test"]["all"]
    assert levels["grpo"]["1"]["mean"] == pytest.approx((0.5 + 0 + 0.75 + 0) / 4)
    assert levels["grpo"]["4"]["mean"] == 0.5
    assert levels["sft"]["1"]["mean"] == 0.25
    assert report["pass_at_k"]["test"]["rare"]["sage-branch"]["4"]["mean"] == 0.5
    difference = report["differences"]["test"]["all"]["sage-branch - grpo"]["1"]
    assert difference["mean"] == pytest.approx(np.mean([[0.5, 0.0], [0.25, 0.25]])), "seed by seed"
    rare = report["behaviour"]["sage-branch"]
    assert rare["rare way"]["mean"] == pytest.approx((0.5 + 0.25) / 2)
    assert rare["solutions by the rare way"]["mean"] == pytest.approx((0.5 + 0 + 0.5 + 0) / 4)
    thirds = [third["mean"] for third in report["training"]["grpo"]["reward"]]
    assert thirds == pytest.approx([0.2, 0.4, 0.6])
    assert report["grid"] is None
    assert {claim["text"] for claim in report["claims"]} == {
        claim.text for claim in CLAIMS if {claim.a, claim.b} <= {"sft", "grpo", "sage-branch"}
    } - {"Branch raises pass@16 over GRPO"}, "4 samples have no pass@16"
    assert "grpo-no-kl" in report["not_run"]
    text = markdown(report)
    assert "sage-branch - grpo | +.250 [" in text and "### Family: rare" in text
    assert "Seeds" not in report and "2 training seeds (1, 2)" in text


def test_pairing_by_seed_is_by_seed_and_not_by_order():
    """Turned around in the file, a seed still meets itself: the difference is the same in every
    seed, so its interval is a point.
    """
    counts = {
        ("sft", None): [1, 1],
        ("grpo", 1): [1, 1],
        ("grpo", 2): [3, 3],
        ("sage-branch", 2): [4, 4],
        ("sage-branch", 1): [2, 2],
    }
    found = make_report(records(counts))["differences"]["test"]["all"]["sage-branch - grpo"]["1"]
    assert (found["low"], found["mean"], found["high"]) == pytest.approx((0.25, 0.25, 0.25))


def test_seeds_that_one_algorithm_lacks_are_left_out():
    report = make_report(records({k: v for k, v in COUNTS.items() if k != ("sage-branch", 2)}))
    assert report["seeds"] == [1]
    assert {claim["verdict"] for claim in report["claims"]} == {"undecided"}, (
        "one seed decides nothing"
    )
    texts = markdown(report), readme_section(report, "folder")
    assert all("over problems alone (Student's t; " in text for text in texts)
    assert "| claim |" in texts[0] and "| claim |" not in texts[1]


def test_grid_is_against_the_same_seeds_and_has_the_default_cell():
    counts = dict(COUNTS)
    cells = [(None, None)] * len(counts) + [(0.8, 0.1)]
    data = records(counts | {("branch-cell", 1): [3, 0]}, cells)
    data["runs"][-1]["algorithm"] = "sage-branch"
    grid = make_report(data)["grid"]
    assert grid["seeds"] == [1]
    assert [(row["threshold"], row["ratio"]) for row in grid["cells"]] == [(0.8, 0.1), (1.2, 0.3)]
    assert grid["cells"][0]["pass@1"]["mean"] == pytest.approx((0.25 + 0) / 2)
    assert grid["cells"][1]["pass@1"]["mean"] == pytest.approx((0.5 + 0) / 2)


@pytest.mark.parametrize(
    ("kind", "low", "high", "said"),
    [
        ("gain", 0.001, 0.2, "supported"),
        ("gain", -0.2, 0.029, "not supported"),
        ("gain", -0.01, 0.031, "undecided"),
        ("gain", 0.001, 0.01, "supported"),
        ("loss", -0.2, -0.001, "supported"),
        ("loss", -0.029, 0.2, "not supported"),
        ("loss", -0.031, 0.01, "undecided"),
        ("no loss", -0.029, 0.5, "supported"),
        ("no loss", -0.5, -0.001, "not supported"),
        ("no loss", -0.031, 0.001, "undecided"),
    ],
)
def test_verdicts(kind, low, high, said):
    assert verdict(kind, low, high) == said


def test_claims_name_algorithms_that_exist_and_both_quantities_are_read():
    for claim in CLAIMS:
        assert {claim.a, claim.b} <= {"sft", *ALGORITHMS}
    claim = next(claim for claim in CLAIMS if claim.set == "ood")
    data = records(COUNTS)
    before = judge(claim, Records(data))
    for run in data["runs"]:
        run["sets"]["test"] = run["sets"]["test"] | {"correct": [0, 0]}
    assert judge(claim, Records(data)) == before, (
        "out of distribution, the test problems do not count"
    )
    reward = replace(claim, quantity="reward", set="test")
    assert judge(reward, Records(data))["mean"] == 0


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("benchmark") / "out"
    words = [
        "--smoke",
        "--seeds",
        "1",
        "--grid-seeds",
        "0",
        "--workers",
        "1",
        "--out",
        str(out),
    ]
    assert main([*words, "--algorithms", "grpo", "sage-branch"]) == 0
    return out


@pytest.mark.long
def test_a_benchmark_in_processes_of_its_own(smoke, capsys):
    report = json.loads((smoke / "report.json").read_text())
    assert report["algorithms"] == ["sft", "grpo", "sage-branch"]
    for name in (
        "records.json",
        "report.md",
        "pass_at_k.png",
        "differences.png",
        "training.png",
        "reward_and_test.png",
    ):
        assert (smoke / name).stat().st_size > 100
    for name in ("grpo_seed-1", "sage-branch_seed-1"):
        assert (smoke / name / "adapter").is_dir()
        result = json.loads((smoke / "results" / f"{name}.json").read_text())
        lines = (smoke / "samples" / f"{name}.test.jsonl").read_text().splitlines()
        graded = [json.loads(line)["grade"] for line in lines]
        assert sum(result["sets"]["test"]["correct"]) == graded.count("correct")
        assert len(lines) == 3 * 4 and len(result["training"]["reward"]) == 2
    settings = [
        json.loads((smoke / name / "run.json").read_text())["settings"]
        for name in ("grpo_seed-1", "sage-branch_seed-1")
    ]
    assert settings[0].pop("guide") != settings[1].pop("guide")
    assert settings[0] == settings[1], (
        "rows, seed and sampling are the same; the guide is the difference"
    )
    made = make_report(json.loads((smoke / "records.json").read_text()))
    assert made == report, "the report follows from the records alone"


@pytest.mark.long
def test_a_second_call_goes_on_and_others_are_refused(smoke, capsys):
    words = [
        "--smoke",
        "--seeds",
        "1",
        "--grid-seeds",
        "0",
        "--workers",
        "1",
        "--out",
        str(smoke),
        "--algorithms",
        "grpo",
        "sage-branch",
    ]
    result = smoke / "results" / "grpo_seed-1.json"
    before = json.loads(result.read_text())
    result.unlink()  # as if it had been killed after training
    stamp = (smoke / "results" / "sage-branch_seed-1.json").stat().st_mtime_ns
    with exclusive_lock(smoke):
        assert main(words) == 2
    assert "one process at a time" in capsys.readouterr().err
    assert main(words) == 0
    again = json.loads(result.read_text())
    assert (again["sets"], again["training"]) == (before["sets"], before["training"])
    assert (smoke / "results" / "sage-branch_seed-1.json").stat().st_mtime_ns == stamp
    assert main([word for word in words if word != "--smoke"]) == 2
    assert "resumed with its own settings" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_that_fails_is_named(smoke, tmp_path, capsys):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(smoke, broken)
    (broken / "results" / "grpo_seed-1.json").unlink()
    (broken / "samples" / "grpo_seed-1.test.jsonl").write_text("no record\n" * 3)
    words = [
        "--smoke",
        "--seeds",
        "1",
        "--grid-seeds",
        "0",
        "--workers",
        "1",
        "--out",
        str(broken),
        "--algorithms",
        "grpo",
        "sage-branch",
    ]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "grpo_seed-1 stopped" in error and "every line must be one JSON object" in error


@pytest.mark.long
def test_report_alone(tmp_path, smoke, capsys):
    words = [
        "--smoke",
        "--seeds",
        "2",
        "--grid-seeds",
        "0",
        "--out",
        str(smoke),
        "--algorithms",
        "grpo",
        "sage-branch",
        "--report",
    ]
    assert main(words) == 0, "one of the two seeds is complete"
    assert "1 training seed (1)" in capsys.readouterr().out
    (tmp_path / "results").mkdir()
    assert main([*words[:-4], "--out", str(tmp_path), "--report"]) == 2
    assert "none is complete" in capsys.readouterr().err


# --- what is committed ----------------------------------------------------------------------------

COMMITTED = sorted((ROOT / "data" / "results" / "benchmark").rglob("records.json"))  # pilots too


def approximately(found, wanted, where=""):
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            approximately(found[key], wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), where
        for number, (a, b) in enumerate(zip(found, wanted, strict=True)):
            approximately(a, b, f"{where}[{number}]")
    else:
        assert found == (
            pytest.approx(wanted, abs=1e-9) if isinstance(wanted, float) else wanted
        ), where


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: "-".join(path.parent.parts[-2:]))
def test_committed_report_follows_from_the_committed_records(path):
    report = json.loads((path.parent / "report.json").read_text())
    approximately(json.loads(json.dumps(make_report(json.loads(path.read_text())))), report)
    assert (path.parent / "report.md").read_text() == markdown(report)


def test_the_short_report_shows_levels_and_the_folder_of_its_figures():
    text = readme_section(make_report(records(COUNTS)), "a/folder")
    assert ".312 [" in text and "](a/folder/report.md)" in text


def test_beta_is_of_those_that_have_a_penalty():
    betas = {
        name: Run(name, 1).row(0.5).beta for name in ("grpo", "sage-branch-exact", "grpo-no-kl")
    }
    assert betas == {"grpo": 0.5, "sage-branch-exact": 0.5, "grpo-no-kl": 0.0}
    assert Run("sage-branch", 1, 2.0, 0.5).row(0.5).beta == 0.5
    assert Run("grpo", 1).row() == ALGORITHMS["grpo"]


def test_run_names():
    assert Run("grpo", 3).name == "grpo_seed-3"
    assert Run("sage-branch", 3, 2.0, 0.5).name == "sage-branch_threshold-2_ratio-0.5_seed-3"
