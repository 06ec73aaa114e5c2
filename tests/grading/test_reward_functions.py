"""Rewards of one's own: how they are named, weighed, called and refused."""

import math
import sys
import textwrap
import time

import pytest

from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.own_reward import OwnReward
from sage_unsloth.grading.reward_functions import (
    Reward,
    check_reward_columns,
    get_rewards,
    recorded_rewards,
)
from sage_unsloth.grading.total_reward import TotalReward

PROMPTS = [[{"role": "user", "content": "1 + 1"}], [{"role": "user", "content": "2 + 3"}]]
COMPLETIONS = [
    [{"role": "assistant", "content": "<SOLUTION>2</SOLUTION>"}],
    [{"role": "assistant", "content": "<SOLUTION>6</SOLUTION> or so"}],
]


def length(completions, **columns):
    return [float(len(turns[-1]["content"])) for turns in completions]


def some(prompts, completions):
    return [None, 0.5]


def asked_for(level, completions):
    return [2.0 * value for value in level]


@pytest.fixture(scope="module")
def grader():
    with Grader() as grader:
        yield grader


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of a user's to the working directory, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(content, name="my_own_rewards"):
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(content))
        return name

    return write


def test_without_a_word_the_checked_answer_alone_is_rewarded():
    (reward,) = get_rewards(None)
    assert (reward.name, reward.weight, reward.function) == ("answer", 1.0, None)
    assert recorded_rewards([reward]) is None, "an old run's record has no rewards"
    assert get_rewards([]) == get_rewards(None) == get_rewards(["answer"])


def test_the_rewards_are_those_that_are_named(module):
    name = module("def brief(completions, **c):\n    return [0.0 for _ in completions]\n")
    answer, brief = get_rewards(["answer=2", f"{name}:brief=-0.25"])
    assert (answer.function, answer.weight) == (None, 2.0)
    assert (brief.name, brief.weight) == ("brief", -0.25)
    first = recorded_rewards([answer, brief])
    assert first[0] == {"name": "answer", "weight": 2.0}
    digest = first[1].pop("source")
    assert first[1] == {"name": "brief", "weight": -0.25, "function": f"{name}:brief"}
    module("def brief(completions, **c):\n    return [1.0 for _ in completions]\n")
    other = recorded_rewards(get_rewards([f"{name}:brief=-0.25"]))
    assert other[0]["source"] != digest, "another source is another reward"


@pytest.mark.parametrize(
    "wanted, message",
    [
        ("answer", "must be a list"),
        (["answer=many"], "whose weight is not a number"),
        (["answer=nan"], "weight must be finite"),
        (["brief"], "named module:name"),
        (["no_such_module:f"], r"no_such_module is not there. Put no_such_module\.py in"),
        (["math:no_such"], "got 'no_such'"),
        ([length, length], "different names"),
        (["answer=0", Reward(function=length, weight=0)], "weight must not be 0"),
        ([{"function": length, "name": "correct"}], "must not be answer or a grade"),
        ([{"function": 3}], "must be a function"),
    ],
)
def test_what_is_no_reward_is_refused(wanted, message):
    with pytest.raises(ValueError, match=message):
        get_rewards(
            [Reward(**item) if isinstance(item, dict) else item for item in wanted]
            if isinstance(wanted, list)
            else wanted
        )


def test_a_module_that_breaks_says_how(module):
    name = module("import no_such_package\n")
    with pytest.raises(ValueError, match=r"raised ModuleNotFoundError: .*no_such_package.* Fix"):
        get_rewards([f"{name}:f"])
    name = module("VALUE = 3\ndef f():\n    pass\n")
    with pytest.raises(ValueError, match=r":VALUE, which is 3. Its module has f"):
        get_rewards([f"{name}:VALUE"])


def test_parameters_must_be_columns():
    rewards = [Reward(function=asked_for)]
    check_reward_columns(rewards, {"prompt": [], "answer": "2", "level": 3})
    read = r"asked_for needs level, but the data have answer .* Read .*\(--columns level=COLUMN\)"
    with pytest.raises(ValueError, match=read):
        check_reward_columns(rewards, {"prompt": [], "answer": "2"})


def test_parameters_that_are_nearly_trls_are_guessed():
    def single(prompt, completion):
        return 0.0

    with pytest.raises(ValueError, match="Did you mean prompts, completions") as error:
        check_reward_columns([Reward(function=single)], {"prompt": [], "answer": "2"})
    assert "--columns" not in str(error.value)


def test_the_total_is_the_weighted_sum(grader):
    rewards = get_rewards(["answer", Reward(function=length, weight=0.01), some])
    total = TotalReward(rewards, grader, 10)
    assert total.weights == [1.0, 0.01, 1.0]
    given = {"prompts": PROMPTS, "completions": COMPLETIONS, "answer": ["2", "5"]}
    values = [function(**given) for function in total.functions]
    assert values == [[1.0, 0.0], [22.0, 28.0], [None, 0.5]]
    rows = total.last_batch
    assert [row["reward"] for row in rows] == pytest.approx([1.22, 0.78])
    assert rows[1]["rewards"] == {"answer": 0.0, "length": 28.0, "some": 0.5}
    assert rows[0]["grade"] == "correct" and rows[0]["answer"] == "2"
    assert total.pop_sums() == {"length": (50.0, 2), "some": (0.5, 1)}
    # What a preflight is given counts in no step.
    records = [{"completion": turns[0]["content"], "grade": "correct"} for turns in COMPLETIONS]
    totals = total.of_records(PROMPTS, records, {})
    assert totals == pytest.approx([1.22, 1.78])
    assert total.pop_sums() == {"length": (0.0, 0), "some": (0.0, 0)}


def test_what_is_not_trained_on_does_not_count():
    reward = OwnReward(Reward(function=length), 10)
    reward(PROMPTS, COMPLETIONS)
    first, second = reward.last_batch
    reward.forget([first], [second])
    assert reward.last_batch == [second] and reward.pop_mean() == (28.0, 1)


def test_columns_come_by_name_and_only_those_that_are_asked_for():
    seen = {}

    def every(prompts, completions, **columns):
        seen.update(columns)
        return [0] * len(completions)

    OwnReward(Reward(function=every), 10)(PROMPTS, COMPLETIONS, level=[1, 2], trainer_state=None)
    assert seen == {"level": [1, 2], "trainer_state": None}
    few = OwnReward(Reward(function=asked_for), 10)
    assert few(PROMPTS, COMPLETIONS, level=[1, 2], other=[3, 4]) == [2.0, 4.0]


def test_a_coroutine_is_a_reward_too():
    async def later(completions, **columns):
        return [1.0] * len(completions)

    assert OwnReward(Reward(function=later), 10)(PROMPTS, COMPLETIONS) == [1.0, 1.0]


@pytest.mark.parametrize(
    "value, message",
    [
        ([1.0], "each of the 2 completions, but returned 1"),
        (3.0, "a list with a number per completion, got 3.0"),
        ([1.0, math.nan], "completion 1 nan"),
        ([math.inf, 0.0], "completion 0 inf"),
        ([0.0, "1"], "completion 1 '1'"),
        ([0.0, [1.0]], r"completion 1 \[1.0\]"),
    ],
)
def test_a_wrong_value_stops_the_step_and_names_the_reward(value, message):
    def mine(completions):
        return value

    with pytest.raises(ValueError, match=f"the reward mine must return .*{message}"):
        OwnReward(Reward(function=mine), 10)(PROMPTS, COMPLETIONS)


def test_a_reward_that_raises_is_named():
    def mine(completions):
        return [1 / 0 for _ in completions]

    with pytest.raises(ValueError, match=r"the reward mine .* raised ZeroDivisionError") as caught:
        OwnReward(Reward(function=mine), 10)(PROMPTS, COMPLETIONS)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reward_that_hangs_is_named():
    def mine(completions):
        time.sleep(60)

    started = time.monotonic()
    with pytest.raises(ValueError, match=r"the reward mine must return within 0\.2 s a call"):
        OwnReward(Reward(function=mine), 0.2)(PROMPTS, COMPLETIONS)
    assert time.monotonic() - started < 10


def test_one_that_holds_pythons_lock_ends_the_process_with_its_place(tmp_path):
    """No thread can be told anything then; `UNINTERRUPTED` is shortened to wait less."""
    import subprocess

    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import re
            from sage_unsloth.grading import own_reward, reward_functions
            own_reward.UNINTERRUPTED = 0.5

            def my_slow_reward(completions):
                re.match("(a+)+$", "a" * 60 + "b")

            reward = reward_functions.Reward(function=my_slow_reward)
            own_reward.OwnReward(reward, 0.5)(["x"], ["y"])
        """)
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Timeout" in done.stderr and "in my_slow_reward" in done.stderr


def test_a_completion_that_no_reward_judges_stops_the_step(grader):
    def none(completions):
        return [None, None]

    total = TotalReward(get_rewards([none, some]), grader, 10)
    total.functions[0](PROMPTS, COMPLETIONS)
    with pytest.raises(ValueError, match="completion 0 got None of none, some"):
        total.functions[1](PROMPTS, COMPLETIONS)
