"""Variants: rows in other proportions and the fork dialects by hand, and the committed report."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from research.data import DATA
from research.problems.fork import DIALECTS, LETTERS, with_letters
from research.theory.advantage_sizes import push_on_log_rate
from research.variants.design import RATES, RESULTS, VARIANTS, load_variant, queue_runs
from research.variants.dose import DOSES
from research.variants.pictures import draw_forks
from research.variants.report import (
    PLAIN_START,
    QUEUE,
    SKEWED,
    VariantRecords,
    add_runs,
    beside_line,
    make_report,
    report_starts,
    row_records,
)
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import read_json

RULES = ("grpo", "maxrl")


def row(name, family):
    return {"id": name, "family": family}


def families(rows):
    return Counter(one["family"] for one in rows)


def test_the_committed_rates_give_the_shares_of_the_design():
    counts = families(load_variant("by-rate").task.rows)
    total = sum(counts.values())
    shares = {family: round(count / total, 2) for family, count in counts.items()}
    assert shares == {"usual": 0.44, "far": 0.25, "rare": 0.21, "both": 0.10}
    assert set(read_json(RATES)["correct"]) == {
        one["id"] for one in load_variant("skewed").task.rows
    }


@pytest.mark.parametrize("name", ["balanced", "by-rate"])
def test_other_proportions_are_the_same_problems(name):
    before = {one["id"] for one in load_variant("skewed").task.rows}
    assert {one["id"] for one in load_variant(name).task.rows} == before


# --- the fork language ----------------------------------------------------------------------------


def test_the_forked_way_writes_four_letters_after_its_first_step():
    rng = random.Random(0)
    text = "17=20-3;20*6=120;3*6=18;120-18=102"
    forked = with_letters(text, "round-up", rng)
    first, letters, rest = forked.split(";", 2)
    assert f"{first};{rest}" == text
    assert len(letters) == 4 and set(letters) <= set(LETTERS)
    assert arithmetic.route(forked) == "round-up"
    assert with_letters("17=10+7;10*6=60", "round-up", rng) == "17=10+7;10*6=60"
    assert with_letters("17*6=102", "round-up", rng) == "17*6=102"


def test_each_letter_is_a_token_of_its_own():
    tokenizer = arithmetic.build_tokenizer()
    for one in LETTERS:
        for other in LETTERS:
            assert len(tokenizer(f";{one}{other};")["input_ids"]) == 4


@pytest.mark.parametrize("name", DIALECTS)
def test_one_way_of_a_dialect_forks_and_no_other(name):
    dialect, tokenizer, rng = DIALECTS[name], arithmetic.build_tokenizer(), random.Random(1)
    documents = [dialect.document(tokenizer, rng, [(17, 6)]) for _ in range(200)]
    solutions = [text for context, text in documents if context]
    solutions += [one["solution"] for one in dialect.problems("sft")]
    ways = Counter()
    for text in solutions:
        way = arithmetic.route(text)
        ways[way] += 1
        steps = text.split(";")
        assert (len(steps) > 1 and steps[1].isalpha()) == (way == dialect.way), text
    assert ways[dialect.way] > 10


def test_a_completion_of_a_dialect_fits():
    tokenizer = arithmetic.build_tokenizer()
    for name, dialect in DIALECTS.items():
        limit = load_variant(name).task.rlvr.max_completion_length
        for one in dialect.problems("sft"):
            # the end of the working, the tags, the answer, EOS
            rest = len(tokenizer(one["answer"])["input_ids"]) + 4
            assert len(tokenizer(one["solution"])["input_ids"]) + rest <= limit


# --- queue and report -----------------------------------------------------------------------------


def test_a_line_of_the_queue():
    runs = queue_runs("balanced grpo=0.05,0.4 201,202")
    assert [run.name for run in runs] == [
        "balanced_grpo_beta-0.05_seed-201",
        "balanced_grpo_beta-0.4_seed-201",
        "balanced_grpo_beta-0.05_seed-202",
        "balanced_grpo_beta-0.4_seed-202",
    ]
    with pytest.raises(ValueError, match="a line of the queue"):
        queue_runs("balanced grpo 201")
    with pytest.raises(ValueError, match="a variant must be one of"):
        load_variant("mirrored")


def test_the_queue_names_variants_and_no_run_twice():
    lines = QUEUE.read_text().splitlines()
    runs = [run for line in lines if not line.startswith("#") for run in queue_runs(line)]
    assert len(set(runs)) == len(runs)
    assert {run.variant for run in runs} <= set(VARIANTS)


def test_runs_on_skewed_rows_repeat_the_published_ones():
    again = read_json(RESULTS / f"{PLAIN_START}.json")["runs"]
    assert [run["seed"] for run in again if run.get("variant") == "skewed"] == [201]
    row_records()  # raises where a count differs


def test_the_committed_report_follows_from_the_committed_records():
    def rounded(report):  # the last bits depend on the CPU
        return json.loads(json.dumps(report), parse_float=lambda text: round(float(text), 9))

    assert rounded(read_json(RESULTS / "report.json")) == rounded(make_report())


def test_new_runs_join_the_committed_ones_only_from_the_same_sft_model_and_settings():
    committed = read_json(RESULTS / "fork.json")
    start, *runs = committed["runs"]
    new_run = runs[0] | {"algorithm": "sage-branch", "strength": 0.4}
    new = committed | {"runs": [start, new_run]}
    new["settings"] = committed["settings"] | {"added since": 1}
    joined = add_runs(committed, new)
    assert len(joined["runs"]) == len(committed["runs"]) + 1 and new_run in joined["runs"]
    other = json.loads(json.dumps(start))
    other["sets"]["test"]["correct"][0] += 1
    for changed in ({"runs": [other, new_run]}, {"settings": new["settings"] | {"task": "x"}}):
        with pytest.raises(ValueError, match="the SFT model of the committed ones"):
            add_runs(committed, new | changed)


def test_the_committed_figure_shows_the_committed_report(tmp_path):
    draw_forks(read_json(RESULTS / "report.json"), tmp_path / "fork.png")
    assert (tmp_path / "fork.csv").read_text() == (RESULTS / "fork.csv").read_text()


def test_a_line_is_drawn_through_the_same_seeds_and_has_no_value_beyond_its_end():
    """A point half-way between two of the line's: its distance is to their mean."""
    problems = ["a", "b", "c", "d"]
    posed = {"num_samples": 32, "units": problems, "families": problems}

    def run(algorithm, beta, seed, correct):
        return {
            "variant": "fork",
            "algorithm": algorithm,
            "setting": "beta",
            "strength": beta,
            "seed": seed,
            "sets": {"test": {"correct": correct}},
        }

    runs = [
        run(*item)
        for seed in (1, 2)
        for item in (
            ("grpo-exact", 0.5, seed, [32, 32, 0, 0]),
            ("grpo-exact", 1.0, seed, [0, 0, 0, 0]),
            ("sage-branch-exact", 0.5, seed, [8, 8, 8, 8]),
            ("sage-branch-exact", 1.0, seed, [32, 32, 32, 0]),
        )
    ]
    runs.append(run("sage-branch-exact", 0.5, 3, [0, 0, 0, 0]))  # the line lacks this seed
    records = VariantRecords({"sets": {"test": posed}, "runs": runs})
    line = [("fork", "grpo-exact", beta) for beta in (0.5, 1.0)]
    beside = beside_line(records, ("fork", "sage-branch-exact", 0.5), line)
    # pass@1 is .25, so pass@32 of the line is .25; the point's is 1.
    assert beside is not None and beside.mean == pytest.approx(0.75)
    assert beside_line(records, ("fork", "sage-branch-exact", 1.0), line) is None


def test_differences_to_skewed_rows_by_hand():
    """Means over units of three `rare` or `far` problems, or one `usual` one, seed by seed."""
    records = row_records()
    point = ("balanced", "grpo", 0.05)
    seeds = records.seeds(SKEWED, point)
    groups: dict[str, list[int]] = {}
    for place, unit in enumerate(records.units):
        groups.setdefault(unit, []).append(place)
    rates = {}
    for one in (SKEWED, point):
        counts = [records.runs[one][seed]["correct"] for seed in seeds]
        rates[one] = np.mean(
            [
                np.mean([count[p] for p in places]) / 32
                for count in counts
                for places in groups.values()
            ]
        )
    reported = next(
        one
        for one in make_report()["rows"]["points"]
        if (one["rows"], one["algorithm"]) == point[:2]
    )
    assert reported["seeds"] == seeds
    assert reported["pass@1 - skewed grpo"]["mean"] == pytest.approx(rates[point] - rates[SKEWED])


def test_the_committed_dose_says_what_branch_would_need():
    """Half of the rows' difference, by the largest Σ log q between correct completions, σ = 1."""
    dose = read_json(DOSES)["skewed"]
    assert dose["sigma"] == 1.0, "the exact rows do not divide by the deviation"
    assert dose["needed_beta"] == pytest.approx(0.5 / dose["spread"])
    assert dose["wrong"] > 7 * dose["correct"]


def signed(estimate):
    values = (f"{estimate[name]:+.3f}" for name in ("mean", "low", "high"))
    mean, low, high = (value.replace("0.", ".", 1).replace("-", "−") for value in values)
    return f"{mean} [{low}, {high}]"


def test_the_page_says_what_the_records_say():
    """Each number of the page's text, rounded as there."""
    page = " ".join((RESULTS / "README.md").read_text().split())
    report = make_report()["rows"]
    points = {(one["rows"], one["algorithm"]): one for one in report["points"]}
    balanced, by_rate = points["balanced", "grpo"], points["by-rate", "grpo"]

    assert f"{signed(balanced['pass@32 - skewed grpo'])} of pass@32" in page
    assert f"{signed(by_rate['pass@32 - skewed grpo'])} of pass@32" in page
    both = points["balanced", "maxrl"]
    assert signed(both["pass@32 beside grpo's line"]) + " beside GRPO's line" in page
    assert f"has {both['pass@32']:.3f} of pass@32".replace("0.", ".") in page
    rare = balanced["families"]["pass@32"]["rare"]
    assert f"pass@32 of `rare` is {rare:.3f}".replace("0.", ".") in page
    last = report["claims"][-1]
    assert f"is not smaller on them ({signed(last)})" in page
    first = next(claim for claim in report["claims"] if claim["claim"] == "1")
    assert f"Holm's correction (p = {first['p_holm']:.2g})".replace("0.", ".") in page
    pushes = [[push_on_log_rate(rule, p, 8) for p in (0.065, 0.42, 0.93)] for rule in RULES]
    said = [[0.15, 0.74, 2.10], [0.38, 0.98, 1.00]]
    assert np.allclose(pushes, said, atol=0.005)
    assert [round(one[2] / one[0], 1) for one in pushes] == [14.2, 2.7]


def test_the_page_says_what_the_guide_did():
    page = " ".join((RESULTS / "README.md").read_text().split())
    report = read_json(RESULTS / "report.json")
    pairs = {
        dialect: {
            pair["beta"]: pair
            for pair in report[dialect]["pairs"]
            if pair["algorithm"] == "sage-branch-exact"
        }
        for dialect in ("fork", "fork-twin")
    }
    line = "pass@32 beside grpo-exact's line"
    for dialect, beta, name in (
        ("fork", 0.4, "forked way"),
        ("fork", 0.4, line),
        ("fork", 0.2, "pass@1"),
        ("fork", 0.2, "pass@32"),
        ("fork", 0.2, line),
        ("fork", 1.0, "pass@1"),
        ("fork", 1.0, "pass@32"),
        ("fork-twin", 0.4, "forked way"),
        ("fork-twin", 0.4, "pass@1"),
        ("fork-twin", 0.4, "pass@32"),
        ("fork-twin", 1.0, "pass@1"),
        ("fork-twin", 1.0, "pass@32"),
    ):
        assert signed(pairs[dialect][beta][name]) in page, (dialect, beta, name)
    again = {pair["algorithm"]: pair for pair in report["fork-again"]["pairs"]}
    for algorithm, name in (
        ("sage-branch", "pass@1"),
        ("sage-branch", "pass@32"),
        ("sage-branch-exact", "pass@1"),
        ("sage-branch-exact", "pass@32"),
        ("sage-branch-exact", line),
    ):
        assert signed(again[algorithm][name]) in page, (algorithm, name)
    for dialect in pairs:
        needed = f"{read_json(DOSES)[dialect]['needed_beta']:.2f}".removeprefix("0")
        assert needed in page.partition("The dose distinguishes")[2]
    for other in ("README.md", "docs/findings.md"):
        text = " ".join((DATA.parent / other).read_text().split())
        for estimate in (pairs["fork"][0.4][line], pairs["fork-twin"][0.4]["pass@1"]):
            ends = sorted(abs(estimate[name]) for name in ("low", "high"))
            values = [f"{value:.3f}".removeprefix("0") for value in (abs(estimate["mean"]), *ends)]
            assert f"{values[0]} [{values[1]}, {values[2]}]" in text, other
    models = report["sft models"]
    for estimate in (*(row["pass@32"] for row in models["models"]), models["pass@32"]):
        assert signed(estimate) in page
    assert f"{models['pass@32 deviation']:.3f}".removeprefix("0") in page


def test_what_varies_between_models_by_hand():
    """Of three models with the differences 0, .5 and 1: mean .5, deviation .5."""
    posed = {"num_samples": 32, "units": ["a", "b"], "families": ["a", "b"]}

    def records(name, maxrl):
        runs = [
            {"variant": name, "algorithm": algorithm, "setting": "beta", "strength": 0.05}
            | {"seed": 1, "sets": {"test": {"correct": correct}}}
            for algorithm, correct in (("grpo", [0, 0]), ("maxrl", maxrl))
        ]
        return VariantRecords({"sets": {"test": posed}, "runs": runs})

    starts = {"1": records("1", [0, 0]), "2": records("2", [32, 0]), "3": records("3", [32, 32])}
    report = report_starts(starts)
    assert [row["pass@32"]["mean"] for row in report["models"]] == [0, 0.5, 1]
    assert report["pass@32"]["mean"] == pytest.approx(0.5)
    assert report["pass@32 deviation"] == pytest.approx(0.5)
    # Student's t with two degrees of freedom: 4.303 * .5 / sqrt(3)
    assert report["pass@32"]["high"] == pytest.approx(0.5 + 1.242, abs=1e-3)
