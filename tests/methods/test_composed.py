"""Methods around `guided_kl`: in which order they open, and what they leave behind."""

import pytest

from sage_unsloth.methods import (
    credit_sequences,
    dynamic_sampling,
    kl_in_reward,
    kl_penalty,
    use_advantages,
    use_token_advantages,
    with_methods,
)
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.trainers.trainer_names import ContractError

METHODS = {
    "advantages": lambda trainer: use_advantages(trainer, "maxrl"),
    "token_advantages": lambda trainer: use_token_advantages(trainer, "clip-cov"),
    "kl_estimator": lambda trainer: kl_penalty(trainer, "k2"),
    "credit": credit_sequences,
    "kl_in": kl_in_reward,
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_inside_of_guided_kl_is_refused(make_trainer, name):
    trainer = make_trainer()
    before = set(vars(trainer))
    with (
        guided_kl(trainer, BranchGuide()),
        pytest.raises(ContractError, match=f"what sets {name} must be opened once, before guided"),
        METHODS[name](trainer),
    ):
        pass
    assert set(vars(trainer)) == before


@pytest.mark.parametrize("name", METHODS)
def test_a_method_without_guided_kl_trains_nothing(make_trainer, name):
    trainer = make_trainer(max_steps=1)
    with (
        pytest.raises(ContractError, match=f"what sets {name} must be followed by guided_kl"),
        METHODS[name](trainer),
    ):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_method_is_opened_once(make_trainer):
    trainer = make_trainer()
    with (
        kl_penalty(trainer, "k2"),
        pytest.raises(ContractError, match="got another kl_estimator"),
        kl_penalty(trainer, "forward-kl"),
    ):
        pass


def every_third(completions, **_):
    """Right or wrong by the text, about a third right."""
    return [float(sum(map(ord, completion[0]["content"])) % 3 == 0) for completion in completions]


def test_the_order_of_methods_changes_nothing(make_trainer):
    """Of the contexts by themselves, and composed from a run's settings."""
    settings = dict(reward=every_third, max_steps=2, gradient_accumulation_steps=1)
    rows = []
    for order in (
        ("advantages", "kl_estimator", "credit"),
        ("credit", "kl_estimator", "advantages"),
    ):
        trainer = make_trainer(**settings)
        first, second, third = (METHODS[name](trainer) for name in order)
        sampling = dynamic_sampling(trainer, 1)
        with first, second, sampling, third, guided_kl(trainer, BranchGuide()):
            trainer.train()
        rows.append(trainer.state.log_history)
    trainer = make_trainer(**settings)
    options = dict(advantages="maxrl", kl_estimator="k2", credit="sequence", max_resamples=1)
    with with_methods(trainer, BranchGuide(), **options):
        trainer.train()
    rows.append(trainer.state.log_history)
    measured = [
        [{k: v for k, v in row.items() if "time" not in k and "second" not in k} for row in run]
        for run in rows
    ]
    assert measured[0] == measured[1] == measured[2]
    assert any("sage/credit_abs" in row for row in measured[0])


def test_plain_settings_open_nothing_but_guided_kl(make_trainer):
    trainer = make_trainer()
    with guided_kl(trainer):
        plain = set(vars(trainer))
    with with_methods(trainer):
        assert set(vars(trainer)) == plain
