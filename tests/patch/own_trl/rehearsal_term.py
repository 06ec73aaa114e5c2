"""A rehearsal in TRL's own trainer: its gradient is the oracle's."""

from functools import partial

import pytest
from rehearsing import STORED, check_gradients
from trl_trainer import build_trl_trainer, letters

from sage_unsloth.patch.rehearsal import rehearsed


@pytest.fixture
def make_trainer(tmp_path):
    return partial(build_trl_trainer, output_dir=str(tmp_path / "out"), reward=letters)


@pytest.mark.parametrize("divergence", ["forward-kl", "js"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}],
    ids=["whole", "accumulated"],
)
def test_the_gradient_is_the_oracles(make_trainer, divergence, settings):
    check_gradients(make_trainer, divergence, **settings)


def test_a_model_without_an_adapter_is_refused(make_trainer):
    trainer = make_trainer("model")
    with (
        pytest.raises(ValueError, match="needs a model with an adapter"),
        rehearsed(trainer, STORED, coef=0.1),
    ):
        pass
