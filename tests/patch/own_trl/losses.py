"""Loss and gradients of `guided_kl` on TRL's own trainer, against the float64 oracle."""

import math
import sys
from functools import partial

import pytest
import torch
from oracle import train_and_check
from transformers import TrainerCallback
from trl_trainer import build_trl_trainer, letters

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.penalties import KL_ESTIMATORS
from sage_unsloth.objective.guides import BranchGuide, RandomGuide, TokenGuide
from sage_unsloth.objective.loss import LOSS_TYPES

GUIDES = {
    "none": None,
    "branch": BranchGuide(threshold=1.0),
    "token": TokenGuide(),
    "random": RandomGuide(),
    "reference": BranchGuide(threshold=1.0, source="reference"),
    "adaptive": AdaptiveGuide(guide=BranchGuide(threshold=1.0), target=0.001),
}
TRL_LOSS_TYPES = (*LOSS_TYPES, "cispo", "sapo", "luspo", "vespo")
TWO = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)


@pytest.fixture
def make_trainer(tmp_path):
    return partial(build_trl_trainer, output_dir=str(tmp_path / "out"), max_steps=2, reward=letters)


def test_unsloth_is_not_here(make_trainer):
    make_trainer()
    assert not any(name.split(".")[0] in ("unsloth", "unsloth_zoo") for name in sys.modules)


class Ones:
    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return torch.zeros(signals.mask.shape)


def trained(trainer, guide=None, **options):
    """Losses, gradients by step, and the weights at the end."""
    gradients = []

    class Keep(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            named = trainer.model.named_parameters()
            gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})

    trainer.add_callback(Keep())
    with with_methods(trainer, guide, **options):
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    weights = {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}
    return losses, [*gradients, weights]


@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
def test_q_of_one_is_bitwise_trls_own_loss(make_trainer, loss_type):
    plain, guided = (
        trained(make_trainer(loss_type=loss_type), guide, **options)
        for guide, options in ((None, {}), (Ones(), {"log_entropy": True}))
    )
    assert plain[0] == guided[0]
    for before, after in zip(plain[1], guided[1], strict=True):
        assert any(value.abs().max() > 0 for value in before.values())
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradients_equal_the_oracle(make_trainer, loss_type, guide):
    oracle = train_and_check(make_trainer(loss_type=loss_type, **TWO), GUIDES[guide])
    assert all((i["advantages"] != 0).any() for step in oracle.steps for i in step["inputs"])
    assert [len(step["inputs"]) for step in oracle.steps] == [2, 2]


@pytest.mark.parametrize("kl_estimator", KL_ESTIMATORS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_penalty_equals_the_oracle(make_trainer, loss_type, kl_estimator):
    trainer = make_trainer(
        loss_type=loss_type, use_bias_correction_kl=kl_estimator == "k3-is", num_iterations=2
    )
    oracle = train_and_check(trainer, GUIDES["branch"], kl_estimator=kl_estimator)
    logged = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    if kl_estimator != "k3-is":  # whose mean is of the product with ρ
        assert logged == pytest.approx([s["expected_kl"] for s in oracle.steps], rel=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"steps_per_generation": 2, "gradient_accumulation_steps": 1},
        {"importance_sampling_level": "sequence", "num_iterations": 2},
        {"epsilon": 0.01, "epsilon_high": 0.02, "num_iterations": 2, "learning_rate": 0.05},
        {"top_entropy_quantile": 0.4},
        {"entropy_coef": 0.01},
        {"scale_rewards": "batch", "beta": 0.5},
        {"mask_truncated_completions": True},
        {"gradient_checkpointing": True},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_every_setting_equals_the_oracle(make_trainer, settings):
    train_and_check(make_trainer(**settings), GUIDES["branch"])


@pytest.mark.parametrize("bounded", [None, True])
def test_far_from_the_reference_the_bound_is_a_choice(make_trainer, bounded):
    """Unbounded as TRL's loss is, or as Unsloth's; at this noise some tokens' k3 exceeds 10."""
    trainer = make_trainer(lora_noise=1.5, max_steps=1)
    largest = []

    class Shown(Ones):
        def log_guide(self, signals, *, step, max_steps, generator=None):
            d = (signals.ref_logps - signals.policy_logps).double() * signals.mask
            largest.append((torch.expm1(d) - d).max().item())
            return torch.zeros(signals.mask.shape)

    train_and_check(trainer, Shown(), rtol=2e-5, k3_bounded=bounded)
    assert max(largest) > 15
    kl = trainer.state.log_history[0]["kl"]
    assert kl > 10 / 96 and math.isfinite(kl)
