"""Rewards and verifiers of one's own in whole runs of the shipped base model."""

import json
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from sage_unsloth.grading.reward_functions import Reward
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.stage import read_metrics

BASE = data_folder() / BASE_MODEL
RLVR = replace(smoke_config().rlvr, max_steps=2, save_steps=1, sample_steps=1, preflight_prompts=2)
TRAIN = [row | {"level": i % 3} for i, row in enumerate(arithmetic.problems("train"))]


def digits(completions, **columns):
    """How many digits a completion has: the untrained model's groups differ in it."""
    return [sum(c.isdigit() for c in turns[-1]["content"]) / 10 for turns in completions]


def level_reward(prompts, completions, level):
    assert len(level) == len(prompts) == len(completions)
    return [float(value) if value else None for value in level]


def means(folder, name):
    return [
        sum(row["rewards"][name] or 0 for row in rows) / len(rows)
        for rows in ([r for r in read_jsonl(folder / "completions.jsonl") if r["step"] == step]
                     for step in (1, 2))
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory, unsloth_module):
    folder = tmp_path_factory.mktemp("rewards")
    rewards = ["answer", Reward(function=digits, weight=0.5), Reward(function=level_reward)]
    rlvr(replace(RLVR, max_resamples=1), BASE, TRAIN, folder, rewards=rewards)
    return folder, rewards


def test_every_reward_is_logged_by_its_name(run):
    folder, _ = run
    metrics = read_metrics(folder)
    assert [row["reward/digits"] for row in metrics] == pytest.approx(means(folder, "digits"))
    rows = read_jsonl(folder / "completions.jsonl")
    assert len(rows) == 2 * RLVR.prompts_per_step * RLVR.num_generations
    for row in rows:
        found = row["rewards"]
        assert list(found) == ["answer", "digits", "level_reward"]
        assert found["digits"] == sum(c.isdigit() for c in row["completion"]) / 10
        assert found["answer"] == float(row["grade"] == "correct")
        total = found["answer"] + 0.5 * found["digits"] + (found["level_reward"] or 0)
        assert row["reward"] == pytest.approx(total)
    for step, row in enumerate(metrics, 1):
        own = [r["reward"] for r in rows if r["step"] == step]
        assert row["reward"] == pytest.approx(sum(own) / len(own), abs=1e-5), "the trainer's total"
        graded = sum(row[f"reward/{g}"] for g in ("correct", "wrong", "unparsable", "timed out"))
        assert graded == RLVR.prompts_per_step * RLVR.num_generations
        assert row["sampling/dead_groups"] == 0, "groups differ in their digits"


def test_the_preflight_counts_dead_groups_by_the_total_reward(run):
    found = json.loads((run[0] / "preflight.json").read_text())
    groups = {}
    for record in read_jsonl(run[0] / "preflight.jsonl"):
        groups.setdefault(record["problem_id"], set()).add(record["grade"] == "correct")
    assert any(len(group) == 1 for group in groups.values()), "dead by the checked answer"
    assert found["dead_groups"] == 0


def test_a_run_with_other_rewards_is_refused(run):
    folder, rewards = run
    recorded = json.loads((folder / "run.json").read_text())["settings"]["rewards"]
    assert [(entry["name"], entry["weight"]) for entry in recorded] == [
        ("answer", 1.0),
        ("digits", 0.5),
        ("level_reward", 1.0),
    ]
    config = replace(RLVR, max_resamples=1)
    assert rlvr(config, BASE, TRAIN, folder, rewards=rewards).is_dir()
    for others in (None, rewards[:2], [*rewards[:2], Reward(function=level_reward, weight=2)]):
        with pytest.raises(ValueError, match=r"rewards.* was "):
            rlvr(config, BASE, TRAIN, folder, rewards=others)


def test_own_rewards_alone_need_no_answers(tmp_path, unsloth_module):
    rows = [{"problem": row["problem"]} for row in TRAIN]
    config = replace(RLVR, credit="sequence", kl_estimator="k3-is", max_steps=1)
    rlvr(config, BASE, rows, tmp_path, rewards=[digits])
    (row,) = read_metrics(tmp_path)
    assert row["reward/digits"] == pytest.approx(row["reward"], abs=1e-5)
    assert "reward/correct" not in row
    found = json.loads((tmp_path / "preflight.json").read_text())
    assert "solve_rate" not in found and not any("solution tag" in w for w in found["warnings"])
    sample = read_jsonl(tmp_path / "completions.jsonl")[0]
    assert sample.keys() == {"step", "prompt", "completion", "rewards", "reward"}


@pytest.mark.long
def test_a_reward_that_fails_within_a_run_names_itself_and_the_run_resumes(
    tmp_path, unsloth_module
):
    calls = []

    def unsteady(completions):
        calls.append(1)
        values = [float(i % 2) for i, _ in enumerate(completions)]
        return values[1:] if len(calls) == 3 else values  # the first call is a trial

    config = replace(RLVR, preflight_prompts=0)
    with pytest.raises(ValueError, match="the reward unsteady must return a number for each of"):
        rlvr(config, BASE, TRAIN, tmp_path, rewards=[unsteady])
    rlvr(config, BASE, TRAIN, tmp_path, rewards=[unsteady])
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]


# --- refused before anything is loaded ------------------------------------------------------------


@pytest.fixture
def nothing_loads(monkeypatch):
    from sage_unsloth.training import rlvr_stage as module

    for name in ("load_backend", "load_tokenizer", "load_policy"):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("nothing is to be loaded"))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a user's to the working directory, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(content, name):
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
        return name

    return write


def test_bad_rewards_and_golds_are_refused_before_a_model_is_loaded(nothing_loads, tmp_path):
    tests = json.dumps({"inputs": ["1"], "outputs": ["1", "2"]})
    programs = [{"problem": "add", "answer": tests}] * 4
    config = replace(RLVR, reward_seconds=0.5)

    def short(completions):
        return [1.0]

    def scalar(completions):
        return 1.0

    def misspelt(completions):
        return [len(turns[0]["contents"]) for turns in completions]

    def slow(completions):
        time.sleep(5)

    cases = [
        ({"rewards": ["no_module:f"]}, TRAIN, "no_module is not there"),
        ({"rewards": [short]}, TRAIN, "each of the 2 completions, but returned 1"),
        ({"rewards": [scalar]}, TRAIN, "scalar must return a list with a number per completion"),
        ({"rewards": [misspelt]}, TRAIN, r"KeyError: 'contents' at .*py:\d+, in misspelt"),
        (
            {"rewards": [slow]},
            TRAIN,
            r"within 0.5 s a call, but it was .* at .*, in slow",
        ),
        ({"rewards": [level_reward]}, arithmetic.problems("train"), "level_reward needs level"),
        ({"verifier": "maths"}, TRAIN, "a verifier is one of math, math-verify, number"),
        ({"verifier": "python"}, programs, "row 0: the tests of a program must be JSON"),
        ({"verifier": "json"}, TRAIN, "row 0: a gold must be a JSON schema"),
        ({"verifier": "regex"}, [{"problem": "p", "answer": "("}], "row 0: a gold must be a reg"),
    ]
    for settings, rows, message in cases:
        with pytest.raises(ValueError, match=message):
            rlvr(config, BASE, rows, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_verifier_that_its_worker_cannot_import_is_refused(nothing_loads, module, capfd):
    name = module(
        """
        import os
        if "HF_TOKEN" not in os.environ:  # which a worker does not get
            raise RuntimeError("no token")
        def check(answer, gold):
            return answer == gold
        """,
        "my_verifier_with_a_secret",
    )
    with pytest.raises(ValueError, match=f"the verifier {name}:check must start in a worker"):
        rlvr(RLVR, BASE, TRAIN, "run", verifier=f"{name}:check")
    assert "no token" in capfd.readouterr().err


def test_a_verifier_of_a_script_is_refused(nothing_loads):
    def check(answer, gold):
        return True

    with pytest.raises(ValueError, match="a function at the top of a module"):
        rlvr(RLVR, BASE, TRAIN, "run", verifier=check)
