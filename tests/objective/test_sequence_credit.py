"""Sequence credit: values by hand, the exact gradient of Eq. 6 on enumerated trees, and inside
Unsloth's trainer.
"""

import itertools
import math

import pytest
import torch
from oracle import credited_advantages, train_and_check

from research.theory.optima import guided_gradient
from research.theory.trees import chain_tree
from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.credit import leave_one_out, sequence_credit
from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.objective.loss import grpo_loss

EXACT = {
    "use_bias_correction_kl": True,
    "gradient_accumulation_steps": 1,
    "loss_type": "dr_grpo",
    "scale_rewards": "none",
    # Small steps: where k3 exceeds 10 Unsloth's versions bound it differently, before or after the
    # ratio.
    "learning_rate": 1e-3,
}


def test_values_by_hand():
    """Policy and reference agree, so only the guide is left: log q of the later tokens, centred,
    less the others'.
    """
    logps = torch.zeros(3, 3)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    log_guide = torch.tensor([[0.0, 0.3, 0.1], [0.2, 0.0, 9.0], [0.0, 0.0, 0.0]])
    found = sequence_credit(logps, logps, mask, torch.zeros(3), beta=0.5, log_guide=log_guide)
    # Mean log q of the other two: (.2 + 0)/5, (.4 + 0)/6, (.4 + .2)/5.
    m = [0.2 / 5, 0.4 / 6, 0.6 / 5]

    def later(i, t, m):
        earned = log_guide[i, t + 1 : int(mask[i].sum())] - m
        return 0.5 * float(earned.sum())

    expected = [
        [
            later(i, t, m[i]) - sum(later(j, t, m[i]) for j in range(3) if j != i) / 2
            for t in range(3)
        ]
        for i in range(3)
    ]
    assert expected[0][0] == pytest.approx(0.5 * ((0.4 - 0.08) - ((0.0 - 0.04) + (0.0 - 0.08)) / 2))
    expected[1][2] = 0.0
    assert torch.allclose(found, torch.tensor(expected), atol=1e-7)


def test_the_kl_of_later_tokens_counts_against_it():
    logps, ref = (
        torch.tensor([[-1.0, -1.0], [-1.0, -1.0]]),
        torch.tensor([[-1.0, -1.5], [-1.0, -1.0]]),
    )
    kl = math.exp(-0.5) + 0.5 - 1
    found = sequence_credit(logps, ref, torch.ones(2, 2), torch.zeros(2), beta=2.0)
    assert torch.allclose(found, torch.tensor([[-2 * kl, 0.0], [2 * kl, 0.0]]), atol=1e-7)


def test_a_constant_guide_earns_nothing_at_any_length():
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(6, 9, generator=generator)
    mask = (torch.arange(9) < torch.tensor([3, 9, 1, 5, 7, 0])[:, None]).long()
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    plain = sequence_credit(logps, logps - 0.2, mask, groups, beta=0.05)
    guided = sequence_credit(
        logps, logps - 0.2, mask, groups, beta=0.05, log_guide=torch.full((6, 9), 0.3)
    )
    assert torch.allclose(plain, guided, atol=1e-6)


def test_the_loops_of_the_oracle_agree():
    generator = torch.Generator().manual_seed(3)
    logps, ref = (-torch.rand(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    log_guide = 0.3 * torch.rand(8, 6, generator=generator, dtype=torch.float64)
    mask = (torch.arange(6) < torch.tensor([6, 1, 0, 4, 5, 2, 6, 3])[:, None]).long()
    groups = torch.tensor([2, 7, 2, 7, 2, 7, 7, 2])
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    for guide in (None, log_guide):
        found = sequence_credit(logps, ref, mask, groups, beta=0.1, log_guide=guide)
        found = (found + leave_one_out(advantages, groups)[:, None]) * mask
        expected = credited_advantages(advantages, logps, ref, mask, guide, groups.tolist(), 0.1)
        assert torch.allclose(found, expected, atol=1e-12)


def test_inf_and_nan_outside_the_mask_do_not_come_through():
    logps = torch.tensor([[-1.0, math.nan], [-1.0, -2.0]])
    ref = torch.tensor([[-1.0, math.inf], [-1.5, -2.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    found = sequence_credit(
        logps,
        ref,
        mask,
        torch.zeros(2),
        beta=1.0,
        log_guide=torch.tensor([[0.1, math.inf], [0.0, 0.2]]),
    )
    assert found.isfinite().all() and found[0, 1] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_does_not_come_in(dtype):
    """Unsloth calls the hook under autocast, where 16 bits could not even count the tokens of a
    prompt's completions.
    """
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(16, 5000, generator=generator)
    log_guide = torch.full_like(logps, 0.3)
    mask = (torch.arange(5000) < torch.randint(4000, 5000, (16, 1), generator=generator)).long()
    settings = dict(beta=0.05, log_guide=log_guide)
    expected = sequence_credit(logps, logps - 0.1, mask, torch.zeros(16), **settings)
    with torch.autocast("cpu", dtype=dtype):
        found = sequence_credit(logps, logps - 0.1, mask, torch.zeros(16), **settings)
    assert torch.equal(found, expected)


def test_leave_one_out_is_the_mean_of_the_others():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0])
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    centred = rewards - rewards.view(2, 3).mean(-1).repeat_interleave(3)
    expected = torch.tensor([1.0, -0.5, -0.5, 0.0, 0.0, 0.0])
    assert torch.allclose(leave_one_out(centred, groups), expected, atol=1e-7)
    two_dims = leave_one_out(centred[:, None].repeat(1, 4), groups)
    assert torch.allclose(two_dims, expected[:, None].repeat(1, 4), atol=1e-7)


def test_a_completion_alone_is_refused():
    with pytest.raises(ValueError, match=r"at least two.*\[0, 0, 1\]"):
        sequence_credit(
            torch.zeros(3, 2),
            torch.zeros(3, 2),
            torch.ones(3, 2),
            torch.tensor([0, 0, 1]),
            beta=1.0,
        )


# --- the exact gradient of Eq. 6 ---

V, T = 2, 2
BETA = 0.4


class Tree:
    """All completions of up to two tokens over two letters, with an explicit logit for each (state,
    letter).

    `ends` names completions that end after their first token.
    """

    def __init__(self, seed, ends=()):
        generator = torch.Generator().manual_seed(seed)
        draw = lambda: torch.randn(1 + V, V, generator=generator, dtype=torch.float64)  # noqa: E731
        self.ref, self.theta, self.log_q = draw().log_softmax(-1), draw(), 0.3 * draw()
        self.completions = [
            (a,) if a in ends else (a, b) for a, b in itertools.product(range(V), repeat=2)
        ]
        self.completions = sorted(set(self.completions))
        self.rewards = torch.rand(
            len(self.completions), generator=generator, dtype=torch.float64
        ).round()
        self.rewards[0] = 1 - self.rewards[-1]
        self.mask = torch.tensor([[1] * len(y) + [0] * (T - len(y)) for y in self.completions])

    def per_token(self, table):
        """The value of each (state, letter) that a completion passes, (completions, T), 0 beyond
        its end.
        """
        rows = []
        for y in self.completions:
            states = [0] if len(y) == 1 else [0, 1 + y[0]]
            row = torch.stack([table[s, a] for s, a in zip(states, y, strict=True)])
            rows.append(torch.nn.functional.pad(row, (0, T - len(y))))
        return torch.stack(rows)

    def objective(self, theta, log_q):
        """Eq. 6: E_π[r − β Σ_t log(π/(q·π_ref))], q held constant."""
        logps = self.per_token(theta.log_softmax(-1))
        ratio = ((logps - self.per_token(self.ref) - log_q) * self.mask).sum(-1)
        return (logps.sum(-1).exp() * (self.rewards - BETA * ratio)).sum()

    def probabilities(self, theta):
        return self.per_token(theta.log_softmax(-1)).sum(-1).exp().detach()

    def expected_update(self, theta, credit, log_q, n=2):
        """Minus the expected gradient of the implemented loss, over every group of n completions of
        the prompt.
        """
        weights, total = self.probabilities(theta), torch.zeros_like(theta)
        for group in itertools.product(range(len(self.completions)), repeat=n):
            rows, theta_ = list(group), theta.detach().requires_grad_()
            logps, ref = (
                self.per_token(theta_.log_softmax(-1))[rows],
                self.per_token(self.ref)[rows],
            )
            mask, log_guide, groups = self.mask[rows], log_q[rows], torch.zeros(n)
            advantages = self.rewards[rows] - self.rewards[rows].mean()
            if credit == "sequence":
                advantages = leave_one_out(advantages, groups)[:, None] + sequence_credit(
                    logps, ref, mask, groups, beta=BETA, log_guide=log_guide
                )
            else:
                advantages = leave_one_out(advantages, groups)
            # dr_grpo divides by n · T; times T it is a sum over tokens.
            loss = T * grpo_loss(
                logps,
                ref,
                mask,
                advantages,
                log_guide=log_guide,
                beta=BETA,
                kl_estimator="k3-is",
                loss_type="dr_grpo",
                max_completion_length=T,
            )
            total -= torch.autograd.grad(loss, theta_)[0] * weights[rows].prod()
        return total

    def centred(self, theta):
        """log q_t − E[m], where m is the mean log q per token of another completion of the
        prompt.
        """
        log_q = self.per_token(self.log_q) * self.mask
        mean = (self.probabilities(theta) * log_q.sum(-1) / self.mask.sum(-1)).sum()
        return (log_q - mean) * self.mask


TREES = {"one-length": (), "two-lengths": (1,)}


@pytest.mark.parametrize("ends", TREES.values(), ids=TREES)
@pytest.mark.parametrize("seed", range(4))
def test_the_expected_update_is_the_exact_gradient_of_eq_6(seed, ends):
    tree = Tree(seed, ends)
    theta = tree.theta.clone().requires_grad_()
    expected = torch.autograd.grad(tree.objective(theta, tree.centred(theta.detach())), theta)[0]
    log_q = tree.per_token(tree.log_q) * tree.mask
    found = tree.expected_update(tree.theta, "sequence", log_q)
    assert torch.allclose(found, expected, atol=1e-12)
    per_token = tree.expected_update(tree.theta, "token", log_q)
    assert not torch.allclose(per_token, expected, atol=1e-3), "the later tokens must matter here"


def test_without_centring_the_gradient_is_that_of_eq_6_as_it_stands():
    """On completions of one length the centring is a constant, which no gradient sees."""
    tree = Tree(0)
    theta, log_q = tree.theta.clone().requires_grad_(), tree.per_token(tree.log_q)
    gradients = [
        torch.autograd.grad(tree.objective(theta, guide), theta)[0]
        for guide in (log_q, tree.centred(theta.detach()))
    ]
    assert torch.allclose(*gradients, atol=1e-12)


def test_three_completions_to_a_prompt_make_no_difference():
    tree = Tree(1)
    theta, log_q = tree.theta.clone().requires_grad_(), tree.per_token(tree.log_q)
    expected = torch.autograd.grad(tree.objective(theta, log_q), theta)[0]
    assert torch.allclose(
        tree.expected_update(tree.theta, "sequence", log_q, n=3), expected, atol=1e-12
    )


@pytest.mark.parametrize("credit", ["sequence", "token"])
def test_ascent_ends_at_eq_4_with_sequence_credit_alone(credit):
    tree = Tree(2)
    log_q = tree.per_token(tree.log_q)
    optimum = (log_q.sum(-1) + tree.per_token(tree.ref).sum(-1) + tree.rewards / BETA).softmax(0)
    theta = tree.theta.clone()
    for _ in range(80):
        theta = theta + 10.0 * tree.expected_update(theta, credit, log_q)
    apart = (tree.probabilities(theta) - optimum).abs().max().item()
    assert apart < 1e-6 if credit == "sequence" else apart > 0.01


@pytest.mark.parametrize("depth", [1, 3])
def test_the_laboratory_agrees(depth):
    """The gradient that `theory` enumerates as a function, on a tree whose completions have
    different lengths.
    """
    (tree, _), beta = chain_tree(depth), 0.3
    generator = torch.Generator().manual_seed(depth)
    draw = lambda: torch.randn(tree.num_edges, generator=generator, dtype=torch.float64)  # noqa: E731
    ref, logits = tree.logps(draw()), draw()
    log_q = tree.table(0.3 * draw()) * tree.mask
    probability = tree.completion_logps(tree.logps(logits)).exp()
    mean = (probability * log_q.sum(1) / tree.mask.sum(1)).sum()
    expected = guided_gradient(tree, logits, ref, beta, (log_q - mean) * tree.mask)
    found, n = torch.zeros_like(expected), 2
    for rows in itertools.product(range(len(tree.completions)), repeat=n):
        rows, logits_ = list(rows), logits.clone().requires_grad_()
        logps, refs = tree.table(tree.logps(logits_))[rows], tree.table(ref)[rows]
        mask, groups = tree.mask[rows], torch.zeros(n)
        advantages = leave_one_out(tree.rewards[rows] - tree.rewards[rows].mean(), groups)
        credit = sequence_credit(logps, refs, mask, groups, beta=beta, log_guide=log_q[rows])
        loss = mask.shape[1] * grpo_loss(
            logps,
            refs,
            mask,
            advantages[:, None] + credit,
            log_guide=log_q[rows],
            beta=beta,
            kl_estimator="k3-is",
            loss_type="dr_grpo",
            max_completion_length=mask.shape[1],
        )
        found -= torch.autograd.grad(loss, logits_)[0] * probability[rows].prod()
    assert expected.abs().max() > 0.01
    assert torch.allclose(found, expected, atol=1e-12)


# --- inside Unsloth's trainer ---

GUIDES = {
    "none": None,
    "branch": BranchGuide(threshold=1.0),
    "branch-reference": BranchGuide(threshold=1.0, source="reference"),
    "token-causal": TokenGuide(norm="causal", source="reference"),
}


@pytest.mark.parametrize("guide", GUIDES.values(), ids=GUIDES)
def test_loss_and_gradients_equal_the_oracle(make_trainer, guide):
    oracle = train_and_check(
        make_trainer(max_completion_length=24, **EXACT), guide, credit="sequence"
    )
    lengths = {
        n for s in oracle.steps for i in s["inputs"] for n in i["completion_mask"].sum(-1).tolist()
    }
    assert len(lengths) > 2, "completions of different lengths are part of this test"


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo", "scale_rewards": "group"},
        {"loss_type": "dapo"},
        {"loss_type": "bnpo", "temperature": 0.7},
        {"unsloth_grpo_mini_batch": 4},
        {"num_iterations": 2},
    ],
    ids=["grpo", "dapo", "bnpo", "mini-batches", "iterations"],
)
def test_every_normalisation_takes_it(make_trainer, settings):
    trainer = make_trainer(max_completion_length=24, **(EXACT | settings))
    train_and_check(trainer, GUIDES["branch-reference"], credit="sequence")


def test_k2_takes_it_too(make_trainer):
    trainer = make_trainer(**(EXACT | {"use_bias_correction_kl": False}))
    train_and_check(trainer, GUIDES["branch-reference"], kl_estimator="k2", credit="sequence")


def test_what_it_adds_is_logged(make_trainer):
    trainer = make_trainer(**EXACT)
    with with_methods(trainer, GUIDES["branch-reference"], kl_estimator="k3-is", credit="sequence"):
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["sage/credit_abs"] > 0 and entry["sage/ref_entropy"] > 0 for entry in logs)
    assert all("sage/entropy" not in entry for entry in logs)


@pytest.mark.parametrize(
    ("settings", "estimator", "message"),
    [
        ({"use_bias_correction_kl": False}, "k3", "kl_estimator must be one of.*'k3'"),
        ({"beta": 0.0}, "k3-is", "beta not 0"),
        (
            {"gradient_accumulation_steps": 2},
            "k3-is",
            "all completions of a prompt in one micro-batch.*got 2",
        ),
        ({"steps_per_generation": 2}, "k3-is", "all completions of a prompt in one micro-batch"),
        (
            {"importance_sampling_level": "sequence"},
            "k3-is",
            "importance_sampling_level must be 'token'",
        ),
        ({"loss_type": "sapo"}, "k3-is", "loss_type one of.*'sapo'"),
    ],
)
def test_what_it_does_not_go_with_is_refused(make_trainer, settings, estimator, message):
    trainer = make_trainer(**(EXACT | settings))
    with (
        pytest.raises(ValueError, match=message),
        with_methods(trainer, None, kl_estimator=estimator, credit="sequence"),
    ):
        pass


def test_an_unknown_credit_is_refused(make_trainer):
    with (
        pytest.raises(ValueError, match=r"credit must be one of.*'tokens'"),
        with_methods(make_trainer(), None, credit="tokens"),
    ):
        pass


def test_a_guide_that_reads_the_future_is_refused(make_trainer):
    for guide in (TokenGuide(), AdaptiveGuide(TokenGuide(norm="rank"), target=0.1)):
        with (
            pytest.raises(ValueError, match=r"reads no later token.*Set norm='causal'"),
            with_methods(make_trainer(**EXACT), guide, kl_estimator="k3-is", credit="sequence"),
        ):
            pass


def test_an_evaluation_of_single_completions_is_refused(make_trainer):
    trainer = make_trainer(**EXACT)
    trainer.eval_dataset, trainer.num_generations_eval = trainer.train_dataset, 1
    with (
        pytest.raises(ValueError, match="num_generations_eval must be >= 2, got 1"),
        with_methods(trainer, None, kl_estimator="k3-is", credit="sequence"),
    ):
        pass
