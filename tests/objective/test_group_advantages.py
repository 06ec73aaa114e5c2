"""Every rule for advantages: values by hand, its expected update by enumeration of all groups, in
the limit of large groups, and what it refuses.

The expected update is of a Bernoulli policy p = sigmoid(θ): D(p) = E[mean_i A_i ∂log π(y_i)/∂θ] /
(p(1−p)), so that a rule that ascends F has D = F'(p).
"""

import itertools
import math
from functools import partial
from math import comb

import pytest
import torch

from sage_unsloth.methods import group_advantages as rules
from sage_unsloth.methods.kl_reward import less_kl

GRID = [0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95]
SIZES = [2, 3, 4, 5, 8]
NAN = math.nan


def advantages(rule, rewards, **settings):
    return rule(torch.tensor(rewards, dtype=torch.float64), **settings).tolist()


def expected_update(rule, p, n, **settings):
    """D(p) over all 2^n groups, one by one."""
    groups = torch.tensor([*itertools.product([0.0, 1.0], repeat=n)], dtype=torch.float64)
    right = groups.sum(1)
    probability = p**right * (1 - p) ** (n - right)
    score = groups / p - (1 - groups) / (1 - p)  # ∂log π/∂θ over p(1 − p)
    return (probability * (rule(groups, **settings) * score).mean(1)).sum().item()


def large_groups(rule, p, n=4000, **settings):
    """D(p) where the share of right answers is p itself."""
    groups = (torch.arange(n) < round(p * n)).double().unsqueeze(0)
    score = groups / p - (1 - groups) / (1 - p)
    return (rule(groups, **settings) * score).mean().item()


def slope_of_pass_at_k(p, k):
    return k * (1 - p) ** (k - 1)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("rule", "settings", "expected"),
    [  # of one right in four, three right, none, all
        (rules.maxrl, {}, [[3, -1], [1 / 3, -1], [None, 0], [0, None]]),
        (rules.nsr, {}, [[0, -1], [0, -1], [None, -1], [0, None]]),
        (rules.w_reinforce, {"weight": 0.2}, [[0.2, -1], [0.2, -1], [None, -1], [0.2, None]]),
        # 2·C(3, 1)/C(3, 1), 2·C(1, 1)/C(3, 1)
        (rules.pkpo, {"k": 2}, [[2, 0], [2 / 3, 0], [None, 0], [0, None]]),
        # right 2(1 − 0), wrong −2·(1/3)·C(2, 1)/C(2, 1); right 2(1/3 − (2/3)(1/2)), wrong 0
        (rules.maxpo, {"k": 2}, [[2, -2 / 3], [0, 0], [None, 0], [0, None]]),
        # one right: R̄ = 1 − 3/6, σ = 1/2, wrong (1/2 − C(2, 1)/C(3, 1))/σ; three right: R̄ = 1
        (rules.pass_at_k_advantages, {"k": 2}, [[1, -1 / 3], [0, 0], [None, 0], [0, None]]),
        # mean e^{2r} = (e² + 3)/4
        (
            rules.rs_grpo,
            {"beta": 2.0},
            [
                [(math.e**2 * 4 / (math.e**2 + 3) - 1) / 2, (4 / (math.e**2 + 3) - 1) / 2],
                [(math.e**2 * 4 / (3 * math.e**2 + 1) - 1) / 2, (4 / (3 * math.e**2 + 1) - 1) / 2],
                [None, 0],
                [0, None],
            ],
        ),
        # σ = √(4·.25·.75/3) = 1/2
        (rules.grpo, {}, [[1.5, -0.5], [0.5, -1.5], [None, 0], [0, None]]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_values_by_hand(rule, settings, expected):
    groups = [[1, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]
    found = advantages(rule, [[float(r) for r in group] for group in groups], **settings)
    for group, values, (right, wrong) in zip(groups, found, expected, strict=True):
        by_hand = [right if reward else wrong for reward in group]
        assert values == pytest.approx(by_hand, rel=3e-4, abs=1e-9)


def test_unlikeliness_by_hand():
    rewards = [[1.0, 1.0, 0.0, 0.0], [1.0] * 4, [0.0] * 4]
    logps = torch.tensor([[-0.1, -3.0, -2.0, -1.0]] * 3)
    found = advantages(rules.unlikeliness, rewards, mean_logps=logps, weight=0.4)
    # Ranks 3, 0, 1, 2: rewards .7, 1, 0, 0, whose mean is .425
    shaped = torch.tensor([0.7, 1.0, 0, 0], dtype=torch.float64)
    assert found[0] == pytest.approx(((shaped - 0.425) / (shaped.std() + 1e-4)).tolist())
    assert found[1:] == [[0.0] * 4] * 2
    plain = advantages(rules.unlikeliness, rewards, mean_logps=logps, weight=0)
    assert plain == advantages(rules.grpo, rewards)


def test_f_grpo_is_grpo_times_a_power_of_the_share_that_is_wrong():
    groups = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4, [1.0] * 4]
    plain, gated = (advantages(rule, groups) for rule in (rules.grpo, rules.f_grpo))
    for values, expected, wrong in zip(gated, plain, (0.75, 0.25, 1, 0), strict=True):
        assert values == pytest.approx([math.sqrt(wrong) * value for value in expected])
    assert advantages(rules.f_grpo, groups, gamma=0) == plain


def test_ucpo_by_hand():
    """Of two right completions with q = 3/4 and 1/4 and three wrong ones with 1/2, 1/4, 1/4."""
    rewards = [[1.0, 1.0, 0.0, 0.0, 0.0]]
    logps = torch.tensor([[3.0, 1.0, 2.0, 1.0, 1.0]], dtype=torch.float64).log()
    (values,) = advantages(rules.ucpo, rewards, mean_logps=logps, tau=0.2, alpha=0.3)
    (plain,) = advantages(rules.grpo, rewards)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    bonus = [0.2 * (-math.log(q) - entropy) for q in (0.75, 0.25)]
    assert bonus[0] < 0 < bonus[1] and 0.75 * bonus[0] + 0.25 * bonus[1] == pytest.approx(0)
    entropy = 1.5 * math.log(2)
    penalty = [0.3 * max(0.0, -math.log(q) - entropy) for q in (0.5, 0.25, 0.25)]
    assert penalty[0] == 0 < penalty[1]
    by_hand = [a + b for a, b in zip(plain, [*bonus, *(-x for x in penalty)], strict=True)]
    assert values == pytest.approx(by_hand)
    assert advantages(rules.ucpo, rewards, mean_logps=logps, tau=0, alpha=0)[0] == plain
    (single,) = advantages(rules.ucpo, [[1.0, 0.0]], mean_logps=logps[:, :2])
    assert single == advantages(rules.grpo, [[1.0, 0.0]])[0], "sets of one keep GRPO's"
    (all_right,) = advantages(rules.ucpo, [[1.0, 1.0]], mean_logps=logps[:, :2])
    assert all_right[0] < 0 < all_right[1]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("p", GRID)
def test_expected_updates_at_any_group_size(n, p):
    assert expected_update(rules.nsr, p, n) == pytest.approx(1.0)
    assert expected_update(rules.w_reinforce, p, n, weight=0.1) == pytest.approx(1.1)
    truncated_log = (1 - (1 - p) ** (n - 1)) / p  # Σ_{j < n−1} (1 − p)^j
    assert expected_update(rules.maxrl, p, n) == pytest.approx(truncated_log, rel=1e-4)
    for k in range(1, n + 1):
        slope = slope_of_pass_at_k(p, k)
        assert expected_update(rules.pkpo, p, n, k=k) == pytest.approx(slope)
        if k < n:
            assert expected_update(rules.maxpo, p, n, k=k) == pytest.approx(slope)


@pytest.mark.parametrize("p", GRID)
def test_expected_updates_of_large_groups(p):
    assert large_groups(rules.grpo, p) == pytest.approx(1 / math.sqrt(p * (1 - p)), rel=1e-3)
    assert large_groups(rules.maxrl, p) == pytest.approx(1 / p, rel=1e-3)
    gated = math.sqrt(1 - p) / math.sqrt(p * (1 - p))
    assert large_groups(rules.f_grpo, p) == pytest.approx(gated, rel=1e-3)
    risk = (math.e**2 - 1) / (1 + p * (math.e**2 - 1)) / 2
    assert large_groups(rules.rs_grpo, p, beta=2.0) == pytest.approx(risk, rel=1e-3)
    k, failing = 3, (1 - p) ** 3
    # of (2/k)·arcsin√F: F'/(k·√(F(1 − F)))
    arcsin = slope_of_pass_at_k(p, k) / (k * math.sqrt(failing * (1 - failing)))
    assert large_groups(rules.pass_at_k_advantages, p, k=k) == pytest.approx(arcsin, rel=2e-2)


def test_pass_at_k_without_its_division_is_short_of_pass_at_k(p=0.3, n=8, k=4):
    """(1/k − 1/G)·∇pass@k, as the paper's derivation does not say."""
    total = 0.0
    for c in range(n + 1):
        group = torch.tensor([[1.0] * c + [0.0] * (n - c)], dtype=torch.float64)
        failing = comb(n - c, k) / comb(n, k)
        sigma = math.sqrt(failing * (1 - failing)) + 1e-6
        score = group / p - (1 - group) / (1 - p)
        update = (rules.pass_at_k_advantages(group, k=k) * sigma * score).mean().item()
        total += comb(n, c) * p**c * (1 - p) ** (n - c) * update
    assert total == pytest.approx((1 / k - 1 / n) * slope_of_pass_at_k(p, k))


def test_less_kl_by_hand():
    rewards, mask = torch.tensor([1.0, 0.0]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    logps = torch.tensor([[-1.0, -2.0, NAN], [-3.0, NAN, NAN]])
    ref = torch.tensor([[-2.0, -2.5, 0.0], [-1.0, 0.0, 0.0]])
    found = less_kl(rewards, logps, ref, mask, beta=0.1)
    assert found.tolist() == pytest.approx([1 - 0.1 * 1.5, 0.1 * 2.0])


@pytest.mark.parametrize("rule", [rules.maxpo, rules.maxrl, rules.grpo, rules.rs_grpo])
def test_these_advantages_sum_to_zero(rule):
    groups = torch.tensor([[1.0] * c + [0.0] * (8 - c) for c in range(9)], dtype=torch.float64)
    assert rule(groups).sum(1).abs().max() < 1e-4


def test_rs_grpo_is_maxrl_with_another_epsilon():
    groups = torch.tensor([[1.0] * c + [0.0] * (8 - c) for c in range(9)], dtype=torch.float64)
    mean, epsilon = groups.mean(1, keepdim=True), 1 / (math.e**2 - 1)
    expected = (groups - mean) / (mean + epsilon) / 2
    assert torch.allclose(rules.rs_grpo(groups, beta=2.0), expected)
    large = rules.rs_grpo(torch.tensor([[1000.0, 0.0]]), beta=2.0)
    assert large.tolist() == [[0.5, -0.5]]  # e^2000 would be inf


def test_a_completion_without_a_reward_is_left_out_of_its_group():
    for rule in (rules.maxrl, rules.nsr, rules.grpo, rules.rs_grpo, rules.pkpo, rules.maxpo):
        settings = {"k": 2} if rule in (rules.pkpo, rules.maxpo) else {}
        found = advantages(rule, [[1, 0, NAN, 0, 0], [NAN] * 5], **settings)
        (small,) = advantages(rule, [[1.0, 0.0, 0.0, 0.0]], **settings)
        assert found == [[*small[:2], 0.0, *small[2:]], [0.0] * 5]
    # Groups that are smaller than k by this teach nothing.
    for rule in (rules.pkpo, rules.maxpo, rules.pass_at_k_advantages):
        assert advantages(rule, [[1, 0, NAN, NAN, NAN]], k=3) == [[0.0] * 5]


def test_pkpo_anneals_k_in_a_straight_line():
    group = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]])
    steps = [rules.pkpo(group, k=8, k_last=1, step=t, max_steps=8)[0, 0].item() for t in range(8)]
    assert steps == [8, 7, 6, 5, 4, 3, 2, 1]  # of one right answer the advantage is k
    assert rules.pkpo(group, k=8, k_last=1, step=99, max_steps=8)[0, 0] == 1
    assert rules.pkpo(group, k=8, k_last=1, step=0, max_steps=1)[0, 0] == 8


@pytest.mark.parametrize(
    ("rule", "settings", "message"),
    [
        (rules.pkpo, {"k": 5}, "k must be a whole number from 1 to 4 for advantages='pkpo'"),
        (rules.pkpo, {"k_last": 0}, "k_last must be a whole number"),
        (rules.maxpo, {"k": 4}, "from 1 to 3 .*in groups of 4, got k=4"),
        (rules.pass_at_k_advantages, {"k": 4}, "from 1 to 3"),
        (rules.pass_at_k_advantages, {"k": 1.5}, "whole number"),
        (rules.w_reinforce, {"weight": -1}, "weight must be >= 0"),
        (rules.rs_grpo, {"beta": 0.0}, "beta must be > 0"),
        (rules.f_grpo, {"gamma": -0.5}, "gamma must be >= 0 for advantages='f-grpo', got -0.5"),
        (rules.ucpo, {"tau": -1, "mean_logps": torch.zeros(1, 4)}, "tau and alpha must be >= 0"),
        (rules.unlikeliness, {"weight": 2, "mean_logps": torch.zeros(1, 4)}, r"in \[0, 1\]"),
    ],
)
def test_settings_that_cannot_be_are_refused(rule, settings, message):
    with pytest.raises(ValueError, match=message):
        rule(torch.tensor([[1.0, 0, 0, 0]]), **settings)


@pytest.mark.parametrize(
    "rule",
    [
        rules.maxrl,
        rules.nsr,
        rules.w_reinforce,
        rules.pkpo,
        rules.maxpo,
        rules.pass_at_k_advantages,
        rules.f_grpo,
        partial(rules.ucpo, mean_logps=torch.zeros(1, 4)),
    ],
)
def test_a_rule_that_counts_refuses_other_rewards_than_0_and_1(rule):
    with pytest.raises(ValueError, match=r"must be 0 or 1, got 0\.5. Use one"):
        rule(torch.tensor([[1.0, 0.5, 0, 0]]))
