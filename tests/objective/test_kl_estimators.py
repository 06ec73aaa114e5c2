"""Each KL penalty by enumeration: the gradient that it has in expectation, its value, its bounds.
float64, no sampling.
"""

import math

import pytest
import torch

from sage_unsloth.methods.penalties import (
    KL_ESTIMATORS,
    NAIVE_KNEE,
    PENALTIES,
    SLOPE_MAX,
    forward_kl,
    forward_kl_naive,
    k2,
)
from sage_unsloth.objective.kl import LOG_RATIO_MAX, k3, k3_is
from sage_unsloth.objective.loss import grpo_loss

FORWARD = ("k3", "forward-kl")
REVERSE = ("k3-is", "k2")


def penalty(kl_estimator, logps, anchor, old=None):
    if kl_estimator == "k3":
        return k3(logps, anchor)
    if kl_estimator == "k3-is":
        return k3_is(logps, anchor, (logps - (logps.detach() if old is None else old)).exp())
    return PENALTIES[kl_estimator](logps, anchor)


def toy(seed=0, tokens=5, guided=True):
    """Logits of a softmax policy, log π_ref and log q; no π_ref/π comes near a bound."""
    g = torch.Generator().manual_seed(seed)
    logits, ref, log_q = (
        0.5 * torch.randn(tokens, generator=g, dtype=torch.float64) for _ in range(3)
    )
    return logits.requires_grad_(), ref.log_softmax(0), 0.3 * log_q if guided else 0 * log_q


def expected_gradient(kl_estimator, logits, anchor):
    """Σ_v π(v) ∇penalty(v): the samples' distribution is held, as autograd holds it in training."""
    logps = logits.log_softmax(0)
    return torch.autograd.grad(
        (logps.detach().exp() * penalty(kl_estimator, logps, anchor)).sum(), logits
    )[0]


def forward_gradient(logits, anchor):
    """−Σ_v f(v) ∇log π(v), written out for a softmax: π(v) Σf − f(v)."""
    f = anchor.exp()
    return logits.detach().softmax(0) * f.sum() - f


def reverse_gradient(logits, anchor):
    """∇ Σ_v π(v) log(π(v)/f(v)), the pseudo-KL as a function, by autograd."""
    logps = logits.log_softmax(0)
    return torch.autograd.grad((logps.exp() * (logps - anchor)).sum(), logits)[0]


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_expected_gradient_of_one_token(seed, guided):
    logits, ref, log_q = toy(seed, guided=guided)
    anchor = ref + log_q
    forward, reverse = forward_gradient(logits, anchor), reverse_gradient(logits, anchor)
    assert (forward - reverse).norm() > 0.1 * max(forward.norm(), reverse.norm())
    for kl_estimator in KL_ESTIMATORS:
        found = expected_gradient(kl_estimator, logits, anchor)
        if kl_estimator in FORWARD:
            torch.testing.assert_close(found, forward, msg=kl_estimator)
        elif kl_estimator in REVERSE:
            torch.testing.assert_close(found, reverse, msg=kl_estimator)
        else:
            for other in (forward, reverse):
                assert (found - other).norm() > 0.1 * other.norm(), kl_estimator
                # Not a matter of scale either.
                assert torch.cosine_similarity(found, other, dim=0) < 0.995


def test_without_a_guide_the_objectives_are_the_two_kls():
    logits, ref, _ = toy(4)
    logps = logits.log_softmax(0)
    forward = torch.autograd.grad((ref.exp() * (ref - logps)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((logps.exp() * (logps - ref)).sum(), logits)[0]
    for kl_estimator in FORWARD:
        torch.testing.assert_close(expected_gradient(kl_estimator, logits, ref), forward)
    for kl_estimator in REVERSE:
        torch.testing.assert_close(expected_gradient(kl_estimator, logits, ref), reverse)


def test_the_naive_gradient_is_what_its_docstring_says():
    logits, ref, log_q = toy(5)
    f, pi = (ref + log_q).exp(), logits.detach().softmax(0)
    pull = f * (f / pi).log()
    found = expected_gradient("forward-kl-naive", logits, ref + log_q)
    torch.testing.assert_close(found, pi * pull.sum() - pull)


def test_forward_kl_is_importance_weighted_cross_entropy():
    """Token by token −sg[r] · log π: the value added to it has no gradient."""
    logps = torch.tensor([-1.0, -2.0, -0.3], dtype=torch.float64, requires_grad=True)
    anchor = torch.tensor([-1.5, -0.8, -0.4], dtype=torch.float64)
    found = torch.autograd.grad(forward_kl(logps, anchor).sum(), logps)[0]
    expected = torch.autograd.grad((-(anchor - logps).exp().detach() * logps).sum(), logps)[0]
    torch.testing.assert_close(found, expected)


def test_off_policy_only_the_ratio_keeps_the_gradient():
    """Samples from π_old: ρ · k3 still has the pseudo-KL's gradient; k2 has not."""
    logits, ref, log_q = toy(6)
    old = toy(7)[0].detach().log_softmax(0)
    reverse = reverse_gradient(logits, ref + log_q)
    found = {}
    for kl_estimator in REVERSE:
        logps = logits.log_softmax(0)
        loss = (old.exp() * penalty(kl_estimator, logps, ref + log_q, old)).sum()
        found[kl_estimator] = torch.autograd.grad(loss, logits)[0]
    torch.testing.assert_close(found["k3-is"], reverse)
    assert (found["k2"] - reverse).norm() > 0.1 * reverse.norm()


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_expected_gradient_on_a_tree_through_the_loss(kl_estimator):
    """Two tokens, the second after the first: Σ_s d(s) of the one-token gradients at each state s,
    d(s) held.

    That is exact for every estimator, and all that a per-token penalty can be: for the reverse KL
    the gradient of the divergence between whole completions has another term, of how the first
    token moves the states, which is not there.
    """
    g = torch.Generator().manual_seed(8)
    tokens = 3
    # Row 0: the first token. Row 1 + a: the second one, after a.
    logits = torch.randn((1 + tokens, tokens), generator=g, dtype=torch.float64, requires_grad=True)
    ref, log_q = (
        torch.randn((1 + tokens, tokens), generator=g, dtype=torch.float64) for _ in range(2)
    )
    ref, log_q = ref.log_softmax(-1), 0.3 * log_q
    first, second = (
        i.flatten() for i in torch.meshgrid(*2 * [torch.arange(tokens)], indexing="ij")
    )

    def of_completions(table):
        """(completions, 2): every completion's two entries."""
        return torch.stack([table[0, first], table[1 + first, second]], -1)

    logps = logits.log_softmax(-1)
    probability = of_completions(logps.detach()).sum(-1).exp()
    losses = torch.stack(
        [
            grpo_loss(
                of_completions(logps)[[row]],
                of_completions(ref)[[row]],
                torch.ones(1, 2),
                torch.zeros(1),
                log_guide=of_completions(log_q)[[row]],
                beta=1.0,
                kl_estimator=PENALTIES.get(kl_estimator, kl_estimator),
            )
            for row in range(tokens**2)
        ]
    )
    found = torch.autograd.grad(2 * (probability * losses).sum(), logits)[0]

    visited = torch.cat([torch.ones(1, dtype=torch.float64), logits[0].detach().softmax(0)])
    expected = torch.zeros_like(found)
    for s in range(1 + tokens):
        one = logits[s].detach().requires_grad_()
        expected[s] = visited[s] * expected_gradient(kl_estimator, one, (ref + log_q)[s])
    torch.testing.assert_close(found, expected)

    logps = of_completions(logits.log_softmax(-1)).sum(-1)
    whole = logps.exp() * (logps - of_completions(ref + log_q).sum(-1))
    of_whole_completions = torch.autograd.grad(whole.sum(), logits)[0]
    assert (found[0] - of_whole_completions[0]).norm() > 0.05 * of_whole_completions[0].norm()
    if kl_estimator in REVERSE:
        # After the first token nothing comes later, so there the two agree.
        torch.testing.assert_close(found[1:], of_whole_completions[1:])


@pytest.mark.smoke
def test_values_by_hand():
    """π = ½ and f = ¼ (d = −log 2), then the other way round."""
    logps = torch.tensor([math.log(0.5), math.log(0.25)], dtype=torch.float64)
    anchor = logps.flip(0)
    log2 = math.log(2)
    expected = {
        "k3": [0.5 + log2 - 1, 2 - log2 - 1],
        "k2": [0.5 * log2**2] * 2,
        "forward-kl": [-0.5 * log2 + 0.5, 2 * log2 - 1],
        "forward-kl-naive": [-0.5 * log2 + 0.5, 2 * log2 - 1],
    }
    for kl_estimator, values in expected.items():
        assert penalty(kl_estimator, logps, anchor).tolist() == pytest.approx(values), kl_estimator
    ratio = torch.tensor([2.0, 0.5], dtype=torch.float64)
    assert k3_is(logps, anchor, ratio).tolist() == pytest.approx([log2 * 2 - 1, (1 - log2) / 2])


@pytest.mark.parametrize("kl_estimator", ["forward-kl", "forward-kl-naive"])
def test_mean_value_is_the_forward_kl(kl_estimator):
    logits, ref, _ = toy(9)
    logps = logits.detach().log_softmax(0)
    mean = (logps.exp() * penalty(kl_estimator, logps, ref)).sum()
    assert mean.item() == pytest.approx((ref.exp() * (ref - logps)).sum().item())


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_zero_where_policy_and_anchor_agree(kl_estimator):
    logps = torch.tensor([-0.1, -30.0])
    assert penalty(kl_estimator, logps, logps).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kl_estimator", PENALTIES)
def test_a_rare_token_cannot_explode(kl_estimator):
    """Value at most 200 and slope at most `SLOPE_MAX`, in float32 too, and no step where the bound
    begins.
    """
    d = torch.cat([torch.linspace(-25, 25, 20001), torch.tensor([-1e4, -300.0, 300.0, 1e4])])
    logps = torch.full_like(d, -3.0, requires_grad=True)
    value = PENALTIES[kl_estimator](logps, logps.detach() + d)
    slope = torch.autograd.grad(value.sum(), logps)[0]
    assert value.isfinite().all() and value.min() >= -1e-6 and value.max() <= 200
    assert slope.abs().max() <= SLOPE_MAX * (1 + 1e-5)
    assert slope.abs().max() >= SLOPE_MAX * (1 - 1e-3), "the bound is reached in this range"
    inside = d[:20001].abs() < LOG_RATIO_MAX
    step = value.detach()[:20001][inside].diff().abs().max()
    assert step <= 2.5 * SLOPE_MAX * 50 / 20000
    # A token beyond the bound is still pulled back, as far as Unsloth's own clamp of d.
    assert (slope[:20001][(d[:20001] > 5) & inside] < 0).all()


def test_bounds_begin_where_they_are_said_to():
    assert math.exp(NAIVE_KNEE) * NAIVE_KNEE == pytest.approx(SLOPE_MAX)

    def value_and_slope(function, d):
        logps = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = function(logps, torch.tensor(d, dtype=torch.float64))
        return value.item(), torch.autograd.grad(value, logps)[0].item()

    assert value_and_slope(k2, 9.0) == pytest.approx((40.5, -9.0))
    assert value_and_slope(k2, 12.0) == pytest.approx((70.0, -10.0))
    assert value_and_slope(k2, -12.0) == pytest.approx((70.0, 10.0))
    e2 = math.exp(2)
    assert value_and_slope(forward_kl, 2.0) == pytest.approx((2 * e2 - e2 + 1, -e2))
    assert value_and_slope(forward_kl, 3.0) == pytest.approx((30 - 9, -10.0))
    e1 = math.exp(1)
    assert value_and_slope(forward_kl_naive, 1.0) == pytest.approx((1.0, -e1))
    at_knee = SLOPE_MAX - math.exp(NAIVE_KNEE) + 1
    assert value_and_slope(forward_kl_naive, 3.0) == pytest.approx(
        (at_knee + SLOPE_MAX * (3 - NAIVE_KNEE), -10.0)
    )


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
def test_shapes_that_differ_are_refused(kl_estimator):
    with pytest.raises(ValueError, match="the same shape"):
        penalty(kl_estimator, torch.zeros(2), torch.zeros(3))
