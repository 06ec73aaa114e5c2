"""Code of a user's own: how it is found and named, and where it broke."""

import sys
import textwrap
import traceback

import pytest

from sage_unsloth.grading.own_reward import OwnReward
from sage_unsloth.grading.reward_functions import Reward, get_rewards
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.own_code import describe_exception, named_object, own_frames
from sage_unsloth.training.own_algorithms import named_algorithm

ASKED = {
    "a reward": lambda text: get_rewards([text]),
    "a verifier": get_verifier,
    "a rule for advantages": advantage_rule,
    "an algorithm": named_algorithm,
}


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module to the current folder, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    number = abs(hash(tmp_path)) % 10**8
    written = []

    def write(content):
        written.append(f"mine_{number}_{len(written)}")
        (tmp_path / f"{written[-1]}.py").write_text(textwrap.dedent(content))
        return written[-1]

    yield write
    for name in written:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("what", ASKED)
def test_each_kind_says_the_same_of_what_is_not_there(module, what):
    name = module("import json\nraise_it = json\ndef f(a, b):\n    return a\n")
    broken = module("def f(x):\n    return x\n\nVALUE = {}['no such key']\n")
    for text, message in {
        f"{name}.py:f": f"{what} of your own is named by its module, without .py, got .* {name}:f",
        "no_such_module_of_mine:f": f"{what} of your own must be importable, but "
        "no_such_module_of_mine is not there. Put no_such_module_of_mine.py in .*, or install its "
        "package",
        f"{broken}:f": f"{what} of your own must be importable, but {broken} raised KeyError: "
        rf"'no such key' at {broken}.py:4. Fix {broken}.py",
        f"{name}:g": rf"{what} must be a name of {name} \(json, raise_it, f\), got 'g'",
    }.items():
        with pytest.raises(ValueError, match=message):
            ASKED[what](text)


def test_the_current_folder_comes_first(module, tmp_path, monkeypatch):
    name = module("where = 'here'")
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{name}.py").write_text("where = 'elsewhere'")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other)])
    assert named_object(f"{name}:where", "a word") == "here"
    assert sys.path[0] == str(tmp_path)


def test_a_syntax_error_is_told_with_its_line(module):
    name = module("x = 1\ny = (\n")
    with pytest.raises(ValueError, match=rf"raised SyntaxError: .* at {name}\.py:2. Fix"):
        named_object(f"{name}:x", "a word")


def test_a_reward_that_raises_names_the_last_line_of_ones_own_code(module, caplog):
    name = module(
        """
        import statistics

        def average(lengths):
            return statistics.mean(lengths)

        def brief(completions):
            return [average([]) for _ in completions]
        """
    )
    (reward,) = get_rewards([f"{name}:brief"])
    with pytest.raises(ValueError) as found:
        OwnReward(reward, 5)(prompts=["p"], completions=["c"])
    assert f"it raised StatisticsError: mean requires at least one data point at {name}.py:5, " in (
        str(found.value)
    )
    assert ", in average. The same command resumes" in str(found.value)
    (record,) = caplog.records
    log = record.getMessage()
    assert log.startswith("the reward brief raised StatisticsError:")
    assert log.count("File ") >= 2 and "statistics.py" not in log and "own_reward" not in log
    assert "return [average([]) for _ in completions]" in log


def test_a_reward_that_hangs_says_where_it_was(module):
    name = module(
        """
        import time

        def slow(completions):
            time.sleep(3)
        """
    )
    (reward,) = get_rewards([f"{name}:slow"])
    with pytest.raises(ValueError, match=rf"still running at {name}\.py:5, in slow. Fix it"):
        OwnReward(reward, 0.3)(prompts=["p"], completions=["c"])


def test_what_broke_in_a_library_alone_has_no_place(tmp_path):
    try:
        textwrap.dedent(3)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        assert [frame.filename for frame in own_frames(frames)] == [__file__]
        assert f"at {__file__}:" in describe_exception(
            error
        ) or "test_own_code.py:" in describe_exception(error)
        error.__traceback__ = error.__traceback__.tb_next
        assert " at " not in describe_exception(error)
    assert Reward(function=len).name == "len"
