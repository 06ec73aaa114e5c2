"""A study's report from counts that were made up: every part by hand or by simulation."""

import json
from pathlib import Path

import numpy as np
import pytest

from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.study.chord import Place
from sage_unsloth.study.crossed import crossed_interval
from sage_unsloth.study.free_lines import LineNode, distance_to_line
from sage_unsloth.study.publish import draw
from sage_unsloth.study.records import Tables, write_records
from sage_unsloth.study.report import (
    EQUAL,
    GUESSING,
    NO_DOSE,
    ONE_SEED,
    judge_difference,
    make_report,
)
from sage_unsloth.study.text import cell, claim_lines, report_markdown, summary

RESULTS = Path(__file__).resolve().parents[2] / "data" / "results" / "study"

N, PROBLEMS = 16, 60
ENVIRONMENT = {
    "commit": "c" * 40,
    "code_tree": "t" * 40,
    "date": "2026-11-22T00:00:00",
    "packages": {"sage_unsloth": "0.1.0", "unsloth": "1", "torch": "2"},
}


def counts(generator, chances, n=N):
    return generator.binomial(n, chances).tolist()


def records(seeds=(1, 2, 3), guess=0.0, claims=(), dose=0.5):
    """start .3; grpo .5, narrow; maxrl .5 on all problems; sage-branch as grpo."""
    generator = np.random.default_rng(0)
    narrow = np.where(np.arange(PROBLEMS) % 2, 0.98, 0.02)
    chances = {
        "grpo beta=0.05": narrow,
        "grpo beta=0.1": 0.5 * narrow + 0.15,
        "maxrl beta=0.05": np.full(PROBLEMS, 0.5),
        "sage-branch beta=0.05": narrow,
    }
    series = {"reward": [0.1, 0.2], "mean_length": [10.0, 10.0], "share_touched": [0.1, 0.1]}
    series |= {"guide_mean": [1.01, 1.01], "log_guide_mean": [dose / 10, dose / 10]}

    def one(point, seed, chance, n=N):
        sets = {"own": {"num_samples": n, "correct": counts(generator, chance, n)}}
        training = {k: v for k, v in series.items() if "guide" not in k or "sage" in point}
        return {"point": point, "seed": seed, "sets": sets, "training": training}

    def variant(kind, value, seed, share):
        made = one("grpo beta=0.05", seed, share * narrow + (1 - share) * 0.3)
        return {"kind": kind, "value": value, "seed": seed, "sets": made["sets"]}

    return {
        "title": "made up",
        "baseline": "grpo beta=0.05",
        "ks": [1, 4, 8],
        "claims": {
            text: {"better": a, "worse": b, "k": k, "runs_complete": 0}
            for text, (a, b, k) in dict(claims).items()
        },
        "points": {
            name: {
                "algorithm": name.partition(" ")[0],
                "settings": {"beta": float(name.partition("=")[2])},
                "guide": "BranchGuide()" if "sage" in name else "None",
                "twin": "grpo beta=0.05" if "sage" in name else None,
            }
            for name in chances
        },
        "settings": {
            "rlvr": {"max_steps": 2, "prompts_per_step": 2, "num_generations": 4},
            "sampling": {"temperature": 1.0},
        },
        "environment": ENVIRONMENT,
        "sets": {
            "own": {
                "problems": [f"own/{i}" for i in range(PROBLEMS)],
                "families": ["odd" if i % 2 else "even" for i in range(PROBLEMS)],
                "guess": [guess] * PROBLEMS,
            }
        },
        "doses": [{"point": "sage-branch beta=0.05", "correct": 0.125, "wrong": 0.5}],
        "start": one("start", None, np.full(PROBLEMS, 0.3), 4 * N),
        "variants": [
            variant(kind, value, seed, share)
            for seed in seeds
            for kind, value, share in (("scale", 0.5, 0.5), ("early", 1.0, 0.6))
        ],
        "runs": [one(name, seed, chance) for seed in seeds for name, chance in chances.items()],
    }


@pytest.fixture(scope="module")
def made():
    claims = {"a": ("maxrl beta=0.05", "grpo beta=0.05", 8), "b": ("start", "maxrl beta=0.05", 8)}
    data = records(claims=claims)
    return data, make_report(data)


def test_differences_are_crossed_over_seeds_and_problems(made):
    data, report = made
    table = {
        name: np.array([r["sets"]["own"]["correct"] for r in data["runs"] if r["point"] == name])
        for name in ("maxrl beta=0.05", "grpo beta=0.05")
    }
    values = [pass_at_k(N, table[name], 8) for name in table]
    expected = crossed_interval(values[0] - values[1])
    found = report["sets"]["own"]["points"]["maxrl beta=0.05"]["to_baseline"]["8"]
    assert found == {"mean": expected.mean, "low": expected.low, "high": expected.high}
    start = np.tile(pass_at_k(4 * N, np.array(data["start"]["sets"]["own"]["correct"]), 8), (3, 1))
    expected = crossed_interval(values[1] - start)
    found = report["sets"]["own"]["points"]["grpo beta=0.05"]["to_start"]["8"]
    assert found["mean"] == expected.mean and found["low"] == expected.low


def test_each_verdict_by_its_interval(made):
    verdicts = made[1]["sets"]["own"]["points"]["maxrl beta=0.05"]["verdicts"]
    assert verdicts["to_start@1"] == "higher" and verdicts["to_baseline@8"] == "higher"
    assert made[1]["sets"]["own"]["points"]["grpo beta=0.05"]["verdicts"]["to_start@8"] == "lower"
    assert judge_difference(-0.01, 0.02) == "equal within 0.03"
    assert judge_difference(-0.05, 0.02) == judge_difference(-0.01, 0.04) == "undecided"


def test_the_highest_free_line_counts(made):
    one = made[1]["sets"]["own"]
    assert set(one["lines"]) == {"mixture", "scale", "early", "strength"}
    beside = one["points"]["maxrl beta=0.05"]["to_lines"]["8"]
    # maxrl has the baseline's pass@1, give or take: only lines that reach it have a value.
    assert beside["mean"] == min(found["mean"] for found in beside["each"].values())
    first = [node["pass@1"] for node in one["lines"]["mixture"]]
    assert first == sorted(first, reverse=True), "from the baseline to the start model"


def test_claims_are_judged_after_holm_and_count_also_where_they_fail(made):
    rows = {row["claim"]: row for row in made[1]["claims"]}
    assert rows["a"]["holds"] and rows["a"]["p_holm"] == pytest.approx(2 * rows["a"]["p"])
    assert not rows["b"]["holds"] and rows["b"]["why"] is None
    # 4 points: 4 x 3 to the start, 3 x 3 to the baseline, and those beside the lines.
    beside = sum(
        "mean" in found
        for row in made[1]["sets"]["own"]["points"].values()
        for found in row["to_lines"].values()
    )
    assert made[1]["comparisons"] == 12 + 9 + beside


def test_mixtures_take_samples_that_the_trained_model_does_not_have():
    """Sample i has the same random numbers in both models, so the product of chances is biased."""
    data = records()
    shared = Tables(data, "own").mixture(4, 8)
    data["start"]["sets"]["own"]["later"] = {"num_samples": 3 * N, "correct": [0] * PROBLEMS}
    apart = Tables(data, "own")
    assert apart.mixture(4, 8).many.mean() < shared.many.mean()
    np.testing.assert_allclose(apart.mixture(4, 8).many, apart.values("grpo beta=0.05", 4))


def test_a_claim_about_equal_counts_does_not_hold():
    data = records(claims={"a": ("maxrl beta=0.05", "start", 8)})
    for run in [data["start"], *data["runs"]]:
        is_start = run["point"] == "start"
        run["sets"]["own"]["correct"] = [0 if is_start else N] * PROBLEMS
    report = make_report(data)
    (claim,) = report["claims"]
    assert (claim["mean"], claim["why"], claim["holds"]) == (1.0, EQUAL, False)


def test_a_line_that_not_every_seed_has_is_named():
    data = records()
    data["variants"] = [v for v in data["variants"] if (v["kind"], v["seed"]) != ("scale", 3)]
    text = report_markdown(make_report(data))
    assert "No line of a scaled LoRA yet, because not every seed" in text
    assert "of an early checkpoint yet" not in text


def test_claims_that_were_named_late_are_listed(made):
    claims = [row | {"runs_complete": 2 * (row["claim"] == "b")} for row in made[1]["claims"]]
    (late,) = claim_lines(made[1] | {"claims": claims})[1:]
    assert late.endswith(": b.")


def test_a_line_has_a_value_between_neighbours_that_are_a_factor_2_apart():
    """Half-way in pass@1, and .7 where the line has .5 in pass@k."""

    def place(first, many):
        return Place(*(np.full((2, 3), value) for value in (first, many)))

    point, (low, high) = place(0.5, 0.7), (place(0.4, 0.4), place(0.6, 0.6))
    nodes = {end: [LineNode("a", 1.0, low), LineNode("b", end, high)] for end in (2.0, 2.1)}
    assert distance_to_line(point, nodes[2.0], steps=True).mean == pytest.approx(0.2)
    assert distance_to_line(point, nodes[2.1], steps=True) is None
    assert distance_to_line(point, nodes[2.1], steps=False).mean == pytest.approx(0.2)


def test_groups_add_up_to_the_change_of_the_mean(made):
    one = made[1]["sets"]["own"]
    parts = one["groups"]["parts"]["grpo beta=0.05"]
    assert parts["all"]["1"] == pytest.approx(
        one["points"]["grpo beta=0.05"]["to_start"]["1"]["mean"]
    )
    assert parts["odd"]["8"] > -0.05 and parts["even"]["8"] < -0.3


def test_no_verdict_at_a_k_that_guessing_reaches():
    """A guesser with .25 has 1 − .75^8 = .90 at k = 8; the start model with .3 has .94."""
    report = make_report(records(guess=0.25, claims={"a": ("maxrl beta=0.05", "start", 8)}))
    one = report["sets"]["own"]
    assert one["ks"]["8"]["guess"] == pytest.approx(1 - 0.75**8)
    assert not one["ks"]["8"]["usable"]
    assert one["points"]["maxrl beta=0.05"]["verdicts"]["to_start@8"] == GUESSING
    assert report["claims"][0]["why"] == GUESSING and report["claims"][0]["p"] == 1


def test_no_verdict_on_a_guide_that_did_nothing():
    report = make_report(records(dose=0.001))
    (row,) = report["dose"]
    assert row["no_verdict"] and row["log_guide_sum"] == pytest.approx(0.001)
    verdicts = report["sets"]["own"]["points"]["sage-branch beta=0.05"]["verdicts"]
    assert verdicts["to_baseline@8"] == NO_DOSE and verdicts["to_start@8"] != NO_DOSE
    assert "No verdict on `sage-branch beta=0.05`" in report_markdown(report)


def test_a_guide_whose_mean_cancels_is_not_one_that_did_nothing():
    data = records(dose=0.0)
    data["points"]["sage-branch beta=0.05"]["guide"] = "RandomGuide()"
    for spread, off in ((0.5, False), (0.001, True)):
        data["doses"][0]["spread"] = spread
        (row,) = make_report(data)["dose"]
        assert row["no_verdict"] == off and row["possible"] is None


def test_the_dose_of_correct_and_of_wrong_completions_apart(made):
    text = report_markdown(made[1]).partition("## Dose of the guides")[2]
    assert "Σ log q, correct | Σ log q, wrong |" in text and "| +0.125 | +0.500 |" in text
    assert "Favoured wrong completions over correct ones: `sage-branch beta=0.05`" in text
    data = records() | {
        "doses": [{"point": "sage-branch beta=0.05", "correct": 0.5, "wrong": None}]
    }
    text = report_markdown(make_report(data))
    assert "| +0.500 | – |" in text and "Favoured wrong" not in text


def test_one_seed_gives_intervals_and_no_verdict():
    report = make_report(records(seeds=(1,), claims={"a": ("maxrl beta=0.05", "start", 8)}))
    verdicts = report["sets"]["own"]["points"]["maxrl beta=0.05"]["verdicts"]
    assert set(verdicts.values()) == {ONE_SEED}
    assert not report["claims"][0]["holds"]


def test_equal_counts_have_no_interval(made):
    assert cell({"mean": 0.0, "low": 0.0, "high": 0.0}) == "+.000"
    assert cell({"mean": 0.25, "low": 0.125, "high": 0.5}) == "+.250 [+.125, +.500]"
    assert "A mean without an interval is of equal counts" in report_markdown(made[1])


def test_the_report_in_words_and_figures(made, tmp_path):
    data, report = made
    text = report_markdown(report)
    answer = text.partition("![frontier]")[0]
    for part in ("`maxrl beta=0.05`", "Against the start model: pass@1", "highest line", "`a`"):
        assert part in answer, part
    assert "| highest line | pass@4 | pass@8 |" in text
    assert "0.1.0 (cccccccccccc)" in text and "By group of problems" in text
    assert "pass@8" in summary(report)
    draw(report, tmp_path)
    for name in ("frontier.png", "frontier.csv", "pass_at_k.png"):
        assert (tmp_path / name).stat().st_size > 100
    write_records(tmp_path / "records.json", data)
    again = make_report(json.loads((tmp_path / "records.json").read_text()))
    assert again == json.loads(json.dumps(report))


@pytest.mark.parametrize(
    "records", sorted(RESULTS.rglob("records.json")), ids=lambda p: p.parent.name
)
def test_a_committed_report_follows_from_its_records(records):
    report = make_report(json.loads(records.read_text()))
    assert records.with_name("report.md").read_text() == report_markdown(report)
