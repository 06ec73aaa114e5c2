"""Rules for the advantages of tokens, by name and inside Unsloth's trainer."""

from types import SimpleNamespace

import pytest
import torch
from oracle import train_and_check

from sage_unsloth.methods.composed import with_methods
from sage_unsloth.methods.covariance import clip_cov, kl_cov
from sage_unsloth.methods.token_rules import check_token_rule, token_rule, updates_of_batch
from sage_unsloth.objective.guides import RandomGuide
from sage_unsloth.training.rlvr_config import RlvrConfig


def test_a_rule_by_name_has_its_settings():
    assert token_rule("none") is None
    assert token_rule("kl-cov") is kl_cov
    rule = token_rule("clip-cov, share=0.5, high=9")
    assert rule.func is clip_cov and rule.keywords == {"share": 0.5, "high": 9}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "clipcov",
            "must be one of none, clip-cov, kl-cov, or your own module:f.*'clipcov'",
        ),
        ("clip-cov,old_logps=1", r"are NAME=VALUE of share, low, high, got 'old_logps=1'"),
        ("clip-cov,share=x", "share of token_advantages='clip-cov' must be a number, got 'x'"),
        (
            "kl-cov,coef=2",
            "several updates of a rollout batch, .* got 1. .*num_iter",
        ),
        ("nowhere_to_be_found:rule", "must be importable"),
    ],
)
def test_what_a_run_cannot_use_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        check_token_rule(text, 1)


def test_a_parameter_without_a_default_must_be_set(tmp_path, monkeypatch):
    (tmp_path / "fading.py").write_text("def fade(signals, advantages, strength, old_logps): ...")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="got none for 'strength'"):
        token_rule("fading:fade")
    assert token_rule("fading:fade,strength=0.5").keywords == {"strength": 0.5}


def test_a_rule_of_later_updates_needs_them():
    assert RlvrConfig(token_advantages="kl-cov", num_iterations=2).num_iterations == 2


@pytest.mark.usefixtures("unsloth_module")
def test_clip_cov_equals_the_oracle(make_trainer):
    dropped = []

    def rule(signals, advantages):
        seeded = torch.Generator().manual_seed(0)  # the oracle draws the same tokens
        result = clip_cov(signals, advantages, generator=seeded, share=0.3, low=0.05, high=9.0)
        dropped.append(((result == 0) & signals.mask.bool()).sum().item())
        return result

    train_and_check(make_trainer(max_completion_length=24), shape=rule)
    assert max(dropped) > 1


@pytest.mark.usefixtures("unsloth_module")
def test_kl_cov_acts_from_the_second_update_on(make_trainer):
    trainer = make_trainer(num_iterations=2, gradient_accumulation_steps=1, max_steps=6)
    changed, live = [], []

    def rule(signals, advantages, *, old_logps):
        live.append(bool((advantages != 0).any()))
        result = kl_cov(signals, advantages, old_logps=old_logps, share=0.1, coef=0.5)
        wide = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        changed.append(int(((result if result.dim() == 2 else wide) != wide).sum()))
        expected = max(int(0.1 * int(signals.mask.sum())), 1)
        assert changed[-1] in (0, expected)
        return result

    with with_methods(trainer, token_advantages=rule):
        trainer.train()
    # A rollout batch has two updates, in the first of which the ratio is 1. The first step of all
    # has the learning rate 0, so that its batch comes back as it was.
    # Equal advantages, all 0, have no covariance.
    expected = [step in (3, 5) and live[step] for step in range(6)]
    assert [count > 0 for count in changed] == expected and any(expected)


@pytest.mark.usefixtures("unsloth_module")
def test_kl_cov_with_one_update_a_batch_is_refused(make_trainer):
    with (
        pytest.raises(ValueError, match=r"needs several .* got 1"),
        with_methods(make_trainer(), token_advantages="kl-cov"),
    ):
        pass


@pytest.mark.usefixtures("unsloth_module")
def test_draws_repeat_and_leave_the_guides_noise_as_it_is(make_trainer):
    def trained(rule):
        trainer = make_trainer(max_steps=2)
        with with_methods(trainer, RandomGuide(), token_advantages=rule):
            trainer.train()
        return {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" in n}

    drawn = []

    def drawing(signals, advantages, *, generator):
        drawn.append(torch.rand(2, generator=generator).tolist())
        return advantages

    plain, first = trained(lambda signals, advantages: advantages), trained(drawing)
    for name, weights in plain.items():
        assert torch.equal(first[name], weights)
    trained(drawing)
    half = len(drawn) // 2
    assert half > 1 and drawn[:half] == drawn[half:]
    assert len({tuple(values) for values in drawn[:half]}) == half


@pytest.mark.parametrize(("steps", "accumulated", "expected"), [(3, 2, 2), (4, 2, 4), (1, 2, 2)])
def test_updates_of_a_batch_are_whole(steps, accumulated, expected):
    args = SimpleNamespace(steps_per_generation=steps, gradient_accumulation_steps=accumulated)
    updates = updates_of_batch(SimpleNamespace(args=args, num_iterations=2))
    assert updates == expected and isinstance(updates, int)
