"""A rehearsal in TRL's own trainer: its gradient is the oracle's."""

from functools import partial

import pytest
from rehearsing import COEF, STORED, check_gradients, run
from trl_trainer import build_trl_trainer, letters

from sage_unsloth.methods.rehearsal import METRIC, add_rehearsal


@pytest.fixture
def make_trainer(tmp_path):
    return partial(build_trl_trainer, output_dir=str(tmp_path / "out"), reward=letters)


@pytest.mark.parametrize("divergence", ["forward-kl", "js", "sft"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}],
    ids=["whole", "accumulated"],
)
def test_the_gradient_is_the_oracles(make_trainer, divergence, settings):
    check_gradients(make_trainer, divergence, **settings)


def test_it_has_the_reference_of_the_kl(make_trainer):
    """TRL copies an adapter that the model comes with, and its KL is to the copy."""
    trainer = make_trainer("ref", max_steps=2)
    assert "ref" in trainer.model.peft_config
    copied = {n: p.clone() for n, p in trainer.model.named_parameters() if ".ref." in n}
    run(trainer, coef=COEF)
    divergences = [row[METRIC] for row in trainer.state.log_history if METRIC in row]
    assert abs(divergences[0]) < 1e-9, "before the first step policy and copy are one model"
    assert divergences[1] > 1e-6
    for name, weight in trainer.model.named_parameters():
        assert weight.requires_grad == ("lora_" in name and ".ref." not in name), name
        assert ".ref." not in name or weight.equal(copied[name])


def test_a_model_without_an_adapter_is_refused(make_trainer):
    trainer = make_trainer("model")
    with (
        pytest.raises(ValueError, match="needs a model with an adapter"),
        add_rehearsal(trainer, STORED, coef=0.1),
    ):
        pass
