"""Problems of a user's own are graded by the verifier of training."""

import pytest

from sage_unsloth.evaluation.loading import ModelSpec
from sage_unsloth.evaluation.trained_verifier import (
    choose_verifier,
    trained_sampling,
    trained_verifier,
)
from sage_unsloth.grading.verifiers import get_verifier
from sage_unsloth.runs.files import write_json


@pytest.fixture
def run(tmp_path):
    def run(name, verifier=None, stage="rlvr", **settings):
        settings |= {"stage": stage}
        if verifier is not None:
            settings["verifier"] = get_verifier(verifier).label
        (tmp_path / name / "adapter").mkdir(parents=True)
        write_json(tmp_path / name / "run.json", {"settings": settings})
        return ModelSpec(name=name, path="base", adapter=str(tmp_path / name / "adapter"))

    return run


@pytest.mark.parametrize("name", ["python", "number:0.01", "json", "text"])
def test_the_name_is_that_of_the_run(run, name):
    assert trained_verifier(run("a", name)) == name


def test_a_run_without_one_was_graded_by_math_and_a_model_without_a_run_by_nothing(run):
    assert trained_verifier(run("a")) == "math"
    assert trained_verifier(run("b", stage="sft")) is None
    assert trained_verifier(ModelSpec(name="c", path="org/model")) is None


def test_sampling_is_that_of_the_runs_where_they_agree(run):
    usual = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0}
    a, b = run("a", **usual), run("b", **usual | {"temperature": 0.9})
    base = ModelSpec(name="c", path="org/model")
    assert trained_sampling([base]) == trained_sampling([base, run("s", stage="sft")]) == {}
    assert trained_sampling([base, a]) == trained_sampling([a, b]) == {"top_p": 1.0, "min_p": 0.0}
    assert trained_sampling([b]) == usual | {"temperature": 0.9}


def test_the_runs_decide_and_another_one_is_asked_for_by_name(run):
    start, code = ModelSpec(name="start", path="org/model"), run("code", "python")
    assert choose_verifier([start], None) is None
    assert choose_verifier([start, code], None) == "python"
    assert choose_verifier([start, code], "python") == "python"
    with pytest.raises(ValueError, match="code was trained by the verifier python, got --verifier"):
        choose_verifier([start, code], "math")
    assert choose_verifier([start, code], "math", other=True) == "math"
    with pytest.raises(ValueError, match=r"trained by different verifiers: .*'text': 'text'"):
        choose_verifier([code, run("text", "text")], None)
