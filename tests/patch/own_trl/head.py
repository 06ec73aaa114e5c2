"""What takes the place of TRL 1.15's head without a GPU gives what its own kernel gives, which runs
here in Triton's interpreter. Later versions have a way of their own, which stays.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import utils

from sage_unsloth.trainers.trainer_names import HEAD_CHOICE
from sage_unsloth.trainers.trl_without_gpu import _PlainHead, head_without_gpu

OUTPUTS = ("log_probs", "entropy")


@pytest.mark.parametrize(
    ("temperature", "scale", "softcap", "bias"),
    [(1.0, 1.0, None, False), (0.7, 1.0, None, True), (1.3, 0.25, 5.0, True)],
)
def test_values_and_gradients_are_those_of_trls_kernel(temperature, scale, softcap, bias):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(5, 7), torch.randn(11, 7), torch.randn(11) if bias else None
    targets = torch.randint(0, 11, (5,))
    found = []
    for head in (_PlainHead, ChunkedLogProbFunction):
        given = [t if t is None else t.clone().requires_grad_() for t in (hidden, weight, bias)]
        logps, entropies, *rest = head.apply(
            *given, targets, temperature, 32768, softcap, scale, OUTPUTS
        )
        assert rest == [None] * 3
        (logps * torch.arange(5) + 0.3 * entropies).sum().backward()
        found.append([logps, entropies, *(t.grad for t in given if t is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_it_is_there_while_open_where_trl_has_none():
    before = utils._ChunkedLogProbFunction
    with head_without_gpu():
        assert (utils._ChunkedLogProbFunction is _PlainHead) is not hasattr(utils, HEAD_CHOICE)
    assert utils._ChunkedLogProbFunction is before


def test_other_outputs_are_refused():
    with pytest.raises(ValueError, match="must be log_probs or entropy"):
        _PlainHead.apply(*[torch.zeros(1)] * 4, 1.0, 1, None, 1.0, ("log_probs", "is_top1"))
