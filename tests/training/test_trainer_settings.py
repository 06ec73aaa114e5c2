"""The trainer's settings after construction are those of the run: by Unsloth's trainer, on a tiny
model.
"""

from dataclasses import replace
from types import SimpleNamespace

import conftest
import pytest

from sage_unsloth.models.loading import LoraSettings
from sage_unsloth.planning.presets import model_preset
from sage_unsloth.runs.settings import names_where
from sage_unsloth.training import trainer_settings
from sage_unsloth.training.recipes import load_libraries
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_trainer import make_trainer

CONFIG = RlvrConfig(
    max_steps=20,
    prompts_per_step=2,
    num_generations=4,
    max_completion_length=8,
    lora=LoraSettings(rank=4, alpha=8),
)
REWARD = SimpleNamespace(functions=[conftest.length_reward], weights=None)


@pytest.fixture
def build(unsloth_module, tmp_path):
    from sage_unsloth.trainers.loading import prepare_for_cpu

    def build(config):
        rows = [{"problem": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
        model = prepare_for_cpu(conftest.tiny_model(0.0))
        tokenizer = conftest.build_tokenizer()
        return make_trainer(config, model, tokenizer, rows, tmp_path, REWARD, "transformers")

    return build


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_rewards_are_scaled_as_the_run_says(build, loss_type, scale_rewards):
    """Unsloth's config overrides an explicit "group" under dr_grpo."""
    trainer = build(replace(CONFIG, loss_type=loss_type, scale_rewards=scale_rewards))
    assert trainer.scale_rewards == trainer.args.scale_rewards == scale_rewards
    assert trainer.args.loss_type == loss_type


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ("args", "scale_rewards", "none", r"got scale_rewards='none' .* for scale_rewards='group'"),
        ("trainer", "scale_rewards", "none", r"got trainer\.scale_rewards='none'"),
        ("args", "learning_rate", 1.0, r"got learning_rate=1\.0 .* for learning_rate=5e-06"),
        ("trainer", "epsilon_low", 0.5, r"got trainer\.epsilon=0\.5"),
        ("args", "gradient_accumulation_steps", 4, r"got prompts_per_step=8\.0"),
        ("args", "warmup_steps", 0, r"got warmup_ratio=0 .* for warmup_ratio=2"),
        ("args", "use_bias_correction_kl", True, r"got kl_estimator=True"),
    ],
)
def test_a_trainer_with_another_value_is_refused(build, place, name, value, message):
    trainer = build(CONFIG)
    trainer_settings.check_trainer(trainer, CONFIG, "transformers")
    setattr(trainer.args if place == "args" else trainer, name, value)
    with pytest.raises(ValueError, match=message):
        trainer_settings.check_trainer(trainer, CONFIG, "transformers")


def test_an_optimizer_that_transformers_lacks_is_refused(unsloth_module):
    with pytest.raises(ValueError, match=r"optim must be one of auto, adamw_torch, .* got 'adm'"):
        load_libraries(model_preset("arithmetic-base"), "adm")


CHANGED = {
    "max_steps": 7, "num_generations": 2, "max_completion_length": 9, "learning_rate": 0.5,
    "lr_scheduler_type": "cosine", "optim": "sgd", "weight_decay": 0.3, "max_grad_norm": 0.25,
    "num_iterations": 3, "beta": 0.7, "loss_type": "bnpo", "scale_rewards": "batch",
    "entropy_coef": 0.1, "epsilon": 0.3, "epsilon_high": 0.4, "top_entropy_quantile": 0.5,
    "temperature": 0.9, "top_p": 0.8, "vllm_importance_sampling_correction": False,
    "save_steps": 3, "seed": 5,
}  # fmt: skip


def test_every_setting_that_is_the_trainers_reaches_it(build):
    """TRL's own names among them: schedule, optimiser, clipping, iterations."""
    assert {*names_where(RlvrConfig, "trainer"), "optim"} == {*CHANGED}
    usual = RlvrConfig()
    assert all(getattr(usual, name) != value for name, value in CHANGED.items())
    args = build(replace(CONFIG, **CHANGED)).args
    assert {name: getattr(args, name) for name in CHANGED} == CHANGED
