"""Clip-Cov and KL-Cov: by hand, against autograd, and what they leave alone."""

import pytest
import torch

from sage_unsloth.methods.covariance import clip_cov, covariance, kl_cov
from sage_unsloth.objective.signals import TokenSignals

# Six valid tokens of eight; what is masked is nan.
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
NAN = float("nan")
LOGPS = torch.tensor([[-0.5, -3.0, -1.0, -0.5], [-2.0, -5.0, NAN, NAN]])
ADVANTAGES = torch.tensor([2.0, -1.0])
# mean A = (4·2 − 2·1)/6 = 1, mean log π = −12/6 = −2
BY_HAND = torch.tensor([[1.5, -1.0, 1.0, 1.5], [0.0, 6.0, 0.0, 0.0]])


def signals(logps=LOGPS):
    return TokenSignals(logps, None, MASK)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_covariance_by_hand():
    torch.testing.assert_close(covariance(LOGPS, ADVANTAGES, MASK), BY_HAND)
    wide = ADVANTAGES.unsqueeze(1).expand(2, 4)
    torch.testing.assert_close(covariance(LOGPS, wide, MASK), BY_HAND)


def test_clip_cov_drops_within_the_band_alone():
    result = clip_cov(signals(), ADVANTAGES, generator=generator(), share=1.0)
    # 1 < cov < 5 holds for 1.5 twice; 1.0 and 6.0 are outside.
    assert result.tolist()[0] == [0.0, 2.0, 2.0, 0.0]
    assert result[1, :2].tolist() == [-1.0, -1.0]


def test_clip_cov_drops_one_token_at_least_and_either_of_two():
    dropped = set()
    for seed in range(20):
        result = clip_cov(signals(), ADVANTAGES, generator=generator(seed), share=1e-4)
        (place,) = (result[0] == 0).nonzero().squeeze(1).tolist()
        dropped.add(place)
        again = clip_cov(signals(), ADVANTAGES, generator=generator(seed), share=1e-4)
        assert torch.equal(result, again)
    assert dropped == {0, 3}


def test_clip_cov_with_an_empty_band_changes_nothing():
    result = clip_cov(signals(), ADVANTAGES, generator=generator(), low=7.0, high=9.0)
    assert torch.equal(result, ADVANTAGES.unsqueeze(1).expand(2, 4))


def test_kl_cov_has_the_gradient_of_its_penalty():
    old = torch.where(MASK.bool(), LOGPS, 0.0) + torch.tensor(
        [[0.1, -0.2, 0.0, 0.3], [0.2, -0.4, 0, 0]]
    )
    result = kl_cov(signals(), ADVANTAGES, old_logps=old, share=0.4, coef=0.7)  # 2 of 6 tokens
    # The highest are 6.0, and 1.5 at one of two places.
    changed = (result != ADVANTAGES.unsqueeze(1)).nonzero().tolist()
    assert [1, 1] in changed and len(changed) == 2 and changed[0] in ([0, 0], [0, 3])
    chosen = torch.zeros(2, 4)
    for row, column in changed:
        chosen[row, column] = 1.0

    def gradient(loss):
        logps = torch.where(MASK.bool(), LOGPS, 0.0).requires_grad_()
        (loss(logps - old) * MASK).sum().backward()
        return logps.grad

    wide = ADVANTAGES.unsqueeze(1)
    expected = gradient(lambda ratio: -ratio.exp() * wide + 0.7 * chosen * ratio.abs())
    torch.testing.assert_close(gradient(lambda ratio: -ratio.exp() * result), expected)


def test_kl_cov_changes_nothing_in_the_first_update():
    assert torch.equal(kl_cov(signals(), ADVANTAGES, old_logps=None), ADVANTAGES)
    same = kl_cov(signals(), ADVANTAGES, old_logps=LOGPS, share=1.0)
    assert torch.equal(same, ADVANTAGES.unsqueeze(1).expand(2, 4))


@pytest.mark.parametrize("advantage", [0.0, 0.3])
def test_kl_cov_changes_nothing_where_all_advantages_are_equal(advantage):
    """No token's covariance is above another's then, but for rounding."""
    old = torch.where(MASK.bool(), LOGPS, 0.0) + 0.1
    equal = torch.full((2,), advantage)
    result = kl_cov(signals(), equal, old_logps=old, share=0.4)
    assert torch.equal(result, equal.unsqueeze(1).expand(2, 4))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: clip_cov(signals(), ADVANTAGES, generator=generator(), share=0.0), "got 0.0"),
        (lambda: clip_cov(signals(), ADVANTAGES, generator=generator(), low=5.0), "5.0 and 5.0"),
        (lambda: kl_cov(signals(), ADVANTAGES, old_logps=None, share=2.0), "got 2.0"),
        (lambda: kl_cov(signals(), ADVANTAGES, old_logps=None, coef=-1.0), "got -1.0"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
