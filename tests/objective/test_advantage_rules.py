"""Rules for advantages by name: settings, rules of one's own, and the groups that teach nothing."""

import math

import pytest
import torch

from sage_unsloth.methods import group_advantages
from sage_unsloth.methods.advantage_rules import RULES, advantage_rule, check_rule

GROUP = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
# The numbers of right answers of eight that leave every advantage 0, k = 4; by the formulas.
SILENT = {
    "grpo": [0, 8],
    "maxrl": [0, 8],
    "nsr": [8],
    "w-reinforce": [],
    "pkpo": [0, 6, 7, 8],  # C(8 − c, 3) = 0 from c = 6 on
    "maxpo": [0, 5, 6, 7, 8],  # 1/C(7, 3) − 4/7 · 1/C(6, 3) = 0 at c = 5
    "pass-at-k": [0, 5, 6, 7, 8],
    "rs-grpo": [0, 8],
    "unlikeliness": [0, 8],
    "f-grpo": [0, 8],
    "ucpo": [],  # likelihoods differ also where rewards do not
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", RULES)
def test_which_groups_teach_nothing(name):
    assert advantage_rule(name).silent_counts(8) == SILENT[name]


def test_a_name_with_settings():
    rule = advantage_rule("pkpo, k=4 ,k_last=1")
    assert (rule.text, rule.settings) == ("pkpo,k=4,k_last=1", {"k": 4, "k_last": 1})
    assert rule.needs == {"step", "max_steps"} and not rule.is_grpo
    assert [rule(GROUP, step=t, max_steps=3)[0, 0] for t in (0, 2)] == [4, 1]
    assert advantage_rule("grpo").is_grpo and advantage_rule("unlikeliness").needs == {"mean_logps"}
    assert advantage_rule(rule) is rule


def test_the_number_of_samples_decides_k():
    (of_eight,) = advantage_rule("pkpo")(torch.eye(8)[:1], step=0, max_steps=1)
    assert of_eight[0] == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "maxlr",
            r"one of grpo, maxrl, .*unlikeliness, .*your own module:function, got 'maxlr'",
        ),
        ("pkpo,n=4", r"NAME=VALUE of k, k_last, got 'n=4'"),
        ("pkpo,4", r"NAME=VALUE of k, k_last, got '4'"),
        ("pkpo,step=4", r"NAME=VALUE of k, k_last, got 'step=4'"),
        ("maxrl,k=4", r"of none, got 'k=4'"),
        ("pkpo,k=four", r"k of advantages='pkpo' must be a number, got 'four'"),
        ("pkpo,k=True", r"must be a number, got True"),
        (
            "no_such_module:rule",
            r"advantages of your own must be importable, but no_such",
        ),
        ("math:rule", r"must be a name of math .*, got 'rule'"),
        ("math:pi", r"must be a function of the rewards \(P, G\), got math:pi"),
        (":rule", r"is named module:name, got ':rule'"),
    ],
)
def test_what_names_no_rule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        advantage_rule(text)


@pytest.fixture
def own_rules(tmp_path, monkeypatch):
    """A module of one's own in the current folder."""
    (tmp_path / "rules_of_mine.py").write_text(
        "def halves(rewards, *, weight=0.5, step=0):\n"
        "    return weight * (rewards - 0.5) * (1 + step)\n"
        "def silent(rewards):\n"
        "    return 0 * rewards\n"
        "def open_setting(rewards, weight):\n"
        "    return rewards\n"
        "def a_number(rewards):\n"
        "    return rewards.mean()\n"
        "def writes(rewards):\n"
        "    rewards -= 1\n"
        "    return rewards\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_rule_of_ones_own(own_rules):
    rule = advantage_rule("rules_of_mine:halves,weight=2")
    assert rule(GROUP, step=1).tolist() == [[2, -2, -2, -2]]
    assert rule.needs == {"step"} and rule.silent_counts(4) == []
    as_function = advantage_rule(group_advantages.maxrl)
    assert as_function.text == "maxrl" and torch.equal(as_function(GROUP), RULES["maxrl"](GROUP))
    before = GROUP.clone()
    advantage_rule("rules_of_mine:writes")(GROUP)
    assert torch.equal(GROUP, before)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", r"every completion in groups of 4 the advantage 0"),
        ("open_setting", r"arguments with a default, but rules_of_mine:open_setting has \(rew"),
        ("a_number", r"a finite advantage for each reward, \(5, 4\), got tensor"),
    ],
)
def test_a_rule_of_ones_own_that_cannot_teach_is_refused(own_rules, name, message):
    with pytest.raises(ValueError, match=message):
        check_rule(f"rules_of_mine:{name}", 4)


def test_the_size_of_the_groups_is_checked():
    check_rule("pass-at-k,k=3", 4)
    with pytest.raises(ValueError, match="from 1 to 3"):
        check_rule("pass-at-k,k=4", 4)
    with pytest.raises(ValueError, match=r"every completion in groups of 2 the advantage 0"):
        check_rule(lambda rewards: rewards * math.nan if False else 0 * rewards, 2)
