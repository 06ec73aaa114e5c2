"""The committed frontiers: line and report by hand, and what follows from the records."""

import csv
import json
from math import comb
from pathlib import Path

import numpy as np
import pytest

from research.frontier.figures import draw
from research.frontier.line import above_line, area, kept, kept_at, resampled
from research.frontier.records import BASELINE, START, FrontierRecords
from research.frontier.report import make_report
from research.frontier.text import markdown, section

ROOT = Path(__file__).resolve().parents[2]


def test_kept_by_hand():
    first, many = [0.5, 0.4, 0.2], [0.6, 0.8, 0.9]
    assert kept_at(0.4, first, many) == pytest.approx(0.8), "a trained strength"
    assert kept_at(0.45, first, many) == pytest.approx(0.7), "half way from the first"
    assert kept_at(0.25, first, many) == pytest.approx(0.8 + 0.1 * 0.15 / 0.2)
    assert kept_at(0.1, first, many) == pytest.approx(0.9), "the greatest strength has it"
    assert np.isnan(kept_at(0.51, first, many))


def test_kept_is_the_greatest_strength_that_has_the_level():
    """pass@1 falls below the level, comes back, and falls again."""
    first, many = [0.5, 0.3, 0.5, 0.3], [0.6, 0.9, 0.7, 0.8]
    assert kept_at(0.4, first, many) == pytest.approx(0.75)


def test_above_a_line_by_hand():
    line = [0.5, 0.4, 0.2], [0.6, 0.8, 0.9]
    assert above_line(0.45, 0.75, *line) == pytest.approx(0.05)
    assert above_line(0.4, 0.8, *line) == pytest.approx(0), "a point of the line itself"
    assert above_line(0.55, 0.65, *line) == pytest.approx(0.05), "beyond the weakest strength"
    assert above_line(0.1, 0.85, *line) == pytest.approx(-0.05), "beyond the greatest"
    many = above_line(
        np.array([0.45, 0.4]), np.array([0.75, 0.9]), *(np.tile(e, (2, 1)) for e in line)
    )
    assert many == pytest.approx([0.05, 0.1])


def test_kept_batched_is_each_alone():
    generator = np.random.default_rng(0)
    level, first, many = generator.random(50), generator.random((50, 4)), generator.random((50, 4))
    alone = [kept_at(*row) for row in zip(level, first, many, strict=True)]
    np.testing.assert_allclose(kept_at(level, first, many), alone)


def test_what_is_kept_has_an_interval_of_the_resamples_that_reach_it():
    line = np.array([0.5, 0.3]), np.array([0.6, 0.8])
    shifts = np.linspace(-0.1, 0.1, 201)
    lines = np.tile(line[0], (201, 1)), line[1] + shifts[:, None]
    found = kept(0.4, np.full(201, 0.4), line, lines, 0.75, np.full(201, 0.75))
    assert found.mean == pytest.approx(0.7) and found.difference == pytest.approx(-0.05)
    assert (found.low, found.high) == pytest.approx((0.605, 0.795), abs=1e-3)
    assert found.difference_low == pytest.approx(0.605 - 0.75, abs=1e-3)
    assert found.reached == 1
    levels = np.where(np.arange(201) < 150, 0.6, 0.4)
    seldom = kept(0.4, levels, line, lines, 0.75, np.full(201, 0.75))
    assert seldom.reached == pytest.approx(51 / 201) and seldom.low is None
    never = kept(0.6, levels, line, lines, 0.75, np.full(201, 0.75))
    assert never.mean is None and never.difference is None


def test_resampled_tables_stay_paired_and_one_model_has_no_seeds():
    generator = np.random.default_rng(1)
    table = generator.random((5, 30))
    drawn = resampled({"a": table, "b": table + 0.1, "sft": table}, ["sft"], resamples=4000)
    np.testing.assert_allclose(drawn["b"] - drawn["a"], 0.1)
    by_seed = np.tile(generator.random((5, 1)), (1, 30))
    drawn = resampled({"a": by_seed, "once": by_seed}, ["once"], resamples=20000)
    assert drawn["a"].var() == pytest.approx(by_seed[:, 0].var() / 5, rel=0.05)
    np.testing.assert_allclose(drawn["once"], by_seed[0, 0])
    by_problem = np.tile(generator.random((1, 30)), (5, 1))
    drawn = resampled({"a": by_problem}, [], resamples=20000)
    assert drawn["a"].var() == pytest.approx(by_problem[0].var() / 30, rel=0.05)
    assert drawn["a"].mean() == pytest.approx(by_problem.mean(), abs=2e-3)


def test_area_by_hand():
    assert area([0.0, 0.5, 1.0], [1, 2, 4]) == pytest.approx(0.5), "a line in log k"
    assert area([0.2, 0.4, 0.4], [1, 2, 8]) == pytest.approx((0.3 + 2 * 0.4) / 3)
    np.testing.assert_allclose(area(np.full((3, 2), 0.7), [1, 2, 4]), 0.7)
    assert area([0.3], [1]) == 0.3


# --- the report -----------------------------------------------------------------------------------


def records(counts: dict[tuple[str, str, float | None, int | None], list[int]]) -> dict:
    """A frontier of three problems with 4 samples."""
    runs = [
        {
            "algorithm": algorithm,
            "setting": setting,
            "strength": strength,
            "seed": seed,
            "sets": {"test": {"correct": correct}},
            "training": {} if seed is None else {"reward": [0.1, 0.2, 0.6], "kl": [0.0, 0.1, 0.2]},
        }
        for (algorithm, setting, strength, seed), correct in counts.items()
    ]
    shared = {"max_steps": 3, "prompts_per_step": 1, "num_generations": 2, "learning_rate": 0.1}
    return {
        "task": "three-problems",
        "title": "three problems",
        "problems": "pilot",
        "sets": {
            "test": {
                "title": "x",
                "problems": ["a", "b", "c"],
                "families": ["usual", "rare", "rare"],
                "num_samples": 4,
            }
        },
        "runs": runs,
        "settings": {"rlvr": shared, "sampling": {"temperature": 1.0}},
        "environment": {"packages": {"unsloth": "1", "torch": "2"}, "date": "2026-01-01T00:00:00"},
    }


COUNTS = {
    ("sft", "", None, None): [1, 1, 1],
    ("grpo", "beta", 0.4, 1): [2, 1, 1],
    ("grpo", "beta", 0.05, 1): [4, 0, 1],
    ("sage-branch", "beta", 0.4, 1): [3, 1, 0],
    ("grpo-no-kl", "", None, 1): [4, 1, 0],
    ("grpo", "beta", 0.4, 2): [3, 1, 1],
    ("grpo", "beta", 0.05, 2): [4, 0, 0],
    ("sage-branch", "beta", 0.4, 2): [3, 0, 0],
    ("grpo-no-kl", "", None, 2): [4, 0, 1],
}


def test_report_by_hand():
    report = make_report(records(COUNTS))
    assert report["seeds"] == [1, 2] and report["k"] == 4
    points = report["points"]
    assert list(points) == [
        "sft",
        "grpo beta=0.4",
        "grpo beta=0.05",
        "sage-branch beta=0.4",
        "grpo-no-kl",
    ]
    grpo, strong = points[BASELINE], points["grpo beta=0.4"]
    assert grpo["pass@1"]["mean"] == pytest.approx((4 + 0 + 1 + 4 + 0 + 0) / 24)
    assert strong["to_baseline"]["pass@1"]["mean"] == pytest.approx((9 - 9) / 24)
    assert strong["to_sft"]["pass@k"]["mean"] == 0, "all three problems solved in both seeds"
    assert strong["to_baseline"]["pass@k"]["mean"] == pytest.approx(1 - (2 + 1) / 6)
    pass_at_2 = [1 - comb(4 - c, 2) / comb(4, 2) for c in (1, 1, 1)]
    assert points["sft"]["area"]["mean"] == pytest.approx(
        (0.25 + 2 * np.mean(pass_at_2) + 1) / 4
    ), "trapezes of the same width over k = 1, 2, 4"
    assert strong["reward"]["mean"] == 0.6 and strong["kl"]["mean"] == 0.2
    assert strong["verdicts"]["keeps SFT's pass@k"] == "supported"
    assert "to_sft" not in points["sft"] and points["sft"]["reward"] is None
    assert strong["families"]["rare"] == {"pass@1": 0.25, "pass@k": 1.0}
    assert grpo["families"] == {
        "usual": {"pass@1": 1.0, "pass@k": 1.0},
        "rare": {"pass@1": 1 / 16, "pass@k": 0.25},
    }
    line = report["methods"]["grpo"]
    assert line["points"] == ["grpo beta=0.05", "grpo beta=0.4"], "by strength"
    assert line["at"]["mean"] == 1.0 and line["at"]["difference"] == 0.0
    assert report["methods"]["sage-branch"]["at"]["mean"] is None
    branch = points["sage-branch beta=0.4"]
    assert branch["to_line"]["mean"] == pytest.approx(branch["pass@k"]["mean"] - 1), (
        "from β = .4 to the SFT model the line's pass@k is 1"
    )
    assert {name for name in points if "to_line" in points[name]} == set(points) - {
        "sft", *line["points"]
    }  # fmt: skip
    (guided,) = report["guides"]
    assert (guided["point"], guided["twin"]) == ("sage-branch beta=0.4", "grpo beta=0.4")
    assert guided["pass@1"]["mean"] == pytest.approx((7 - 9) / 24)


def test_chosen_is_the_most_coverage_at_grpos_pass_at_1():
    data = records(COUNTS)
    assert make_report(data)["chosen"] == {
        "grpo": "grpo beta=0.4",
        "sage-branch": "sage-branch beta=0.4",
        "grpo-no-kl": "grpo-no-kl",
    }
    weaker = {key: [1, 1, 1] if key[2] == 0.4 else value for key, value in COUNTS.items()}
    chosen = make_report(records(weaker))["chosen"]
    assert chosen["grpo"] == BASELINE, "more coverage, but pass@1 is lower by more than .03"
    assert chosen["sage-branch"] == "sage-branch beta=0.4", "no strength has it: the highest pass@1"


def test_only_complete_seeds_count():
    report = make_report(
        records({k: v for k, v in COUNTS.items() if k != ("grpo-no-kl", "", None, 2)})
    )
    assert report["seeds"] == [1] and report["components"] == {}
    assert "over problems alone" in markdown(report)


def test_another_setting_is_a_method_of_its_own():
    counts = COUNTS | {("grpo", "max_steps", 15.0, seed): [2, 1, 1] for seed in (1, 2)}
    methods = FrontierRecords(records(counts)).methods()
    assert methods["grpo by max_steps"] == ["grpo max_steps=15"]
    assert methods["grpo"] == ["grpo beta=0.05", "grpo beta=0.4"]


def test_texts_and_figures_follow_from_the_records(tmp_path):
    report = make_report(records(COUNTS))
    draw(report, tmp_path)
    for name in ("frontier", "differences"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        assert (tmp_path / f"{name}.csv").read_text().count("\n") > 4
    text = markdown(report)
    assert "| grpo beta=0.4 | .375 [" in text
    assert "| grpo beta=0.05 | 1.00; 1.00 | 0.06; 0.25 |" in text
    assert "## Chosen for the verdict" in text and "## Verdicts" not in text
    fresh = make_report(records(COUNTS) | {"problems": "fresh"})
    assert "## Verdicts" in markdown(fresh)
    assert "](a/folder/report.md)" in section(report, "a/folder")


def test_a_unit_counts_as_one_problem():
    data = records(COUNTS)
    whole = make_report(data)["points"]["grpo beta=0.4"]["pass@1"]["mean"]
    data["sets"]["test"]["units"] = ["usual-0", "rare-0", "rare-0"]
    report = make_report(data)
    assert (report["num_problems"], report["num_units"]) == (3, 2)
    assert "3 held-out problems in 2 units that count alike" in markdown(report)
    strong = report["points"]["grpo beta=0.4"]["pass@1"]["mean"]
    assert whole == pytest.approx(9 / 24)
    assert strong == pytest.approx((2 / 4 + (1 + 1) / 8 + 3 / 4 + (1 + 1) / 8) / 4)


# --- what is committed ----------------------------------------------------------------------------

COMMITTED = sorted((ROOT / "data" / "results" / "frontier").rglob("records.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.parent.name)
def test_committed_report_follows_from_the_committed_records(path):
    report = json.loads((path.parent / "report.json").read_text())
    start = path.parent / START
    start = json.loads(start.read_text()) if start.exists() else None
    made = json.loads(json.dumps(make_report(json.loads(path.read_text()), start)))
    assert markdown(made) == markdown(report)
    assert (path.parent / "report.md").read_text() == markdown(report)


def test_the_verdicts_of_two_tasks_are_one_figure_with_its_table(tmp_path):
    from research.frontier.overview import draw_verdicts

    first = make_report(records(COUNTS))
    draw_verdicts([first, first | {"task": "other"}], tmp_path / "verdicts.png")
    assert (tmp_path / "verdicts.png").stat().st_size > 10_000
    rows = list(csv.DictReader((tmp_path / "verdicts.csv").open()))
    assert [row["point"] for row in rows] == 2 * list(first["points"])
    assert {row["task"] for row in rows} == {first["task"], "other"}
    (kept,) = {
        (row["pass@1"], row["pass@1 − GRPO"])
        for row in rows
        if row["point"] == next(reversed(first["points"]))
    }
    point = next(reversed(first["points"].values()))
    assert float(kept[0]) == point["pass@1"]["mean"]
    assert float(kept[1]) == point["to_baseline"]["pass@1"]["mean"]
    assert all(row["pass@1 − GRPO"] == "" for row in rows if row["point"] in ("sft", BASELINE))
