"""The plain-torch loss against numbers worked out by hand, enumeration, and finite differences."""

import math

import pytest
import torch

from sage_unsloth.methods.penalties import KL_ESTIMATORS, PENALTIES
from sage_unsloth.objective.kl import k3
from sage_unsloth.objective.loss import LOSS_TYPES, grpo_loss


def batch(seed=0, shape=(4, 6)):
    g = torch.Generator().manual_seed(seed)
    logps, ref, old = (-torch.rand(shape, generator=g, dtype=torch.float64) * 2 for _ in range(3))
    lengths = torch.tensor([6, 3, 1, 0])
    mask = (torch.arange(shape[1]) < lengths[:, None]).long()
    return logps, ref, old, mask, torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)


@pytest.mark.smoke
def test_k3_by_hand():
    value = k3(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]))
    assert value.item() == pytest.approx(0.5 - math.log(0.5) - 1)


@pytest.mark.parametrize("kl_estimator", ["k3", "k3-is"])
def test_a_tokens_k3_is_bounded_where_a_bound_is_given(kl_estimator):
    logps, ref = torch.tensor([[-9.0, -1.0]]), torch.tensor([[-1.0, -1.0]])
    settings = dict(beta=0.5, kl_estimator=kl_estimator, k3_max=3.0)
    loss = grpo_loss(logps, ref, torch.ones(1, 2), torch.zeros(1), **settings)
    assert loss.item() == pytest.approx(0.5 * 3 / 2)


def test_k3_mean_is_the_kl_and_with_a_guide_the_generalised_kl():
    g = torch.Generator().manual_seed(1)
    policy, ref = (
        torch.randn(7, generator=g, dtype=torch.float64).log_softmax(0) for _ in range(2)
    )
    q = 0.6 + 0.8 * torch.rand(7, generator=g, dtype=torch.float64)
    kl = (policy.exp() * (policy - ref)).sum()
    assert (policy.exp() * k3(policy, ref)).sum().item() == pytest.approx(kl.item())
    pseudo = (policy.exp() * (policy - ref - q.log())).sum()
    guided = (policy.exp() * k3(policy, ref + q.log())).sum()
    assert guided.item() == pytest.approx((pseudo + (q * ref.exp()).sum() - 1).item())


def test_k3_differentiated_pulls_along_the_anchor_not_along_the_reverse_kl():
    """E_π[∇k3] = −Σ_v q(v) π_ref(v) ∇log π(v): the forward direction; with the ratio kept inside it
    is the reverse KL's.
    """
    g = torch.Generator().manual_seed(2)
    logits = torch.randn(6, generator=g, dtype=torch.float64, requires_grad=True)
    ref = torch.randn(6, generator=g, dtype=torch.float64).log_softmax(0)
    log_q = torch.rand(6, generator=g, dtype=torch.float64) - 0.5

    def gradient(f):
        return torch.autograd.grad(f(logits.log_softmax(0)), logits)[0]

    found = gradient(lambda lp: (lp.detach().exp() * k3(lp, ref + log_q)).sum())
    expected = gradient(lambda lp: -((ref + log_q).exp() * lp).sum())
    torch.testing.assert_close(found, expected)
    corrected = gradient(
        lambda lp: (lp.detach().exp() * k3(lp, ref) * (lp - lp.detach()).exp()).sum()
    )
    reverse = gradient(lambda lp: (lp.exp() * (lp - ref)).sum())
    torch.testing.assert_close(corrected, reverse)


@pytest.mark.smoke
def test_grpo_by_hand():
    logps = torch.tensor([[-1.0, -2.0], [-0.5, -9.0]])
    old = torch.tensor([[-1.5, -2.0], [-0.5, -9.0]])
    ref = torch.tensor([[-1.0, -2.2], [-0.7, -9.0]])
    log_guide = torch.tensor([[0.1, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    loss = grpo_loss(
        logps,
        ref,
        mask,
        torch.tensor([1.0, -1.0]),
        old_per_token_logps=old,
        log_guide=log_guide,
        beta=0.1,
        epsilon=0.2,
        epsilon_high=0.3,
    )

    def kl(d):
        return math.exp(d) - d - 1

    first = [-1.3 + 0.1 * kl(0.1), -1.0 + 0.1 * kl(-0.2)]  # ratio e^0.5 is clipped at 1.3
    second = 1.0 + 0.1 * kl(-0.2)
    assert loss.item() == pytest.approx((sum(first) / 2 + second) / 2, rel=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_reductions_agree_when_every_completion_has_full_length(loss_type):
    logps, ref, old, _, advantages = batch()
    mask = torch.ones(4, 6)
    losses = {
        t: grpo_loss(
            logps,
            ref,
            mask,
            advantages,
            old_per_token_logps=old,
            loss_type=t,
            max_completion_length=6,
        )
        for t in ("grpo", loss_type)
    }
    assert losses[loss_type].item() == pytest.approx(losses["grpo"].item())


@pytest.mark.smoke
def test_reductions_by_their_definition():
    logps, ref, old, mask, advantages = batch()
    tokens = torch.zeros(4, 6, dtype=torch.float64)
    for row in range(4):
        for t in range(6):
            one = (slice(row, row + 1), slice(t, t + 1))
            tokens[row, t] = grpo_loss(
                logps[one],
                ref[one],
                torch.ones(1, 1),
                advantages[row : row + 1],
                old_per_token_logps=old[one],
            )
    total = (tokens * mask).sum()
    common = {"old_per_token_logps": old, "max_completion_length": 9}
    expected = {
        "grpo": ((tokens * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean(),
        "bnpo": total / 10,
        "dr_grpo": total / 36,
        "dapo": total / 10,
    }
    for loss_type, value in expected.items():
        found = grpo_loss(logps, ref, mask, advantages, loss_type=loss_type, **common)
        assert found.item() == pytest.approx(value.item()), loss_type
    scaled = grpo_loss(
        logps, ref, mask, advantages, loss_type="dapo", num_items_in_batch=40, **common
    )
    assert scaled.item() == pytest.approx(total.item() / 40)


def test_sequence_level_uses_one_ratio_for_a_completion():
    logps, _, old, mask, advantages = batch()
    mean = ((logps - old) * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    ratio = mean.exp()
    term = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = (term * (mask.sum(-1) > 0)).mean()
    found = grpo_loss(
        logps,
        None,
        mask,
        advantages,
        old_per_token_logps=old,
        beta=0.0,
        importance_sampling_level="sequence",
    )
    assert found.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("kl_estimator", [e for e in KL_ESTIMATORS if e != "forward-kl"])
def test_gradient_by_finite_differences(loss_type, level, kl_estimator):
    """All but "forward-kl", whose gradient is by design not that of its value."""
    logps, ref, old, mask, advantages = batch(3)
    old = logps + 0.05 * (old - old.mean())

    def f(x):
        return grpo_loss(
            x,
            ref,
            mask,
            advantages,
            old_per_token_logps=old,
            log_guide=torch.full_like(ref, 0.1),
            beta=0.3,
            loss_type=loss_type,
            importance_sampling_level=level,
            kl_estimator=PENALTIES.get(kl_estimator, kl_estimator),
            max_completion_length=8,
            num_items_in_batch=10,
        )

    assert torch.autograd.gradcheck(f, logps.requires_grad_())


def test_masked_positions_do_not_matter():
    logps, ref, old, mask, advantages = batch()
    outside = mask == 0

    def dirty(x, value):
        return torch.where(outside, value, x)

    x = dirty(logps, math.inf).requires_grad_()
    found = grpo_loss(
        x, dirty(ref, math.nan), mask, advantages, old_per_token_logps=dirty(old, -math.inf)
    )
    expected = grpo_loss(logps, ref, mask, advantages, old_per_token_logps=old)
    assert found.item() == pytest.approx(expected.item())
    found.backward()
    assert x.grad.isfinite().all()
    assert (x.grad[outside] == 0).all()


def test_on_policy_keeps_the_gradient_of_the_ratio():
    logps, _, _, mask, advantages = batch()
    logps.requires_grad_()
    grpo_loss(logps, None, mask, advantages, beta=0.0, loss_type="dapo").backward()
    torch.testing.assert_close(logps.grad, -(advantages[:, None] * mask) / mask.sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of"),
        ({"kl_estimator": "k4"}, "kl_estimator must be 'k3', 'k3-is' or a function, got 'k4'"),
        ({"importance_sampling_level": "word"}, "importance_sampling_level must be one of"),
        ({"loss_type": "dr_grpo"}, "max_completion_length, which must be given"),
    ],
)
def test_bad_input_is_named(change, message):
    logps, ref, _, mask, advantages = batch()
    with pytest.raises(ValueError, match=message):
        grpo_loss(logps, ref, mask, advantages, **change)
    with pytest.raises(ValueError, match="ref_per_token_logps must be given"):
        grpo_loss(logps, None, mask, advantages)
    with pytest.raises(ValueError, match="the same shape"):
        k3(torch.zeros(2), torch.zeros(3))
