"""The frontier: its design, its line and report by hand, a run of seconds in real processes."""

import csv
import json
from math import comb
from pathlib import Path

import numpy as np
import pytest

from research.benchmark.tasks import TASKS, get_task
from research.frontier.command import main
from research.frontier.design import (
    BASELINE,
    DEFAULT,
    NUM_SEEDS,
    REDUCED,
    REDUCED_SEEDS,
    FrontierConfig,
    FrontierRun,
    Method,
    configured,
    seeds,
)
from research.frontier.line import above_line, area, kept, kept_at, resampled
from research.frontier.publish import publish_records
from research.frontier.records import START, FrontierRecords
from research.frontier.report import make_report
from research.frontier.run import plan
from research.frontier.text import markdown, section, summary
from sage_unsloth.grading.countdown import COUNTDOWN
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.training.rlvr_config import RlvrConfig

ROOT = Path(__file__).resolve().parents[2]


# --- what is run ----------------------------------------------------------------------------------


def test_a_method_is_an_algorithm_and_values_of_one_setting():
    assert Method.parse("grpo=0.1,.4") == Method("grpo", "beta", (0.1, 0.4))
    assert Method.parse("grpo:max_steps=15,25").text() == "grpo:max_steps=15,25"
    assert Method.parse("grpo-no-kl") == Method("grpo-no-kl"), "without a KL term one point"
    assert len(Method.parse("sage-branch").strengths) == 7
    for text in ("grpo", "grpo-no-kl", "sage-token=0.2", "grpo:learning_rate=0.0001"):
        method = Method.parse(text)
        assert Method.parse(method.text()) == method


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo=a", "strengths must be numbers"),
        ("grpo=1=2", "a method must be NAME"),
        ("grpo:max_steps", "a setting needs values"),
        ("grpo=0.1,0.1", "strengths must be different"),
        ("grpo:gamma=1", "must be a number among the settings"),
        ("grpo:seed=1", "must be a number among the settings"),
        ("grpo:loss_type=1", "must be a number among the settings"),
        ("grpo:max_steps=1.5", "must be a whole number"),
        ("grpo=-1", "beta must be >= 0"),
        ("sage-branch=0", "beta must not be 0 with a guide"),
        ("sage-brunch", "Did you mean 'sage-branch'"),
        ("sage-teacher=0.1", "no teacher"),
        ("pass-at-k=0.5", "k"),
        ("maxrl:k=2", "of none, got"),
    ],
)
def test_methods_that_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Method.parse(text)


def test_a_strength_is_set_and_all_else_stays():
    run = FrontierRun("sage-branch", "beta", 0.4, 7)
    settings, guide = configured(run, RlvrConfig(max_steps=50))
    assert (settings.beta, settings.seed, settings.max_steps) == (0.4, 7, 50)
    assert guide == BranchGuide()
    settings, guide = configured(FrontierRun("grpo", "max_steps", 15.0, 7), RlvrConfig())
    assert (settings.max_steps, settings.beta, guide) == (15, 0.05, None)
    assert type(settings.max_steps) is int
    assert configured(FrontierRun("grpo-no-kl", "", None, 7), RlvrConfig())[0].beta == 0
    settings, _ = configured(Method.parse("pkpo=2").runs(7)[0], RlvrConfig())
    assert (settings.advantages, settings.beta) == ("pkpo,k=2", 0.05)
    settings, _ = configured(Method.parse("grpo-entropy=0.01").runs(7)[0], RlvrConfig())
    assert (settings.entropy_coef, settings.advantages) == (0.01, "grpo")


def test_runs_come_seed_by_seed():
    config = FrontierConfig(methods=("grpo=0.05,1", "grpo-no-kl"), seeds=(4, 5))
    assert [run.name for run in config.runs()] == [
        "grpo_beta-0.05_seed-4",
        "grpo_beta-1_seed-4",
        "grpo-no-kl_seed-4",
        "grpo_beta-0.05_seed-5",
        "grpo_beta-1_seed-5",
        "grpo-no-kl_seed-5",
    ]
    assert FrontierConfig(**{"methods": config.methods, "seeds": config.seeds}) == config
    assert list(config.load_task().sets) == ["test"], "the other sets are not answered"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"methods": ("grpo=0.1",)}, "grpo=0.05 must be among"),
        ({"methods": ("grpo=0.05", "grpo=0.05,0.1")}, "named once; got 'grpo beta=0.05' twice"),
        ({"seeds": (1, 1)}, "seeds must be different"),
        ({"problems": "test"}, "--problems must be one of pilot, fresh"),
        (
            {"task": "countdown-fresh", "problems": "fresh"},
            "countdown-fresh has no fresh problems",
        ),
        ({"task": "mathematics"}, "--task must be one of"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ValueError, match=message):
        FrontierConfig(**given)


def test_seeds_of_the_pilot_and_of_the_verdict_differ():
    assert not set(seeds("pilot", 100)) & set(seeds("fresh", 100))
    assert FrontierConfig(problems="fresh").seeds[0] == 201


@pytest.mark.parametrize(
    ("methods", "count", "hours"), [(DEFAULT, NUM_SEEDS, 8), (REDUCED, REDUCED_SEEDS, 1)]
)
def test_the_default_is_a_night_and_the_reduced_one_an_hour_on_two_cores(methods, count, hours):
    config = FrontierConfig(methods=methods, seeds=seeds("pilot", count))
    task = config.load_task()
    samples = sum(len(one.rows) * one.num_samples for one in task.sets.values())
    each = task.rlvr.max_steps * task.seconds["step"] + samples * task.seconds["completion"]
    assert len(config.runs()) * each / 2 <= hours * 3600


# --- a line ---------------------------------------------------------------------------------------


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
    report = publish_records(records(COUNTS), tmp_path)
    for name in ("frontier", "differences"):
        assert (tmp_path / f"{name}.png").stat().st_size > 1000
        assert (tmp_path / f"{name}.csv").read_text().count("\n") > 4
    text = (tmp_path / "report.md").read_text()
    assert text == markdown(report) and "| grpo beta=0.4 | .375 [" in text
    assert "| grpo beta=0.05 | 1.00; 1.00 | 0.06; 0.25 |" in text
    assert "## Chosen for the verdict" in text and "## Verdicts" not in text
    fresh = make_report(records(COUNTS) | {"problems": "fresh"})
    assert "## Verdicts" in markdown(fresh)
    assert "](a/folder/report.md)" in section(report, "a/folder")
    assert "grpo-no-kl" in summary(report)


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


# --- a run ----------------------------------------------------------------------------------------

WORDS = ["--smoke", "--seeds", "1", "--workers", "1"]
METHODS = ["--methods", "grpo=0.05,0.4", "grpo:max_steps=1"]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("frontier") / "out"
    assert main([*WORDS, *METHODS, "--out", str(out)]) == 0
    return out


@pytest.mark.long
def test_a_frontier_in_processes_of_its_own(smoke, capsys):
    report = json.loads((smoke / "report.json").read_text())
    assert list(report["points"]) == ["sft", "grpo beta=0.05", "grpo beta=0.4", "grpo max_steps=1"]
    for run, beta, steps in (
        ("grpo_beta-0.05_seed-101", 0.05, 2),
        ("grpo_beta-0.4_seed-101", 0.4, 2),
        ("grpo_max_steps-1_seed-101", 0.05, 1),
    ):
        settings = json.loads((smoke / run / "run.json").read_text())["settings"]
        assert (settings["beta"], settings["max_steps"], settings["seed"]) == (beta, steps, 101)
    made = make_report(json.loads((smoke / "records.json").read_text()))
    assert json.loads(json.dumps(made)) == report, "the report follows from the records alone"
    words = [*WORDS, "--methods", "grpo=0.05,0.4,1", "--out", str(smoke), "--report"]
    assert main(words) == 2
    assert "ask for fewer methods" in capsys.readouterr().err
    text = plan(FrontierConfig(methods=("grpo=0.05,0.4,1",), seeds=(101,), smoke=True), smoke, 2)
    assert "for 1 runs in 2 processes" in text, "two of the three are there"


@pytest.mark.long
def test_another_task_is_trained_and_answered_by_its_own_verifier(tmp_path):
    words = [*WORDS, "--task", "countdown", "--methods", "grpo=0.05", "--out", str(tmp_path)]
    assert main(words) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["task"], report["num_problems"]) == ("countdown", 3)
    run = json.loads((tmp_path / "grpo_beta-0.05_seed-101" / "run.json").read_text())
    assert run["settings"]["verifier"] == COUNTDOWN.label
    for file in (tmp_path / "samples").glob("*.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        graders = {record["grader"].partition(",")[0] for record in records}
        assert graders == {COUNTDOWN.label}, file


def test_fresh_problems_are_others_and_of_the_same_families():
    for name in (task for task in TASKS if f"{task}-fresh" in TASKS):
        first, fresh = get_task(name), get_task(f"{name}-fresh")
        asked = [{row["problem"] for row in task.sets["test"].rows} for task in (first, fresh)]
        assert not asked[0] & asked[1]
        for rows in (fresh.sft_rows, fresh.train_rows):
            assert not asked[1] & {row["problem"] for row in rows}
        families = [{row["family"] for row in task.train_rows} for task in (first, fresh)]
        assert families[0] == families[1]


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
