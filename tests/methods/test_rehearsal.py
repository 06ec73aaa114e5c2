"""The divergences of a rehearsal, by enumeration and by autograd, and its rule by name."""

import math

import pytest
import torch

from sage_unsloth.methods.rehearsal import (
    DIVERGENCES,
    MAX_LOG_RATIO,
    RehearsalRule,
    rehearsal_loss,
    rehearsal_rule,
)

POLICY = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
REFERENCE = torch.tensor([0.4, 0.15, 0.4, 0.05], dtype=torch.float64)


def kl(first, second):
    return (first * (first / second).log()).sum()


def test_the_expected_values_are_the_divergences_by_enumeration():
    """Over all tokens, weighted by π_ref, as it would draw them."""
    log_ratio = (POLICY / REFERENCE).log()
    expected = {name: (REFERENCE * f(log_ratio)).sum() for name, f in DIVERGENCES.items()}
    middle = (POLICY + REFERENCE) / 2
    assert expected["forward-kl"].item() == pytest.approx(kl(REFERENCE, POLICY).item())
    halves = kl(POLICY, middle) + kl(REFERENCE, middle)
    assert expected["js"].item() == pytest.approx(halves.item())


def test_the_expected_gradient_of_the_forward_kl_is_that_of_cross_entropy():
    """Whatever the variance that u − 1 takes away: −Σ π_ref ∇ log π."""
    scores = POLICY.log().clone().requires_grad_()
    logps = scores.log_softmax(0)
    value = (REFERENCE * DIVERGENCES["forward-kl"](logps - REFERENCE.log())).sum()
    (found,) = torch.autograd.grad(value, scores, retain_graph=True)
    (expected,) = torch.autograd.grad(-(REFERENCE * logps).sum(), scores)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("forward-kl", lambda u: u - 1),
        ("js", lambda u: u * math.log(2 * u / (u + 1))),
    ],
)
def test_a_tokens_gradient_is_the_one_of_the_docstring_and_0_at_the_reference(name, slope):
    logps = torch.tensor([-3.0, -1.0, -0.5, -0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.2, -1.0, -2.0, -0.15], dtype=torch.float64)
    values = DIVERGENCES[name](logps - reference)
    assert (values.detach() >= 0).all() and values[1].item() == pytest.approx(0, abs=1e-12)
    (found,) = torch.autograd.grad(values.sum(), logps)
    ratios = (logps - reference).exp().tolist()
    assert found.tolist() == pytest.approx([slope(u) for u in ratios], abs=1e-12)


def test_sft_has_the_gradient_of_the_cross_entropy_also_at_the_reference():
    logps = torch.tensor([[-3.0, -0.2]], dtype=torch.float64, requires_grad=True)
    reference, mask = torch.tensor([[-1.0, -0.2]]), torch.ones(1, 2)
    loss = rehearsal_loss(logps, reference, mask, "sft")
    loss.backward()
    assert loss.item() == pytest.approx(1.0) and logps.grad.tolist() == [[-0.5, -0.5]]


def test_the_loss_is_the_mean_of_completions_means_and_ignores_what_is_outside():
    logps = torch.tensor([[-1.0, -2.0, 5.0], [-0.5, -0.5, -0.5]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, torch.nan], [-1.0, -0.5, -0.4]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    loss = rehearsal_loss(logps, reference, mask, "forward-kl")
    value = [math.expm1(d) - d for d in (0.5, -1.0, 0.5, 0.0, -0.1)]
    assert loss.item() == pytest.approx((sum(value[:2]) / 2 + sum(value[2:]) / 3) / 2)
    loss.backward()
    assert logps.grad[0, 2] == 0 and logps.grad.isfinite().all()


def test_the_ratio_is_bounded_and_not_the_value():
    """Other than in the paper's code, whose value is at most 10: u about 12.9."""
    logps = torch.tensor([[3.0, 9.9]], dtype=torch.float64, requires_grad=True)
    zeros, ones = torch.zeros_like(logps), torch.ones_like(logps)
    rehearsal_loss(logps, zeros.detach(), ones.detach(), "forward-kl").backward()
    assert (2 * logps.grad[0]).tolist() == pytest.approx([math.expm1(3.0), math.expm1(9.9)])


def test_a_token_far_above_the_reference_is_bounded_and_has_no_gradient():
    logps = torch.tensor([[-0.1, -0.1]], requires_grad=True)
    reference = torch.tensor([[-90.0, -0.2]])
    loss = rehearsal_loss(logps, reference, torch.ones(1, 2), "js")
    assert loss.item() < math.exp(MAX_LOG_RATIO) * MAX_LOG_RATIO
    loss.backward()
    assert logps.grad[0, 0] == 0 and logps.grad[0, 1] != 0


def test_rules_by_name():
    assert rehearsal_rule("forward-kl") == RehearsalRule()
    rule = rehearsal_rule("js, samples=16,batch=4, solved=0.5")
    assert rule == RehearsalRule("js", samples=16, batch=4, solved=0.5)


@pytest.mark.parametrize(
    ("solved", "samples", "correct"), [(0.55, 20, 11), (0.7, 10, 7), (0.29, 100, 29), (1, 8, 8)]
)
def test_the_share_solved_is_that_of_whole_numbers(solved, samples, correct):
    """0.55 * 20 is 11.000000000000002."""
    rule = RehearsalRule(solved=solved, samples=samples)
    assert rule.stores(correct) and not rule.stores(correct - 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("reverse-kl", "must be one of forward-kl, js, sft, .*, got 'reverse-kl'"),
        ("js,coef=1", "NAME=VALUE of problems, samples, batch, solved, got 'coef=1'"),
        ("js,samples=0", "samples of a rehearsal must be a whole number >= 1, got 0"),
        ("js,batch=1.5", "batch of a rehearsal must be a whole number >= 1, got 1.5"),
        ("js,solved=2", r"solved of a rehearsal must be in \[0, 1\].*, got 2"),
    ],
)
def test_what_is_no_rule_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        rehearsal_rule(text)
