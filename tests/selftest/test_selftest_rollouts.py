"""Whose tokens an engine draws: its log-probabilities tell the policy from the model below it. vLLM
itself needs a GPU.
"""

import pytest
import torch
from conftest import tiny_model

from sage_unsloth.selftest.rollouts import distances

PAD = 1


@pytest.fixture
def batch():
    """Two prompts of unequal length, padded on the left, with completions of 6 and 4 tokens."""
    ids = torch.randint(2, 39, (2, 10), generator=torch.Generator().manual_seed(4))
    batch = {
        "prompt_ids": ids[:, :4].clone(),
        "prompt_mask": torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]),
        "completion_ids": ids[:, 4:].clone(),
        "completion_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2]),
    }
    batch["prompt_ids"][1, :2] = PAD
    batch["completion_ids"][1, 4:] = PAD
    return batch


def sampled(model, batch):
    """log π of each token by transformers, the pad token left out of the distribution."""
    found = torch.zeros(2, 6)
    for row, (skip, length) in enumerate(((0, 6), (2, 4))):
        ids = torch.cat([batch["prompt_ids"][row, skip:], batch["completion_ids"][row, :length]])
        logits = model(input_ids=ids[None]).logits[0, -length - 1 : -1]
        logits[:, PAD] = -torch.inf
        logps = logits.log_softmax(-1)
        found[row, :length] = logps[torch.arange(length), ids[-length:]]
    return found


@torch.no_grad()
@pytest.mark.parametrize("layout", ["completion", "unsloth"])
def test_an_engine_without_the_adapter_is_told_apart(batch, layout):
    model = tiny_model(0.05)
    policy = sampled(model, batch)
    with model.disable_adapter():
        base = sampled(model, batch)

    def measured(logps):
        if layout == "unsloth":  # two columns more, and the row with two pads shifted left by them
            wide = torch.zeros(2, 8)
            wide[0, 2:], wide[1, :6] = logps[0], logps[1]
            logps = wide
        return distances(model, batch | {"sampling_per_token_logps": logps}, PAD)

    apart = ((policy - base).abs() * batch["completion_mask"]).sum().item() / 10
    assert apart > 0.05, "an adapter that does nothing proves nothing"
    assert measured(policy) == pytest.approx({"policy": 0, "base": apart}, abs=1e-4)
    assert measured(base) == pytest.approx({"policy": apart, "base": 0}, abs=1e-4)
