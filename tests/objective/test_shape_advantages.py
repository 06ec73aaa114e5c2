"""What a function of the user makes of the advantages."""

import pytest
import torch

from sage_unsloth.objective.advantages import shape_advantages
from sage_unsloth.objective.guides import clip_guide
from sage_unsloth.objective.signals import TokenSignals

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
SIGNALS = TokenSignals(-torch.ones(2, 3), -torch.ones(2, 3), MASK)
ADVANTAGES = torch.tensor([0.5, -0.5])


@pytest.mark.smoke
def test_advantages_keep_their_format_and_are_0_outside_the_mask():
    found = shape_advantages(lambda signals, a: a.double()[:, None] + 0 * MASK, SIGNALS, ADVANTAGES)
    assert found.dtype == ADVANTAGES.dtype
    assert found.tolist() == [[0.5, 0.5, 0.5], [-0.5, -0.5, 0.0]]


def test_advantages_that_are_written_into_are_refused():
    with pytest.raises(ValueError, match=r"wrote into advantages\. Work on a copy"):
        shape_advantages(
            lambda signals, advantages: advantages.mul_(2), SIGNALS, ADVANTAGES.clone()
        )


def test_a_clipped_guide_is_1_outside_the_mask():
    log_q = clip_guide(torch.full((2, 3), 9.0), MASK, 0.5, 2.0)
    assert log_q.exp().tolist() == [[2.0, 2.0, 2.0], [2.0, 2.0, 1.0]]
