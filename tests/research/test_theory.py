"""The theory against enumeration written out anew, finite differences, numerical optimisation, the
implemented loss, and hand values.
"""

import csv
import itertools
import math
import subprocess
import sys

import pytest
import torch

from research.theory.figures import Curve, Panel, plot_anchors, plot_border, plot_curves
from research.theory.kl_gradients import (
    divergence_gradients,
    expected_gradient,
    forward_kl_gradient,
    gradient_table,
    k3_mean,
    penalty,
)
from research.theory.optima import (
    ascend,
    entropy_bonus_optimum,
    expected_update,
    forward_kl_optimum,
    guided_gradient,
    guided_optimum,
    objective,
    per_token_optimum,
)
from research.theory.support import (
    SupportCase,
    fit_gaussian,
    from_anchor_to_optimum,
    literal_example,
    mixture_logpdf,
    own_guide_optimum,
    random_tree,
    search_trees,
    support_condition,
    train_by_sampling,
    tree_example,
    wilson_interval,
)
from research.theory.trees import (
    Tree,
    anchor_shift,
    centred_guide,
    chain_tree,
    edge_guide,
    fork_tree,
    guide_table,
)
from sage_unsloth.methods.penalties import KL_ESTIMATORS, PENALTIES
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.kl import k3
from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.objective.schedule import CosineSchedule

REWARDS = {"aaa": 1.0, "aab": 0.0, "ab": 0.3, "ba": 1.0, "bba": 0.0, "bbb": 0.7, "c": 0.0}
LOW_BRANCH = BranchGuide(ratio=0.3, threshold=0.5)
QUIET_TOKEN = TokenGuide(sigma=CosineSchedule(0.0, 0.0))


def toy(seed=0, scale=0.4):
    """A tree with completions of different length, logits of a policy, log π_ref."""
    g = torch.Generator().manual_seed(seed)
    tree = Tree.of(REWARDS)
    logits, ref = scale * torch.randn((2, tree.num_edges), generator=g, dtype=torch.float64)
    return tree, logits, tree.logps(ref)


def branch(tree, logits, ref):
    return guide_table(tree, LOW_BRANCH, tree.logps(logits), ref)


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def finite_differences(function, logits, step=1e-6):
    slopes = []
    for i in range(len(logits)):
        high, low = logits.clone(), logits.clone()
        high[i] += step
        low[i] -= step
        slopes.append((function(high) - function(low)) / (2 * step))
    return vector(*slopes)


def probabilities_by_hand(tree, logits):
    """{completion: [(edge, log π of the token), …]} from a dictionary of states, in plain
    Python.
    """
    states = {}
    for row, completion in enumerate(tree.completions):
        for t in range(len(completion)):
            states.setdefault(completion[:t], set()).add(int(tree.edge_of[row, t]))
    logs = {}
    for edges in states.values():
        total = sum(math.exp(logits[e]) for e in edges)
        logs |= {e: float(logits[e]) - math.log(total) for e in edges}
    return [
        [(int(e), logs[int(e)]) for e in tree.edge_of[row, : len(c)]]
        for row, c in enumerate(tree.completions)
    ]


# Trees


@pytest.mark.smoke
def test_a_tree_by_hand():
    tree = Tree.of({"ab": 1.0, "ac": 0.0, "d": 0.5})
    assert tree.num_edges == 4
    assert tree.prefixes == ((), ("a",))
    assert tree.mask.tolist() == [[1, 1], [1, 1], [1, 0]]
    logps = tree.logps(vector(math.log(3), 0, math.log(4), 0)[tree_order(tree)])
    # Root: a ¾, d ¼. After a: b ⅕, c ⅘.
    table = tree.table(logps).exp() * tree.mask
    torch.testing.assert_close(table, vector(3 / 4, 1 / 5, 3 / 4, 4 / 5, 1 / 4, 0).reshape(3, 2))
    assert tree.completion_logps(logps).exp().tolist() == pytest.approx([0.15, 0.6, 0.25])
    entropy = {"root": math.log(4) - 0.75 * math.log(3), "a": math.log(5) - 0.8 * math.log(4)}
    torch.testing.assert_close(
        tree.table(tree.entropies(logps)),
        vector(
            entropy["root"], entropy["a"], entropy["root"], entropy["a"], entropy["root"], 0
        ).reshape(3, 2),
    )
    torch.testing.assert_close(
        tree.table(tree.visits(logps)), vector(1, 0.75, 1, 0.75, 1, 0).reshape(3, 2)
    )
    assert tree.index("d") == 2


def tree_order(tree):
    """Edges in the order root-a, a-b, a-c, root-d, as positions in (a, b, c, d) = (0, 1, 2, 3)."""
    order = [0] * tree.num_edges
    for row, completion in enumerate(tree.completions):
        for t, token in enumerate(completion):
            order[tree.edge_of[row, t]] = "abcd".index(token)
    return order


def test_a_policy_and_its_completions_are_one_thing():
    tree, logits, _ = toy()
    logps = tree.logps(logits)
    probabilities = tree.completion_logps(logps).exp()
    assert probabilities.sum().item() == pytest.approx(1)
    torch.testing.assert_close(tree.policy(probabilities), logps)
    for row, path in enumerate(probabilities_by_hand(tree, logits)):
        assert probabilities[row].item() == pytest.approx(math.exp(sum(v for _, v in path)))


def test_trees_that_are_none_are_refused():
    for rewards, message in (
        ({}, "at least one token"),
        ({"": 1.0, "a": 0.0}, "at least one token"),
        ({"a": 1.0, "ab": 0.0}, "prefix"),
    ):
        with pytest.raises(ValueError, match=message):
            Tree.of(rewards)
    tree = Tree.of({"a": 1.0, "b": 0.0})
    with pytest.raises(ValueError, match="must have the shape"):
        tree.table(torch.zeros(3))
    with pytest.raises(ValueError, match="> 0"):
        tree.policy(vector(1.0, 0.0))


def test_the_guides_on_a_tree():
    tree, logits, ref = toy()
    logps = tree.logps(logits)
    found = guide_table(tree, LOW_BRANCH, logps, ref).exp()
    by_hand = 1 + 0.3 * (tree.table(tree.entropies(logps)) - 0.5).clamp(min=0) * tree.mask
    torch.testing.assert_close(found, by_hand, rtol=1e-6, atol=1e-7)
    assert found.max() > 1.1
    assert anchor_shift(tree, found.log(), logps, ref) < 1e-7
    assert anchor_shift(tree, guide_table(tree, QUIET_TOKEN, logps, ref), logps, ref) > 0.01


def test_edge_guide_is_the_mean_over_the_completions_through_the_edge():
    tree = Tree.of({"ab": 1.0, "ac": 0.0, "d": 0.5})
    logps = tree.policy(vector(0.15, 0.6, 0.25))
    table = vector(1.2, 1.0, 0.7, 1.1, 0.9, 1.0).reshape(3, 2).log()
    found = tree.table(edge_guide(tree, table, logps))
    mean = 0.2 * 1.2 + 0.8 * 0.7
    torch.testing.assert_close(found, vector(mean, 1.0, mean, 1.1, 0.9, 0).reshape(3, 2))


def test_the_random_guide_is_plain_grpo_on_average():
    """E[q] = 1 for every token, by standard errors; and the k3 gradient is linear in q, so its mean
    is the plain one.
    """
    tree, logits, ref = toy()
    g = torch.Generator().manual_seed(3)
    guide = RandomGuide(epsilon=CosineSchedule(1.0, 0.0))
    draws = torch.stack(
        [guide_table(tree, guide, tree.logps(logits), ref, generator=g) for _ in range(1500)]
    ).exp()
    valid = tree.mask.bool()
    error = draws.std(0)[valid] / math.sqrt(len(draws))
    assert ((draws.mean(0)[valid] - 1) / error).abs().max() < 4.5
    assert draws.std(0)[valid].min() > 0.1

    def gradient(log_guide):
        return expected_gradient(tree, logits, tree.table(ref) + log_guide, "k3")

    few = draws[:20]
    mean = torch.stack([gradient(q.log()) for q in few]).mean(0)
    torch.testing.assert_close(mean, gradient(few.mean(0).log()))
    torch.testing.assert_close(
        gradient(torch.zeros_like(few[0])), forward_kl_gradient(tree, logits, ref)
    )


def test_the_example_trees():
    tree, ref = fork_tree()
    p = dict(zip(tree.completions, tree.completion_logps(ref).exp().tolist(), strict=True))
    assert p["a", "+"] == pytest.approx(0.72) and p["c", "-"] == pytest.approx(0.02)
    assert len(p) == 10 and tree.rewards.sum() == 3
    after_b = tree.table(tree.entropies(ref))[tree.index("b+"), 1]
    assert after_b.item() == pytest.approx(math.log(6))
    tree, ref = chain_tree(3)
    p = dict(
        zip(map("".join, tree.completions), tree.completion_logps(ref).exp().tolist(), strict=True)
    )
    assert sum(p.values()) == pytest.approx(1)
    assert {c: v for c, v in p.items() if c.endswith("+")} == pytest.approx(
        {"+": 0.2, "g+": 0.04, "gg+": 0.008}
    )
    assert {len(c) for c in p} == {1, 2, 3} and len(p) == 4 + 4 + 5


@pytest.mark.smoke
def test_from_anchor_to_optimum_by_hand():
    """Two completions, π_ref (¾, ¼), q (1, 2), r (0, 1), β = 1/log 3: e^(r/β) is 3."""
    tree = Tree.of({"a": 0.0, "b": 1.0})
    q = vector(1, 2).log().unsqueeze(1)
    a, b = from_anchor_to_optimum(tree, vector(0.75, 0.25).log(), 1 / math.log(3), q)
    assert (a["completion"], a["right"], b["completion"], b["right"]) == ("a", False, "b", True)
    assert b["q"] == pytest.approx(2)
    assert [a["reference"], b["reference"]] == pytest.approx([0.75, 0.25])
    assert [a["anchor"], b["anchor"]] == pytest.approx([0.6, 0.4])
    assert [a["plain"], b["plain"]] == pytest.approx([0.5, 0.5])
    assert [a["guided"], b["guided"]] == pytest.approx([1 / 3, 2 / 3])


# Optima


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", ["eq2", "eq4", "eq21", "eq27"])
def test_optima_against_numerical_optimisation(name, seed):
    g = torch.Generator().manual_seed(seed)
    ref = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    rewards = torch.rand(6, generator=g, dtype=torch.float64)
    log_q = 0.4 * torch.randn(6, generator=g, dtype=torch.float64)
    beta, alpha = 0.3, 0.2
    expected = {
        "eq2": guided_optimum(ref, rewards, beta),
        "eq4": guided_optimum(ref, rewards, beta, log_q),
        "eq21": entropy_bonus_optimum(ref, rewards, beta, alpha),
        "eq27": forward_kl_optimum(ref, rewards, beta),
    }[name]
    logits = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [logits],
        max_iter=500,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def loss():
        optimiser.zero_grad()
        p = logits.softmax(0)
        value = (p * rewards).sum()
        if name == "eq27":
            value = value - beta * (ref.exp() * (ref - p.log())).sum()
        else:
            anchor = ref + log_q if name == "eq4" else ref
            value = value - beta * (p * (p.log() - anchor)).sum()
        if name == "eq21":
            value = value - alpha * (p * p.log()).sum()
        (-value).backward()
        return -value

    optimiser.step(loss)
    torch.testing.assert_close(logits.detach().softmax(0), expected, atol=1e-7, rtol=1e-6)
    terms = {"eq4": {"log_guide": log_q}, "eq21": {"alpha": alpha}, "eq27": {"kl": "forward"}}
    named = objective(expected.log(), ref, rewards, beta, **terms.get(name, {}))
    assert named.item() == pytest.approx(-loss().item(), abs=1e-12)


def test_forward_kl_optimum_by_hand():
    """Two completions of ½: π = β½/(λ − r) with λ² − λ(1 + β) + β/2 = 0."""
    beta = 0.25
    lam = ((1 + beta) + math.sqrt((1 + beta) ** 2 - 2 * beta)) / 2
    found = forward_kl_optimum(vector(0.5, 0.5).log(), vector(1.0, 0.0), beta)
    assert found.tolist() == pytest.approx([beta / 2 / (lam - 1), beta / 2 / lam])
    # A factor on the reference is one on β.
    ref = vector(0.2, 0.5, 0.3).log()
    torch.testing.assert_close(
        forward_kl_optimum(ref + math.log(1.3), vector(1, 0, 0.5), beta),
        forward_kl_optimum(ref, vector(1, 0, 0.5), 1.3 * beta),
    )
    torch.testing.assert_close(forward_kl_optimum(ref, vector(1, 1, 1), beta), ref.exp())


def test_what_cannot_be_computed_is_refused():
    tree, logits, ref = toy()
    whole = tree.completion_logps(ref)
    for function in (guided_optimum, forward_kl_optimum):
        with pytest.raises(ValueError, match=r"beta must be > 0.*got 0"):
            function(whole, tree.rewards, 0.0)
    with pytest.raises(ValueError, match="alpha must be >= 0"):
        entropy_bonus_optimum(whole, tree.rewards, 0.1, -1.0)
    with pytest.raises(ValueError, match="no guide"):
        objective(whole, whole, tree.rewards, 0.1, log_guide=whole, kl="forward")
    with pytest.raises(ValueError, match="kl must be one of"):
        objective(whole, whole, tree.rewards, 0.1, kl="sideways")
    with pytest.raises(ValueError, match="kl_estimator must be one of"):
        penalty("k4", whole, whole)
    with pytest.raises(ValueError, match="credit must be one of"):
        expected_update(tree, logits, ref, 0.1, credit="earlier")
    with pytest.raises(ValueError, match="loss_type must be one of"):
        expected_update(tree, logits, ref, 0.1, loss_type="mean")
    with pytest.raises(ValueError, match="rewards that differ"):
        expected_update(
            Tree.of({"a": 1.0, "b": 1.0}),
            torch.zeros(2).double(),
            vector(0.5, 0.5).log(),
            0.1,
            scale_rewards=True,
        )
    with pytest.raises(ValueError, match="converge within 3 steps"):
        ascend(tree, ref, lambda x: expected_update(tree, x, ref, 0.1), steps=3)
    with pytest.raises(ValueError, match="num_generations must be >= 2"):
        train_by_sampling(whole, tree.rewards, None, index=0, num_generations=1)
    with pytest.raises(ValueError, match="delta must lie in"):
        SupportCase(whole, tree.rewards, whole, 0.1, 0, 1.0)
    with pytest.raises(ValueError, match="weights must sum to 1"):
        mixture_logpdf(torch.zeros(3), [0.0, 1.0], [1.0, 1.0], [0.5, 0.6])
    with pytest.raises(ValueError, match="successes must lie"):
        wilson_interval(3, 2)


# Gradients


@pytest.mark.parametrize("loss_type", ["dr_grpo", "grpo"])
@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_the_expected_update_is_that_of_the_implemented_loss(kl_estimator, loss_type):
    """grpo_loss on one completion at a time, weighed by its probability: rewards, guide, penalty,
    different lengths.
    """
    tree, logits, ref = toy(1)
    log_guide = branch(tree, logits, ref)
    leaf = logits.clone().requires_grad_()
    logps = tree.table(tree.logps(leaf))
    total = 0.0
    for row in range(len(tree.completions)):
        one = slice(row, row + 1)
        loss = grpo_loss(
            logps[one],
            tree.table(ref)[one],
            tree.mask[one],
            tree.rewards[one],
            log_guide=log_guide[one],
            beta=0.2,
            loss_type=loss_type,
            max_completion_length=1,
            kl_estimator=PENALTIES.get(kl_estimator, kl_estimator),
        )
        total = total - logps[row].sum().exp().detach() * loss
    expected = torch.autograd.grad(total, leaf)[0]
    found = expected_update(
        tree, logits, ref, 0.2, kl_estimator, log_guide=log_guide, loss_type=loss_type
    )
    torch.testing.assert_close(found, expected)


def test_divergence_gradients_against_finite_differences():
    tree, logits, ref = toy(2)
    anchor = probabilities_by_hand(tree, ref)
    log_f = [sum(v for _, v in path) for path in anchor]

    def reverse(x):
        log_p = [sum(v for _, v in path) for path in probabilities_by_hand(tree, x)]
        return sum(math.exp(p) * (p - f) for p, f in zip(log_p, log_f, strict=True))

    def forward(x):
        log_p = [sum(v for _, v in path) for path in probabilities_by_hand(tree, x)]
        return sum(math.exp(f) * (f - p) for p, f in zip(log_p, log_f, strict=True))

    found = divergence_gradients(tree, logits, ref)
    close = dict(atol=1e-8, rtol=1e-6)
    torch.testing.assert_close(
        found["reverse, of completions"], finite_differences(reverse, logits), **close
    )
    torch.testing.assert_close(
        found["forward, of completions"], finite_differences(forward, logits), **close
    )

    # Per state: each state's own KL, at the visits of the unchanged policy.
    held = tree.visits(tree.logps(logits))
    for kl in ("reverse", "forward"):

        def of_states(x, kl=kl):
            logps = tree.logps(x)
            p, f = (logps.exp(), logps - ref) if kl == "reverse" else (ref.exp(), ref - logps)
            return float((held * p * f).sum())

        torch.testing.assert_close(
            found[f"{kl}, per state"], finite_differences(of_states, logits), **close
        )
    torch.testing.assert_close(found["forward, per state"], forward_kl_gradient(tree, logits, ref))


WHICH = {
    # unit, estimator: (as a loss, in the reward)
    ("token", "k1"): ("zero", "reverse, of completions"),
    ("token", "k3"): ("forward, per state", "reverse, of completions − forward, per state"),
    ("token", "k3-is"): ("reverse, per state", "reverse, of completions − forward, per state"),
    ("token", "k2"): ("reverse, per state", "neither"),
    ("token", "forward-kl"): ("forward, per state", "neither"),
    ("token", "forward-kl-naive"): ("neither", "neither"),
    ("completion", "k1"): ("zero", "reverse, of completions"),
    ("completion", "k3"): ("forward, of completions", "reverse − forward, of completions"),
    ("completion", "k3-is"): ("reverse, of completions", "reverse − forward, of completions"),
    ("completion", "k2"): ("reverse, of completions", "neither"),
    ("completion", "forward-kl"): ("forward, of completions", "neither"),
    ("completion", "forward-kl-naive"): ("neither", "neither"),
}


@pytest.mark.parametrize("seed", range(2))
def test_which_gradient_is_which(seed):
    rows = gradient_table(*toy(seed))
    found = {(r["unit"], r["estimator"], r["place"]): r["gradient"] for r in rows}
    expected = {
        (*key, place): name
        for key, names in WHICH.items()
        for place, name in zip(("loss", "reward"), names, strict=True)
    }
    assert found == expected
    # "neither" is far from both.
    for row in rows:
        if row["gradient"] == "neither":
            assert min(row["off forward"], row["off reverse"]) > 0.05, row


def test_estimators_as_losses_against_finite_differences():
    """k3 and forward-kl-naive on one state, the samples' distribution held, written out."""
    tree = Tree.of({"a": 1.0, "b": 0.0, "c": 0.5})
    logits, ref = vector(0.3, -0.2, 0.1), vector(0.5, 0.2, 0.3).log()
    held = tree.logps(logits).exp()
    for name, value in {
        "k3": lambda d: math.expm1(d) - d,
        "forward-kl-naive": lambda d: math.exp(d) * d - math.expm1(d),
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
    }.items():

        def loss(x, value=value):
            d = (ref - tree.logps(x)).tolist()
            return sum(float(p) * value(v) for p, v in zip(held, d, strict=True))

        found = expected_gradient(tree, logits, tree.table(ref), name)
        torch.testing.assert_close(found, finite_differences(loss, logits), atol=1e-8, rtol=1e-6)


def test_k3_in_the_reward_vanishes_to_first_order():
    """Halving the distance between π and π_ref quarters it, where a KL's gradient is halved."""
    tree, _, ref = toy(3)
    direction = toy(4)[1]
    norms = {}
    for size in (0.02, 0.01):
        at = ref + size * direction
        table = tree.table(ref)
        norms[size] = [
            float(expected_gradient(tree, at, table, name, in_reward=True).norm())
            for name in ("k3", "k1")
        ]
    assert norms[0.02][0] / norms[0.01][0] == pytest.approx(4, rel=0.05)
    assert norms[0.02][1] / norms[0.01][1] == pytest.approx(2, rel=0.05)


def test_branch_multiplies_the_pull_of_each_state():
    tree, logits, ref = toy(5)
    log_guide = branch(tree, logits, ref)
    found = expected_gradient(tree, logits, tree.table(ref) + log_guide, "k3")
    q = 1 + 0.3 * (tree.entropies(tree.logps(logits)) - 0.5).clamp(min=0)
    torch.testing.assert_close(
        found, forward_kl_gradient(tree, logits, ref, q), atol=1e-9, rtol=1e-6
    )
    plain = forward_kl_gradient(tree, logits, ref)
    assert (found - plain).norm() > 0.05 * plain.norm()


def test_the_mean_of_k3_is_the_generalised_kl():
    tree, logits, ref = toy(6)
    logps = tree.logps(logits)
    log_guide = edge_guide(tree, branch(tree, logits, ref), logps).log()
    found = k3_mean(tree, logps, ref, log_guide)
    assert found["k3"] == pytest.approx(found["pseudo_kl"] + found["excess"], abs=1e-12)
    # D̃ and the excess again, by loops.
    pseudo = sum(
        math.exp(sum(v for _, v in path)) * sum(v - float(ref[e] + log_guide[e]) for e, v in path)
        for path in probabilities_by_hand(tree, logits)
    )
    assert found["pseudo_kl"] == pytest.approx(pseudo)
    assert abs(found["excess"]) > 0.1
    plain = k3_mean(tree, logps, ref, torch.zeros_like(ref))
    assert plain["excess"] == pytest.approx(0, abs=1e-12)
    assert plain["k3"] == pytest.approx(plain["pseudo_kl"])


# Sequence credit


def test_the_gradient_of_eq_6_against_finite_differences():
    tree, logits, ref = toy(7)
    log_guide, beta = branch(tree, logits, ref), 0.3

    def j(x):
        value = 0.0
        for row, path in enumerate(probabilities_by_hand(tree, x)):
            gain = float(tree.rewards[row])
            for t, (edge, log_pi) in enumerate(path):
                gain -= beta * (log_pi - float(ref[edge]) - float(log_guide[row, t]))
            value += math.exp(sum(v for _, v in path)) * gain
        return value

    torch.testing.assert_close(
        guided_gradient(tree, logits, ref, beta, log_guide),
        finite_differences(j, logits),
        atol=1e-8,
        rtol=1e-6,
    )


@pytest.mark.parametrize("kl_estimator", ["k3-is", "k2"])
@pytest.mark.parametrize("seed", range(3))
def test_later_credit_makes_it_the_gradient_of_eq_6(seed, kl_estimator):
    tree, logits, ref = toy(seed)
    log_guide = branch(tree, logits, ref)
    exact = guided_gradient(tree, logits, ref, 0.3, log_guide)
    found = {
        credit: expected_update(
            tree, logits, ref, 0.3, kl_estimator, log_guide=log_guide, credit=credit
        )
        for credit in ("none", "guide", "later", "completion")
    }
    # The later tokens' guide by loops: β Σ_c π(c) Σ_t Σ_{t'>t} log q_t' ∇log π_t.
    leaf = logits.clone().requires_grad_()
    table = tree.table(tree.logps(leaf))
    bonus = sum(
        table.detach()[c].sum().exp() * log_guide[c, later] * table[c, t]
        for c in range(len(tree.completions))
        for t in range(table.shape[1])
        for later in range(t + 1, table.shape[1])
    )
    by_loops = 0.3 * torch.autograd.grad(bonus, leaf)[0]
    torch.testing.assert_close(found["guide"] - found["none"], by_loops)
    torch.testing.assert_close(found["later"], exact)
    torch.testing.assert_close(found["completion"], exact)
    assert (found["none"] - exact).norm() > 0.01 * exact.norm()


def test_the_mean_over_a_completions_tokens_leads_elsewhere_where_lengths_differ():
    tree, logits, ref = toy(0)
    log_guide = branch(tree, logits, ref)
    eq4 = guided_optimum(tree.completion_logps(ref), tree.rewards, 0.3, log_guide.sum(1))

    def distance(loss_type):
        path = ascend(
            tree,
            ref,
            lambda z: expected_update(
                tree, z, ref, 0.3, "k3-is", log_guide=log_guide, credit="later", loss_type=loss_type
            ),
            rate=1.0,
            tolerance=1e-7,
        )
        return float((tree.completion_logps(path[-1]).exp() - eq4).abs().sum() / 2)

    assert distance("dr_grpo") < 1e-6
    assert distance("grpo") > 0.1
    equal = Tree.of({"ab": 1.0, "ac": 0.0, "da": 0.5, "db": 0.0})
    logits, ref = logits[: equal.num_edges], equal.logps(ref[: equal.num_edges])
    exact = guided_gradient(equal, logits, ref, 0.3)
    mean = expected_update(equal, logits, ref, 0.3, "k3-is", credit="later", loss_type="grpo")
    torch.testing.assert_close(2 * mean, exact)


def test_a_guide_that_reads_later_tokens_needs_the_whole_completions_credit():
    tree, logits, ref = toy(0)
    log_guide = guide_table(tree, QUIET_TOKEN, tree.logps(logits), ref)
    exact = guided_gradient(tree, logits, ref, 0.3, log_guide)
    error = {
        credit: float(
            (
                expected_update(tree, logits, ref, 0.3, "k3-is", log_guide=log_guide, credit=credit)
                - exact
            ).norm()
            / exact.norm()
        )
        for credit in ("later", "completion")
    }
    assert error["completion"] < 1e-12 and error["later"] > 1e-3


def test_k3_is_a_stand_in_of_the_same_mean_and_less_variance_near_the_reference():
    tree, logits, ref = toy(0, scale=0.3)
    table = tree.table(tree.logps(logits))
    p = table.sum(1).exp()
    k1 = ((table - tree.table(ref)) * tree.mask).sum(1)
    stand_in = (k3(table, tree.table(ref)) * tree.mask).sum(1)
    means = [(p * v).sum() for v in (k1, stand_in)]
    torch.testing.assert_close(*means)
    variance = [float((p * (v - m) ** 2).sum()) for v, m in zip((k1, stand_in), means, strict=True)]
    assert variance[1] < 0.2 * variance[0]


def test_ascent_with_credit_ends_at_eq_4_and_without_at_the_closed_forms():
    case, tree, ref = tree_example()
    beta, star = case.beta, case.index
    log_guide = guide_table(tree, BranchGuide(0.3, 1.2), ref, ref)
    q = edge_guide(tree, log_guide, ref).log()
    eq4 = guided_optimum(case.ref_logps, case.rewards, beta, case.log_guide)

    def rest(kl_estimator, **settings):
        def update(logits):
            return expected_update(
                tree, logits, ref, beta, kl_estimator, log_guide=log_guide, **settings
            )

        path = ascend(tree, ref, update, rate=1.0, tolerance=1e-8)
        return tree.completion_logps(path[-1]).exp()

    found = rest("k3-is", credit="later")
    torch.testing.assert_close(found, eq4, atol=1e-8, rtol=1e-6)
    assert found[star].item() == pytest.approx(0.0085017, abs=5e-8)
    # The guide's credit alone does not do: what y_t costs in later KL must be there too.
    assert (rest("k3-is", credit="guide") - eq4).abs().sum() / 2 > 0.05
    without = {kl_estimator: rest(kl_estimator) for kl_estimator in ("k3", "k3-is")}
    for kl_estimator, kl in (("k3", "forward"), ("k3-is", "reverse")):
        closed = tree.completion_logps(per_token_optimum(tree, ref, beta, log_guide=q, kl=kl)).exp()
        torch.testing.assert_close(without[kl_estimator], closed, atol=1e-8, rtol=1e-5)
        assert (without[kl_estimator] - eq4).abs().sum() / 2 > 0.01
    # Branch cancels in k3-is without credit, and in k3 it takes from y* what Eq. 4 would give it.
    plain = {
        kl: tree.completion_logps(per_token_optimum(tree, ref, beta, kl=kl)).exp()[star]
        for kl in ("forward", "reverse")
    }
    assert without["k3-is"][star].item() == pytest.approx(plain["reverse"].item(), rel=1e-6)
    assert without["k3"][star].item() < 0.9 * plain["forward"].item()


def test_per_token_optimum_has_no_gradient_left_where_lengths_differ():
    tree, logits, ref = toy(8)
    log_guide = branch(tree, logits, ref)
    q = edge_guide(tree, log_guide, tree.logps(logits)).log()
    for kl_estimator, kl in (("k3", "forward"), ("forward-kl", "forward"), ("k3-is", "reverse")):
        at = per_token_optimum(tree, ref, 0.5, log_guide=q, kl=kl)
        left = expected_update(tree, at, ref, 0.5, kl_estimator, log_guide=log_guide)
        assert left.norm() < 1e-8, kl_estimator
        start = expected_update(tree, ref, ref, 0.5, kl_estimator, log_guide=log_guide)
        assert start.norm() > 1e-2


def test_centring_removes_length_and_leaves_equal_lengths_alone():
    # A guide that says the same of every token says nothing once it is centred.
    tree, logits, ref = toy(9)
    constant = math.log(1.2) * tree.mask
    assert centred_guide(tree, constant, tree.logps(logits)).abs().max() < 1e-12
    whole = tree.completion_logps(ref)
    plain, paid = (guided_optimum(whole, tree.rewards, 0.5, q) for q in (None, constant.sum(1)))
    tokens = tree.mask.sum(1)
    assert (paid * tokens).sum() > 1.005 * (plain * tokens).sum()

    equal = Tree.of({"".join(c): float(c[0] == "a") for c in itertools.product("ab", repeat=3)})
    g = torch.Generator().manual_seed(1)
    ref = equal.logps(torch.randn(equal.num_edges, generator=g, dtype=torch.float64))
    log_guide = 0.3 * torch.randn((8, 3), generator=g, dtype=torch.float64)
    centred = centred_guide(equal, log_guide, ref)
    p = equal.completion_logps(ref).exp()
    assert (p.unsqueeze(1) * centred).sum().item() == pytest.approx(0, abs=1e-12)
    whole = equal.completion_logps(ref)
    torch.testing.assert_close(
        guided_optimum(whole, equal.rewards, 0.5, centred.sum(1)),
        guided_optimum(whole, equal.rewards, 0.5, log_guide.sum(1)),
    )


def test_scaled_rewards_are_eq_6_at_beta_times_their_deviation():
    tree, logits, ref = toy(10)
    log_guide = branch(tree, logits, ref)
    p = tree.completion_logps(tree.logps(logits)).exp()
    mean = (p * tree.rewards).sum()
    deviation = float((p * (tree.rewards - mean) ** 2).sum().sqrt())
    found = expected_update(
        tree, logits, ref, 0.3, "k3-is", log_guide=log_guide, credit="later", scale_rewards=True
    )
    exact = guided_gradient(tree, logits, ref, 0.3 * deviation, log_guide) / deviation
    torch.testing.assert_close(found, exact)


# Theorem 4.3


def test_the_two_worked_examples():
    found = support_condition(literal_example())
    assert f"{found['mean_guide']:.6f}" == "1.012766"
    assert f"{found['lift']:.6f}" == "1.283613"
    assert f"{found['needed']:.3f}" == "1.175"
    assert f"{found['guided']:.6f}" == "0.054622"
    assert found["holds"]
    case, tree, _ = tree_example()
    assert case.ref_logps.exp()[[0, case.index]].tolist() == pytest.approx([0.9212, 0.00625])
    found = support_condition(case)
    assert f"{found['guide']:.6f}" == "1.263832"
    assert f"{found['mean_guide']:.7f}" == "1.0017779"
    assert f"{found['guided']:.7f}" == "0.0085017"
    assert found["holds"] and found["plain"] < case.delta
    assert tree.rewards.sum() == 2


def test_theorem_4_3_is_an_equivalence_on_random_trees():
    rows = search_trees(200, seed=4, delta=0.02)
    kinds = {(row["inside_before"], row["inside_after"]) for row in rows}
    assert {(False, False), (True, True), (False, True)} <= kinds
    for row in rows:
        assert row["inside_before"] == (row["plain"] >= 0.02)
        assert row["inside_after"] == (row["guided"] >= 0.02)
        assert row["holds"] == row["inside_after"]
        assert row["guided"] == pytest.approx(row["plain"] * row["lift"], rel=1e-9)
    assert min(row["lift"] for row in rows) < 1 < max(row["lift"] for row in rows)


def test_random_trees_are_trees():
    g = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(20):
        tree, logps = random_tree(g, depth=3, branching=4)
        assert tree.mask.shape[1] <= 3
        assert tree.completion_logps(logps).exp().sum().item() == pytest.approx(1)
        sizes.add(len(tree.completions))
    assert len(sizes) > 5


def test_a_guide_of_the_policys_own_solves_eq_4_with_itself():
    case, tree, ref = tree_example()
    optimum, table = own_guide_optimum(tree, ref, case.beta, BranchGuide())
    assert table.abs().max() == 0, "the policy is sure among the eight tokens"
    torch.testing.assert_close(optimum, guided_optimum(case.ref_logps, case.rewards, case.beta))
    # With a weak reward the uncertainty, and so the guide, stays.
    optimum, table = own_guide_optimum(tree, ref, 5.0, BranchGuide())
    again = guide_table(tree, BranchGuide(), tree.policy(optimum), ref)
    torch.testing.assert_close(again, table, atol=1e-5, rtol=0)
    assert table.max() > 0.2


# Modes and sampling


def test_gaussian_fits_against_moments_and_brute_force():
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    target = mixture_logpdf(x, [-2.5, 2.5], [0.8, 0.8], [0.7, 0.3])
    width = x[1] - x[0]
    assert (target.exp().sum() * width).item() == pytest.approx(1)
    # By hand: mean −2.5 · 0.7 + 2.5 · 0.3 = −1, variance 0.8² + 2.5² − 1.
    covering = fit_gaussian(x, target, "k3", (0.0, 2.0))
    assert covering == pytest.approx((-1.0, math.sqrt(0.64 + 6.25 - 1)), abs=1e-6)

    mean, deviation = fit_gaussian(x, target, "k3-is", (-1.0, 2.0))

    def reverse_kl(m, s):
        log_p = -0.5 * ((x - m) / s) ** 2 - math.log(s) - 0.5 * math.log(2 * math.pi)
        return float((log_p.exp() * (log_p - target)).sum() * width)

    best = reverse_kl(mean, deviation)
    for dm, ds in ((0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)):
        assert reverse_kl(mean + dm, deviation + ds) > best
    # The best of the whole plane, not only of its neighbourhood.
    assert best < min(reverse_kl(m / 4, s / 4) for m in range(-16, 17) for s in range(2, 16)) + 1e-9


def test_one_step_of_the_simulation_is_the_implemented_loss():
    ref, rewards, log_guide = vector(0.5, 0.1, 0.4).log(), vector(1, 1, 0), vector(0, 0.3, 0)
    run = train_by_sampling(
        ref,
        rewards,
        log_guide,
        index=1,
        num_generations=6,
        steps=1,
        runs=1,
        beta=0.2,
        learning_rate=0.7,
        seed=2,
    )
    uniform = torch.rand((1, 6), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    drawn = [0 if u < 0.5 else 1 if u < 0.6 else 2 for u in uniform[0].tolist()]
    assert len(set(drawn)) > 1
    logits = ref.clone().requires_grad_()
    taken = logits.log_softmax(0)[drawn].unsqueeze(1)
    reward = rewards[drawn]
    loss = grpo_loss(
        taken,
        ref[drawn].unsqueeze(1),
        torch.ones(6, 1),
        (reward - reward.mean()) / (reward.std() + 1e-4),
        log_guide=log_guide[drawn].unsqueeze(1),
        beta=0.2,
    )
    loss.backward()
    torch.testing.assert_close(run.final[0], (ref - 0.7 * logits.grad).softmax(0))
    assert run.first_draw.tolist() == [0 if 1 in drawn else 1]
    assert run.seen.tolist() == [1 in drawn]
    often = train_by_sampling(
        vector(0.1, 0.9).log(), vector(1, 0), None, index=1, num_generations=4, steps=5, runs=3
    )
    assert often.first_draw.tolist() == [0, 0, 0], "the first of many draws"


def test_what_is_never_drawn_leaves_no_trace_of_its_reward_or_guide():
    ref = vector(0.3, 0.01, 0.69).log()
    one, other = (
        train_by_sampling(
            ref, vector(1, r, 0), q, index=1, num_generations=4, steps=30, runs=60, seed=1
        )
        for r, q in ((1, vector(0, 0.3, 0)), (0, None))
    )
    assert torch.equal(one.seen, other.seen)
    assert 5 < int(one.seen.sum()) < 55
    assert torch.equal(one.final[~one.seen], other.final[~one.seen])
    assert not torch.equal(one.final[one.seen], other.final[one.seen])
    assert (one.first_draw[one.seen] < 30).all() and (one.first_draw[~one.seen] == 30).all()


def test_wilson_interval_by_hand():
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)


# Figures


def test_curve_labels_do_not_overlap_and_the_table_is_the_figure(tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(
        Figure,
        "savefig",
        lambda self, *a, _save=Figure.savefig, **k: (figures.append(self), _save(self, *a, **k))[1],
    )
    curves = {
        f"a label of some length {i}": Curve([1, 10, 100], [0.5, 0.5, v], [0.4] * 3, [0.6] * 3)
        for i, v in enumerate((0.99, 0.98, 0.97, 0.0, 0.01))
    }
    panel = Panel(title="t", xlabel="x", ylabel="y", curves=curves, log="x")
    path = plot_curves([panel, panel], tmp_path / "curves.png", "note")
    with path.with_suffix(".csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 5 * 3 and rows[2]["y"] == "0.99" and rows[2]["high"] == "0.6"
    (figure,) = figures
    renderer = FigureCanvasAgg(figure).get_renderer()
    for axis in figure.axes:
        boxes = [text.get_window_extent(renderer) for text in axis.texts]
        assert len(boxes) == 5
        for a, b in itertools.combinations(boxes, 2):
            assert not a.overlaps(b)
        assert all(0 <= text.xy[1] <= 1 for text in axis.texts), "beside the curves' own axes"
        for box in boxes:
            assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_the_other_figures_write_their_tables(tmp_path):
    row = dict(
        completion="ab", right=True, q=1.2, reference=0.1, anchor=0.12, plain=0.3, guided=0.35
    )
    path = plot_anchors({"Branch": [row], "Token": [row]}, tmp_path / "anchors.png", "note")
    assert path.exists() and path.with_suffix(".csv").read_text().count("ab") == 2
    rows = search_trees(5)
    path = plot_border(rows, 0.01, tmp_path / "border.png", "note")
    assert path.exists() and len(path.with_suffix(".csv").read_text().splitlines()) == len(rows) + 1
    with pytest.raises(ValueError, match="one length"):
        Curve([1, 2], [1.0])


def test_theory_needs_neither_unsloth_nor_trl():
    code = (
        "import sys, research.theory.optima, research.theory.support, "
        "research.theory.figures;"
        "print(sorted({'unsloth', 'trl', 'transformers', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
