"""The committed benchmark and frontiers: read as a study by hand, and what follows from them."""

import csv
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from research.evidence import pictures
from research.evidence.claims import CLAIMS, judge_claims
from research.evidence.records import as_study, read_study
from research.evidence.registered import REGISTERED, judge_registered
from research.evidence.report import make_report, markdown
from research.redraw import main, redraw
from research.tasks import guess_working
from sage_unsloth.evaluation.metrics import pass_at_k
from sage_unsloth.study.crossed import crossed_interval
from sage_unsloth.study.points import START
from sage_unsloth.study.report import NO_DOSE
from sage_unsloth.training.algorithms import ALGORITHMS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
COMMITTED = sorted(RESULTS.glob("[bf]*/**/records.json"))  # benchmark and frontier


# --- reading --------------------------------------------------------------------------------------


def test_blind_attempts_at_countdown_by_hand():
    """2,3,5,8: sum 13±3±2, product 40±3±2, bracket (8±5)·3±2 give twelve values."""
    values = [8 + 5 + a * 3 + b * 2 for a in (1, -1) for b in (1, -1)]
    values += [8 * 5 + a * 3 + b * 2 for a in (1, -1) for b in (1, -1)]
    values += [(8 + a * 5) * 3 + b * 2 for a in (1, -1) for b in (1, -1)]
    for target, count in ((41, 2), (14, 1), (11, 1), (99, 0)):
        assert values.count(target) == count
        assert guess_working({"id": f"countdown-2,3,5,8->{target}"}) == pytest.approx(count / 12)


def run(algorithm, seed, correct, **more):
    test = {"correct": correct, "rare": [2, 1], "rare_correct": [count // 2 for count in correct]}
    reward = [] if seed is None else [0.1 * (step + seed) for step in range(6)]
    sets = {"test": test, "other": test}
    return {
        "algorithm": algorithm,
        "seed": seed,
        "sets": sets,
        "training": {"reward": reward},
    } | more


def records(runs):
    """A benchmark of two problems with 4 samples."""
    one = {"title": "x", "problems": ["a", "b"], "families": ["usual", "rare"], "num_samples": 4}
    return {
        "task": "two-problems",
        "title": "two problems",
        "sets": {"test": one, "other": dict(one)},
        "runs": runs,
        "settings": {},
        "environment": {"packages": {}, "date": "2026-01-01T00:00:00"},
    }


RUNS = [
    run("sft", None, [1, 1]),
    run("grpo", 2, [3, 0]), run("sage-branch", 2, [4, 1]),
    run("grpo", 1, [2, 0]), run("sage-branch", 1, [4, 0]),
]  # fmt: skip


def test_a_seed_meets_itself_and_one_that_a_point_lacks_is_left_out():
    study = as_study(records(RUNS))
    assert [(item["point"], item["seed"]) for item in study["runs"]] == [
        ("grpo", 1), ("grpo", 2), ("sage-branch", 1), ("sage-branch", 2)
    ]  # fmt: skip
    assert study["baseline"] == "grpo" and study["ks"] == [1, 2, 4]
    assert {item["seed"] for item in as_study(records(RUNS[:-1]))["runs"]} == {2}


def test_points_have_a_strength_and_cells_of_a_grid_are_none():
    runs = [
        run("sft", None, [1, 1]),
        run("grpo", 1, [1, 1], setting="beta", strength=0.05),
        run("grpo", 1, [1, 1], setting="beta", strength=0.4),
        run("sage-branch", 1, [1, 1], setting="beta", strength=0.4),
        run("sage-branch", 1, [1, 1], threshold=0.8, ratio=0.1),
    ]
    study = as_study(records(runs) | {"problems": "pilot"})
    assert study["baseline"] == "grpo beta=0.05"
    twins = {name: point["twin"] for name, point in study["points"].items()}
    assert twins == {
        "grpo beta=0.05": None, "grpo beta=0.4": None, "sage-branch beta=0.4": "grpo beta=0.4"
    }  # fmt: skip


def test_the_larger_sample_of_the_start_model_takes_the_place_of_the_published_one():
    study = as_study(records(RUNS), {"num_samples": 8, "correct": [1, 2]})
    assert study["start"]["sets"]["test"] == {"num_samples": 8, "correct": [1, 2]}


# --- claims ---------------------------------------------------------------------------------------


def judged(runs):
    return {row["text"]: row for row in judge_claims(as_study(records(runs)))}


def test_claims_by_hand():
    claims = judged(RUNS)
    assert {
        claim.text for claim in CLAIMS if {claim.a, claim.b} <= {START, "grpo", "sage-branch"}
    } - {"Branch raises pass@16 over GRPO"} == set(claims), "4 samples have no pass@16"
    first = claims["Branch raises pass@1 over GRPO"]
    assert first["mean"] == pytest.approx(np.mean([[0.5, 0.0], [0.25, 0.25]])), "seed by seed"
    assert claims["RL raises pass@1 over SFT"]["value_b"] == 0.25
    rare = claims["Branch keeps the rare way alive better than GRPO"]
    assert rare["value_b"] == pytest.approx((1 / 3 + 0 + 1 / 2 + 0) / 4)
    assert rare["value_a"] == pytest.approx((1 / 2 + 0 + 1 / 2 + 0) / 4)
    assert {row["verdict"] for row in judged(RUNS[:-1]).values()} == {"undecided"}, "one seed"


def test_the_reward_is_of_the_last_third_and_test_problems_are_not_out_of_distribution():
    runs = [*RUNS, run("grpo-no-kl", 1, [1, 1]), run("grpo-no-kl", 2, [1, 1])]
    reward = judged(runs)["Without KL the training reward is higher"]
    assert reward["value_a"] == pytest.approx(0.1 * (4.5 + 1.5)) and reward["mean"] == 0
    other = [item | {"sets": item["sets"] | {"test": item["sets"]["test"] | {"correct": [0, 0]}}}
             for item in RUNS]  # fmt: skip
    text = "Branch helps out of distribution"
    assert judged(other)[text] == judged(RUNS)[text]


def test_claims_name_algorithms_that_exist():
    for claim in CLAIMS:
        assert {claim.a, claim.b} <= {START, *ALGORITHMS}


def test_a_claim_without_a_value_is_corrected_for():
    sure = crossed_interval(np.array([[0.5, 0.5, 0.51]]))
    rows = judge_registered({"x": "ac"}, lambda _, claim: sure if claim == "a" else None)
    assert [row["holds"] for row in rows] == [True, False]
    assert rows[1]["p"] == 1 and "mean" not in rows[1]
    assert rows[0]["p_holm"] == pytest.approx(2 * rows[0]["p"])


# --- what is committed ----------------------------------------------------------------------------


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


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: "-".join(path.parent.parts[-3:]))
def test_the_committed_report_and_figures_follow_from_the_committed_records(path, tmp_path):
    folder = path.parent
    report = json.loads((folder / "report.json").read_text())
    made = json.loads(json.dumps(make_report(folder)))
    approximately(made, report)
    assert (folder / "report.md").read_text() == markdown(made)
    pictures.draw(made, tmp_path)
    assert_tables(tmp_path, folder)


def assert_tables(drawn, committed):
    """Every figure that was drawn, and the committed numbers."""
    names = [table.name for table in drawn.glob("*.csv")]
    assert {table.stem for table in drawn.glob("*.png")} == {name[:-4] for name in names} != set()
    for name in names:
        found, before = (
            list(csv.DictReader((place / name).open())) for place in (drawn, committed)
        )
        approximately(*([{k: number(v) for k, v in row.items()} for row in rows]
                        for rows in (found, before)))  # fmt: skip


def number(text):
    try:
        return float(text)
    except ValueError:
        return text


def test_the_pictures_of_several_reports_follow_from_them(tmp_path):
    for task in ("arithmetic", "countdown"):
        (tmp_path / task / "fresh").mkdir(parents=True)
        shutil.copy(
            RESULTS / "frontier" / task / "fresh" / "report.json", tmp_path / task / "fresh"
        )
    main([str(tmp_path)])
    assert_tables(tmp_path, RESULTS / "frontier")
    with (tmp_path / "crossing.csv").open() as file:
        assert {row["line"] for row in csv.DictReader(file)} == {
            label for label, _ in pictures.CROSSING.values()
        }


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has none"):
        redraw(tmp_path)


def test_the_pictures_of_the_method_are_what_the_guides_give(tmp_path):
    drawn, committed = tmp_path / "pictures", ROOT / "docs" / "pictures"
    main([str(drawn)])
    assert {path.name for path in committed.iterdir()} == {path.name for path in drawn.iterdir()}
    tables = [list(csv.DictReader((folder / "guide.csv").open())) for folder in (drawn, committed)]
    approximately(*([{k: number(v) for k, v in row.items()} for row in rows] for rows in tables))
    factors = {}
    for row in tables[0]:
        factors.setdefault(row["panel"], []).append(float(row["anchor"]) / float(row["reference"]))
    sure, undecided, token, _ = factors.values()
    assert sure == pytest.approx([1] * 6) and undecided == pytest.approx([undecided[0]] * 6)
    assert undecided[0] > 1.1 and token == sorted(token) and token[0] < token[-1]


def committed(task):
    folder = RESULTS / "frontier" / task / "fresh"
    data, report = (json.loads((folder / f"{n}.json").read_text()) for n in ("records", "report"))
    return data, report


def test_countdown_says_nothing_at_32_by_its_own_counts():
    """The bound from the ids alone, without the code under test."""
    data, report = committed("countdown")
    recorded = data["sets"]["test"]
    bounds = {}
    for name, unit in zip(recorded["problems"], recorded["units"], strict=True):
        numbers, target = name.removeprefix("countdown-").split("->")
        a, b, c, d = sorted(map(int, numbers.split(",")), reverse=True)
        signs = list(itertools.product((1, -1), repeat=2))
        values = [a + b + s * c + t * d for s, t in signs]
        values += [a * b + s * c + t * d for s, t in signs]
        values += [(a + s * b) * c + t * d for s, t in signs]
        chance = values.count(int(target)) / 12
        bounds.setdefault(unit, []).append(1 - (1 - chance) ** 32)
    bound = np.mean([np.mean(unit) for unit in bounds.values()])
    found = report["sets"]["test"]
    assert found["ks"]["32"]["guess"] == pytest.approx(bound)
    assert not found["ks"]["32"]["usable"] and found["k"] == 8


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_every_registered_claim_is_judged_and_a_guide_that_did_nearly_nothing_is_not(task):
    data, report = committed(task)
    claims = REGISTERED[data["task"], data["problems"]]
    assert len(report["registered"]) == sum(map(len, claims.values()))
    (row,) = report["dose"]
    training = [r["training"] for r in data["runs"] if r["algorithm"] == "sage-branch"]
    assert row["touched"] == pytest.approx(np.mean([t["share_touched"] for t in training]))
    verdicts = report["sets"]["test"]["points"][row["point"]]["verdicts"]
    usable = {k for k, item in report["sets"]["test"]["ks"].items() if item["usable"]}
    assert {
        said for name, said in verdicts.items()
        if name.split("@")[1] in usable and not name.startswith("to_start")
    } == {NO_DOSE}  # fmt: skip


def test_a_published_difference_by_hand():
    """GRPO minus the SFT model at pass@32 of arithmetic's verdict, from the counts alone."""
    study = read_study(RESULTS / "frontier" / "arithmetic" / "fresh")
    posed, start = study["sets"]["test"], study["start"]["sets"]["test"]
    runs = [r for r in study["runs"] if r["point"] == "grpo beta=0.05"]
    values = np.array([pass_at_k(32, np.array(r["sets"]["test"]["correct"]), 32) for r in runs])
    values = values - pass_at_k(start["num_samples"], np.array(start["correct"]), 32)
    units = list(dict.fromkeys(posed["units"]))
    table = np.array([[v[np.array(posed["units"]) == u].mean() for u in units] for v in values])
    found = crossed_interval(table)
    assert f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]" == "-0.057 [-0.093, -0.021]"


@pytest.mark.parametrize("task", ["arithmetic", "countdown"])
def test_no_familys_curves_cross(task):
    """What the page says: within a family GRPO is above the SFT model at every k, or below."""
    data, _ = committed(task)
    names, recorded = data["sets"]["test"]["families"], data["runs"]
    start = np.array(next(r for r in recorded if r["seed"] is None)["sets"]["test"]["correct"])
    trained = np.array(
        [
            r["sets"]["test"]["correct"]
            for r in recorded
            if (r["algorithm"], r["strength"]) == ("grpo", 0.05)
        ]
    )
    for family in set(names):
        member = np.array(names) == family
        changes = [
            pass_at_k(32, trained[:, member], k).mean() - pass_at_k(32, start[member], k).mean()
            for k in (1, 2, 4, 8, 16, 32)
        ]
        signs = {float(np.sign(round(change, 9))) for change in changes}
        assert signs - {0.0} in ({1.0}, {-1.0}), family
