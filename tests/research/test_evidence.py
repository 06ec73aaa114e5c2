"""The committed benchmark: its report by hand, its verdicts, its records."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from research.benchmark.claims import CLAIMS, judge
from research.benchmark.records import Records
from research.benchmark.report import make_report
from research.benchmark.text import markdown, readme_section
from sage_unsloth.study.verdicts import verdict
from sage_unsloth.training.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]


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
