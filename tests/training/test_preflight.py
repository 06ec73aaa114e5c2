"""The shares of a preflight by hand, and the advice for each way in which a signal can be
missing.
"""

import json
from dataclasses import replace

import pytest

from sage_unsloth.grading.reward_functions import get_rewards
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.prompts import prompt_format
from sage_unsloth.sampling.engines import Completion, InBatches
from sage_unsloth.training.preflight import boxed_share, signal, suggest_fixes, untold_groups


def record(problem, grade, *, tag=True, finished=True, tokens=10):
    extracted = "1" if tag else None
    return {
        "problem_id": problem,
        "grade": grade,
        "extracted": extracted,
        "finish_reason": "stop" if finished else "length",
        "num_tokens": tokens,
    }


def test_shares_by_hand():
    records = [
        record(0, "correct"),
        record(0, "wrong", tokens=30),
        record(1, "wrong"),
        record(1, "unparsable", tag=False, finished=False, tokens=50),
        record(2, "correct"),
        record(2, "correct"),
        record(3, "timed out"),
        record(3, "wrong"),
    ]
    assert signal(records) == {
        "solve_rate": 3 / 8,
        "format_rate": 7 / 8,
        "parsed_rate": 6 / 8,
        "truncation_rate": 1 / 8,
        "dead_groups": 3 / 4,  # all but problem 0
        "mean_tokens": 140 / 8,
    }
    with pytest.raises(ValueError, match="at least one completion"):
        signal([])


HEALTHY = {"solve_rate": 0.4, "format_rate": 0.9, "truncation_rate": 0.1, "dead_groups": 0.5}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, []),
        ({"truncation_rate": 0.6}, ["60% of the completions were truncated at 64 tokens"]),
        ({"format_rate": 0.2}, ["only 20% .* run SFT first.*<SOLUTION> </SOLUTION>.*--tags boxed"]),
        ({"dead_groups": 0.9}, ["90% of the groups .* easier problems or more SFT"]),
        ({"dead_groups": 0.9, "solve_rate": 0.95}, ["90% of the groups .* harder problems"]),
        ({"format_rate": 0.0, "truncation_rate": 1.0}, ["100% .* truncated", "only 0%"]),
    ],
)
def test_advice(changes, advice):
    import re

    found = suggest_fixes(HEALTHY | changes, 64)
    assert len(found) == len(advice)
    assert all(re.search(pattern, text) for pattern, text in zip(advice, found, strict=True))


class Boxes(InBatches):
    """An engine that answers rightly, but in a box, which RL does not reward."""

    name = "boxes"

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def draw(self, prompts, seeds, config):
        return [Completion(r"thus \boxed{2}", 5, "stop") for _ in prompts]


def test_a_preflight_grades_as_rl_rewards(tmp_path, unsloth_module):
    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.models.tokenizers import load_tokenizer
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.preflight import preflight

    engine = Boxes(load_tokenizer(data_folder() / "arithmetic-base"))
    rows = [{"problem": "1+1=?", "answer": "2"}, {"problem": "4-2=?", "answer": "2"}]
    config = replace(smoke_config().rlvr, preflight_prompts=2)
    found, _ = preflight(config, engine, rows, tmp_path)
    assert found["solve_rate"] == found["format_rate"] == found["parsed_rate"] == 0
    assert found["dead_groups"] == 1
    *_, advice = json.loads((tmp_path / "preflight.json").read_text())["warnings"][:1]
    assert "(100% put their answer into a box instead)" in advice and "--tags boxed" in advice
    other_tags = [{"extracted": None, "completion": "2<end_working_out><SOLUTION>2</SOLUTION>"}]
    assert boxed_share(other_tags) == 0


def test_who_was_asked_for_a_box_is_not_sent_to_one():
    boxed = prompt_format(tags=["boxed"])
    (advice,) = suggest_fixes(HEALTHY | {"format_rate": 0.1}, 64, boxed)
    assert r"have one answer in \boxed{}" in advice and "--tags" not in advice


@pytest.mark.long
def test_a_preflight_leaves_its_completions_and_does_not_change_training(
    unsloth_module, tmp_path, caplog
):
    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.problems import arithmetic
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.rlvr_stage import rlvr
    from sage_unsloth.training.stage import read_metrics

    caplog.set_level("INFO")
    base = data_folder() / "arithmetic-base"
    config = replace(smoke_config().rlvr, max_steps=2, max_completion_length=8, learning_rate=1e-3)
    rewards = {}
    for prompts in (0, 4):
        folder = tmp_path / str(prompts)
        settings = replace(config, preflight_prompts=prompts)
        rlvr(settings, base, arithmetic.problems("train"), folder, force=True)
        rewards[prompts] = [(row["loss"], row["grad_norm"]) for row in read_metrics(folder)]
    assert rewards[0] == rewards[4]
    assert not (tmp_path / "0" / "preflight.json").exists()
    report = json.loads((tmp_path / "4" / "preflight.json").read_text())
    assert report["prompts"] == 4 and report["truncation_rate"] > 0.5
    assert len((tmp_path / "4" / "preflight.jsonl").read_text().splitlines()) == 16
    assert "were truncated at 8 tokens" in report["warnings"][0]
    assert "Preflight: " in caplog.text and report["warnings"][0] in caplog.text
    assert rewards[0][-1][1] == 0 and "The adapter is still zero" in caplog.text
    assert "Training continues anyway" in caplog.text and "--force" not in caplog.text


def test_a_run_on_dead_groups_alone_stops_before_its_first_step(unsloth_module, tmp_path):
    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.problems import arithmetic
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.rlvr_stage import rlvr

    # No completion of 8 tokens is finished, so that every one is wrong.
    config = replace(smoke_config().rlvr, max_completion_length=8, preflight_prompts=2)
    # The same command again stops again, and so does the one that it suggests.
    for prompts in (2, 2, 4):
        config = replace(config, preflight_prompts=prompts)
        with pytest.raises(ValueError) as error:
            rlvr(config, data_folder() / "arithmetic-base", arithmetic.problems("train"), tmp_path)
        message = str(error.value)
        assert (
            "(0% of the completions are correct). 100% of the completions were truncated" in message
        )
        remedy = f"preflight_prompts={2 * prompts}), or train anyway with --force (force=True)"
        assert remedy in message
        lines = (tmp_path / "preflight.jsonl").read_text().splitlines()
        assert len(lines) == prompts * config.num_generations, "the first ones are taken again"
        assert not (tmp_path / "metrics.jsonl").exists()
        assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(("dead", "stops"), [(31 / 32, False), (1.0, True)])
def test_one_live_group_is_enough_to_train(dead, stops):
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.preflight import check_signal

    found = {"truncation_rate": 0, "format_rate": 1, "solve_rate": 1, "dead_groups": dead}
    if not stops:
        check_signal(found, smoke_config().rlvr)
        return
    with pytest.raises(ValueError, match="harder problems"):
        check_signal(found, smoke_config().rlvr)


def test_groups_that_other_rewards_alone_rank():
    """Of four groups two are ranked by the rest of the reward alone; one by the answer."""
    rows = [
        *(record(0, "wrong") | {"reward": value} for value in (0.1, 0.2)),
        *(record(1, "correct") | {"reward": value} for value in (1.1, 1.2)),
        *(record(2, grade) | {"reward": value} for grade, value in (("correct", 1), ("wrong", 0))),
        *(record(3, "wrong") | {"reward": 0.3} for _ in range(2)),
    ]
    assert untold_groups(rows) == 2 / 4


def test_a_preflight_says_what_ones_own_rewards_do(tmp_path, unsloth_module, caplog):
    """All are wrong and of two lengths, so brevity alone ranks each group."""
    from sage_unsloth.grading.grader import Grader
    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.models.tokenizers import load_tokenizer
    from sage_unsloth.quickstart import smoke_config
    from sage_unsloth.training.preflight import preflight

    class Lengths(Boxes):
        def draw(self, prompts, seeds, config):
            texts = ("<SOLUTION>5</SOLUTION>", "well <SOLUTION>5</SOLUTION>")
            return [Completion(texts[i % 2], 5, "stop") for i in range(len(prompts))]

    def brief(completions, **columns):
        return [1 - len(turns[-1]["content"]) / 100 for turns in completions]

    engine = Lengths(load_tokenizer(data_folder() / "arithmetic-base"))
    rows = [{"problem": "1+1=?", "answer": "2"}, {"problem": "4-2=?", "answer": "2"}]
    config = replace(smoke_config().rlvr, preflight_prompts=2)
    with Grader(1) as grader:
        reward = TotalReward(get_rewards(["answer", brief]), grader, 10)
        found, _ = preflight(config, engine, rows, tmp_path, reward=reward)
        assert found["dead_groups"] == 0
        report = json.loads((tmp_path / "preflight.json").read_text())
        assert report["rewards"] == {"brief": pytest.approx(1 - (22 + 27) / 200)}
        assert reward.pop_sums() == {"brief": (0.0, 0)}, "the first step's mean is of its own"
        assert any("100% of the groups" in warning for warning in report["warnings"])
        config = replace(config, scale_rewards="none", seed=config.seed + 1)
        (tmp_path / "none").mkdir()
        preflight(config, engine, rows, tmp_path / "none", reward=reward)
        again = json.loads((tmp_path / "none" / "preflight.json").read_text())
        assert not any("groups the answers" in warning for warning in again["warnings"])
