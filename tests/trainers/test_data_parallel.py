"""What several processes log together, by hand."""

from types import SimpleNamespace

import pytest
import torch

from sage_unsloth.trainers.data_parallel import pooled_means


def test_logged_means_are_of_the_completions_of_every_process():
    """The KL of the three that have a token, the length of all four."""
    masks = torch.tensor([[1, 1, 0], [0, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    results = [
        (torch.tensor(loss), torch.tensor(length), torch.tensor(kl), "rest")
        for loss, length, kl in ((1.0, 1.0, 0.2), (2.0, 2.0, 0.5))
    ]
    sums = []

    def pooled(reduce):
        accelerator = SimpleNamespace(num_processes=2, reduce=reduce)
        return [pooled_means(*each, accelerator) for each in zip(results, masks, strict=True)]

    pooled(lambda own, how: sums.append(own) or own)  # what each process brings
    found = pooled(lambda own, how: sum(sums))
    for (loss, length, kl, rest), own in zip(found, results, strict=True):
        assert (loss, rest) == (own[0], "rest")
        assert length.item() == pytest.approx((1 + 2) / 2)
        assert kl.item() == pytest.approx((0.2 + 2 * 0.5) / 3)
