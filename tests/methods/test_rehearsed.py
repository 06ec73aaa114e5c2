"""A rehearsal in Unsloth's trainer: its gradient is the oracle's, and what it cannot do is
refused.
"""

import pytest
import torch
from rehearsing import STORED, check_gradients, run

from sage_unsloth.methods import rehearsal
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.rehearsal import Stored, add_rehearsal
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.trainers.clock import Clock
from sage_unsloth.trainers.trainer_names import ContractError

pytestmark = pytest.mark.usefixtures("unsloth_module")


@pytest.mark.parametrize("divergence", ["forward-kl", "js", "sft"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        {"temperature": 0.7, "beta": 0.0},
        {"gradient_checkpointing": True},
    ],
    ids=["whole", "accumulated", "temperature", "checkpointing"],
)
def test_the_gradient_is_the_oracles(make_trainer, divergence, settings):
    check_gradients(make_trainer, divergence, **settings)


def drop_out(trainer, p=0.5):
    """Dropout in the adapter, as `LoraConfig(lora_dropout=p)` has it."""
    layers = [m for m in trainer.model.modules() if hasattr(m, "lora_dropout")]
    assert layers
    for layer in layers:
        layer.lora_dropout["default"] = torch.nn.Dropout(p)
    trainer.model.train()


def test_policy_and_reference_are_scored_without_dropout(make_trainer):
    """So that both are one model where they have one set of weights, and the check of the scoring
    compares two passes of one model.
    """
    values = []
    for p in (0.0, 0.5):
        trainer = make_trainer()
        drop_out(trainer, p)
        with rehearsal.without_dropout(trainer.model):
            values.append(rehearsal._Term(trainer, STORED, rehearsal.RehearsalRule())().item())
        assert all(m.training for m in trainer.model.modules() if isinstance(m, torch.nn.Dropout))
    assert values[0] == values[1] > 1e-3


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}])
def test_its_gradient_is_without_dropout(make_trainer, monkeypatch, settings):
    """With checkpointing too, where the backward pass computes the model a second time."""
    monkeypatch.setattr(
        "rehearsing.run", lambda trainer, **options: (drop_out(trainer), run(trainer, **options))[1]
    )
    check_gradients(make_trainer, "forward-kl", **settings)


def test_it_goes_with_a_guide_and_a_rule_and_draws_the_same_again(make_trainer):
    draws = []
    for _ in range(2):
        trainer = make_trainer(max_steps=2, per_device_train_batch_size=4)
        options = {"guide": BranchGuide(threshold=1.0), "advantages": "rs-grpo"}
        _, drawn, _ = run(trainer, **options)
        draws.append(drawn)
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[0][1], "another micro-batch draws others"


def test_with_methods_takes_its_settings(make_trainer, monkeypatch):
    drawn, scored = [], rehearsal.completion_logps

    def recorded(model, rows, temperature):
        drawn.append(len(rows))
        return scored(model, rows, temperature)

    monkeypatch.setattr(rehearsal, "completion_logps", recorded)
    trainer = make_trainer(max_steps=1)
    with with_methods(trainer, rehearsal="js,batch=3", rehearsal_coef=0.5, stored=STORED):
        trainer.train()
    assert {*drawn} == {3}


def test_its_draws_are_not_those_of_the_guide(make_trainer):
    trainer = make_trainer()
    term = rehearsal._Term(trainer, STORED, rehearsal.RehearsalRule())
    of_term, of_guide = term.clock.tick().generator, Clock(trainer).tick().generator
    assert torch.rand(4, generator=of_term).tolist() != torch.rand(4, generator=of_guide).tolist()


def test_every_problem_is_drawn_as_often(make_trainer):
    trainer = make_trainer()
    term = rehearsal._Term(trainer, STORED, rehearsal.RehearsalRule(batch=3000))
    counts = dict.fromkeys((0, 1, 3), 0)
    for one in term._drawn(torch.Generator().manual_seed(0)):
        counts[one.problem] += 1
    assert all(abs(count - 1000) < 120 for count in counts.values()), counts


def test_scoring_that_is_not_the_models_stops_the_first_step(make_trainer):
    trainer = make_trainer()
    base = trainer.model.get_base_model()
    forward = base.forward

    def scaled(*args, **kwargs):
        found = forward(*args, **kwargs)
        found.logits = found.logits * 1.5
        return found

    with (
        pytest.raises(ContractError, match="must be those of the model's logits"),
        add_rehearsal(trainer, STORED, coef=0.1),
        guided_kl(trainer),
    ):
        term = rehearsal._Term(trainer, STORED, rehearsal.RehearsalRule())
        base.forward = scaled
        term()


@pytest.mark.parametrize(
    ("stored", "coef", "message"),
    [
        ([], 0.1, "needs completions with at least one token after the prompt, got 0"),
        ([Stored(0, [3], [])], 0.1, "with at least one token"),
        (STORED, -1.0, "coef of a rehearsal must be >= 0, got -1.0"),
        (STORED, float("nan"), "coef of a rehearsal must be >= 0, got nan"),
    ],
)
def test_what_it_cannot_use_is_refused(make_trainer, stored, coef, message):
    with pytest.raises(ValueError, match=message), add_rehearsal(make_trainer(), stored, coef=coef):
        pass


def test_a_trained_head_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.model.get_output_embeddings().weight.requires_grad_(True)
    with (
        pytest.raises(ValueError, match=r"needs a frozen output head.* Leave lm_head out"),
        add_rehearsal(trainer, STORED, coef=0.1),
    ):
        pass


def test_without_a_weight_nothing_is_replaced(make_trainer):
    trainer = make_trainer()
    with add_rehearsal(trainer, [], coef=0):
        assert "training_step" not in vars(trainer)
