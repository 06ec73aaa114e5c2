"""What a study's methods and claims mean: by hand."""

import pytest

from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.study.points import find_twin, parse_claims, parse_methods, same_method
from sage_unsloth.training.rlvr_config import RlvrConfig


def names(*texts):
    return [point.name for point in parse_methods(texts)]


def test_values_and_grids_become_points():
    assert names("grpo=.05,0.2") == ["grpo beta=0.05", "grpo beta=0.2"]
    assert names("grpo", "dph-rl=.3") == ["grpo", "dph-rl rehearsal_coef=0.3"]
    assert names("pkpo:k=2,4", "pass-at-k=2") == ["pkpo k=2", "pkpo k=4", "pass-at-k k=2"]
    assert names("maxrl=0.05:rehearsal_coef=.3") == ["maxrl beta=0.05 rehearsal_coef=0.3"]
    assert names("sage-branch:threshold=.8,1.2:ratio=.1,.3") == [
        f"sage-branch threshold={t} ratio={r}" for t in ("0.8", "1.2") for r in ("0.1", "0.3")
    ]


def test_a_point_configures_settings_guide_and_rule():
    branch, pkpo, steps = parse_methods(
        ["sage-branch=0.2:threshold=1.2", "pkpo:k=3", "grpo:max_steps=7"]
    )
    config, guide = branch.configure(RlvrConfig(learning_rate=3e-4))
    assert isinstance(guide, BranchGuide) and guide.threshold == 1.2
    assert (config.beta, config.learning_rate) == (0.2, 3e-4)
    assert pkpo.configure(RlvrConfig())[0].advantages == "pkpo,k=3"
    found = steps.configure(RlvrConfig())[0]
    assert found.max_steps == 7 and type(found.max_steps) is int
    # What is set for all replaces an algorithm's own, and a point's own setting replaces both.
    assert steps.configure(RlvrConfig(), {"beta": 0.7})[0].beta == 0.7
    assert branch.configure(RlvrConfig(), {"beta": 0.7})[0].beta == 0.2


def test_a_setting_may_suit_only_the_size_of_a_group():
    (point,) = parse_methods(["pkpo:k=12:num_generations=16"])
    assert point.configure(RlvrConfig())[0].num_generations == 16
    (point,) = parse_methods(["pkpo=12"])
    groups = RlvrConfig(num_generations=16)
    assert point.configure(groups)[0].advantages == "pkpo,k=12"
    assert find_twin(point, [point], groups, {}) is None
    with pytest.raises(ValueError, match="k"):
        point.configure(RlvrConfig(num_generations=8))


def test_a_method_of_your_own_is_module_and_name(tmp_path, monkeypatch):
    (tmp_path / "my_study_rule.py").write_text(
        "from sage_unsloth.objective.guides import BranchGuide\nrule = BranchGuide(ratio=0.4)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    plain, strong = parse_methods(["my_study_rule:rule", "my_study_rule:rule=0.2"])
    assert [plain.name, strong.name] == ["my_study_rule:rule", "my_study_rule:rule beta=0.2"]
    config, guide = strong.configure(RlvrConfig())
    assert config.beta == 0.2 and guide.ratio == 0.4
    assert "/" not in plain.file_name and ":" not in plain.file_name
    grid = parse_methods(["my_study_rule:rule:threshold=.8,1.2"])
    assert [point.configure(RlvrConfig())[1].threshold for point in grid] == [0.8, 1.2]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["grop=0.1"], "an algorithm must be one of"),
        (["grpo=high"], "a method must be NAME"),
        (["grpo:nothing=1"], "a point's setting must be a number"),
        (["grpo:max_steps=1.5"], "max_steps must be a whole number, got 1.5"),
        (["grpo=0.05:beta=0.1"], "a setting must be given once, got 'beta' twice"),
        (["grpo=0.1", "grpo=.1"], "every point must be named once, got 'grpo beta=0.1' twice"),
        ([], "a study needs a method"),
    ],
)
def test_a_method_that_cannot_be_is_refused(texts, message):
    with pytest.raises(ValueError, match=message):
        parse_methods(texts)


def test_claims_name_points_as_the_methods_do():
    points = parse_methods(["grpo=0.05", "maxrl=0.05"])
    claims = parse_claims(["maxrl=.05>grpo=0.05@8", "start > grpo beta=0.05@4"], points, [1, 4, 8])
    assert [claim.text for claim in claims] == [
        "maxrl beta=0.05>grpo beta=0.05@8",
        "start>grpo beta=0.05@4",
    ]
    for text, message in (
        ("maxrl=0.05>grpo=0.05", "a claim must be A>B@K"),
        ("maxrl=0.05>grpo=0.05@16", r"a claim's k must be one of \[1, 4, 8\]"),
        ("maxrl=0.1>grpo=0.05@8", "a claim must be about the study's points"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_claims([text], points, [1, 4, 8])
    (claim,) = parse_claims(["maxrl=0.05>grpo=0.05@16"], points, [1, 4], smoke=True)
    assert claim.k == 4, "a smoke run draws too few samples for more"


def test_twins_and_lines():
    points = parse_methods(["grpo=0.4,0.05", "sage-branch=0.05,0.2", "grpo:max_steps=7", "maxrl"])
    by_name = {point.name: point for point in points}
    shared = RlvrConfig(), {}
    assert find_twin(by_name["sage-branch beta=0.05"], points, *shared) == "grpo beta=0.05"
    assert find_twin(by_name["sage-branch beta=0.2"], points, *shared) is None
    assert find_twin(by_name["grpo beta=0.4"], points, *shared) is None
    line = same_method(by_name["grpo beta=0.05"], points)
    assert [point.name for point in line] == ["grpo beta=0.05", "grpo beta=0.4"]
    assert same_method(by_name["maxrl"], points) == [by_name["maxrl"]]
