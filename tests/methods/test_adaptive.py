"""The controller by hand and in closed loop, and inside Unsloth's trainer: logged, in the
checkpoint, and resumed.
"""

import copy
import json
import math

import pytest
import torch
from oracle import train_and_check

from sage_unsloth.methods.adaptive import AdaptiveGuide
from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.objective.guides import BranchGuide, RandomGuide
from sage_unsloth.objective.protocols import SteeredGuide
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.guided import guided_kl

BRANCH = BranchGuide(threshold=1.0)
TIME = {"step": 0, "max_steps": 10}


def signals(entropies):
    entropies = torch.tensor(entropies)
    zeros = torch.zeros_like(entropies)
    return TokenSignals(zeros, zeros, torch.ones_like(entropies), entropies)


@pytest.mark.parametrize(
    ("measured", "strength"),
    [(0.02, 1.0), (0.018, 1.01), (0.022, 0.99), (0.0, 1.02), (5.0, 0.98)],
    ids=["at target", "below", "above", "far below", "far above"],
)
def test_one_move_by_hand(measured, strength):
    guide = AdaptiveGuide(BRANCH, target=0.02)
    guide.after_step({"sage/log_guide_mean": measured, "sage/entropy": 9.0})
    assert guide.strength == pytest.approx(strength)


def test_it_can_keep_the_entropy_instead():
    guide = AdaptiveGuide(BRANCH, target=1.0, keeps="entropy")
    guide.after_step({"sage/log_guide_mean": 9.0, "sage/entropy": 0.9})
    assert guide.strength == pytest.approx(1.01)
    assert guide.needs == {"entropies"}
    assert AdaptiveGuide(BranchGuide(source="reference"), 1.0, "entropy").needs == {
        "entropies",
        "ref_entropies",
    }


def test_log_q_is_scaled_then_clipped():
    guide = AdaptiveGuide(BranchGuide(), target=0.02)
    guide.strength = 0.5
    found = guide.log_guide(signals([[0.0, 2.2, 99.0]]), **TIME)
    assert torch.allclose(found, torch.tensor([[0.0, 0.5 * math.log(1.3), 0.5 * math.log(1.4)]]))
    guide.strength = 10.0
    assert guide.log_guide(signals([[2.2]]), **TIME).item() == pytest.approx(math.log(1.4))


def test_in_closed_loop_the_mean_reaches_its_target():
    guide = AdaptiveGuide(BranchGuide(), target=0.03)
    batch = signals([[0.1, 1.4, 0.3, 1.6, 0.2]])
    for _ in range(400):
        guide.after_step({"sage/log_guide_mean": guide.log_guide(batch, **TIME).mean().item()})
    assert guide.log_guide(batch, **TIME).mean().item() == pytest.approx(0.03, rel=1e-3)


@pytest.mark.parametrize(("measured", "bound"), [(0.0, 2.0), (1.0, 0.5)])
def test_it_stays_within_its_bounds(measured, bound):
    guide = AdaptiveGuide(BRANCH, target=0.02, min_strength=0.5, max_strength=2.0)
    for _ in range(100):
        guide.after_step({"sage/log_guide_mean": measured})
    assert guide.strength == bound


def test_the_state_is_no_setting():
    guide = AdaptiveGuide(BRANCH, target=0.02)
    other = copy.deepcopy(guide)
    other.strength = 3.0
    assert other == guide and repr(other) == repr(guide)
    assert isinstance(guide, SteeredGuide) and not isinstance(BRANCH, SteeredGuide)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 0.0}, r"target must be finite and > 0.*got 0\.0"),
        ({"target": math.nan}, "target must be finite"),
        ({"keeps": "kl"}, "keeps must be one of log_guide, entropy, got 'kl'"),
        ({"gain": 0.0}, "gain must be in"),
        ({"min_strength": 1.5}, "begins at 1.*, got 1.5"),
        ({"max_strength": math.inf}, "begins at 1"),
        ({"q_min": 0.0}, "q_min must be > 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveGuide(BRANCH, **({"target": 0.02} | settings))


@pytest.mark.parametrize("guide", [RandomGuide(), TeacherGuide()])
def test_a_mean_that_falls_with_the_strength_is_refused(guide):
    with pytest.raises(ValueError, match="mean log q grows with its strength"):
        AdaptiveGuide(guide, target=0.02)
    AdaptiveGuide(guide, target=0.5, keeps="entropy")


def test_what_is_no_plain_guide_is_refused():
    for guide in ("branch", AdaptiveGuide(BRANCH, target=0.02)):
        with pytest.raises(TypeError, match="must not be an AdaptiveGuide"):
            AdaptiveGuide(guide, target=0.02)


# --- inside Unsloth's trainer ---


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_loss_and_gradients_equal_the_oracle_and_the_strength_moves(make_trainer):
    guide = AdaptiveGuide(BRANCH, target=0.3)
    trainer = make_trainer(gradient_accumulation_steps=2, max_completion_length=24)
    train_and_check(trainer, guide)
    strengths = [entry["sage/strength"] for entry in logged(trainer)]
    means = [entry["sage/log_guide_mean"] for entry in logged(trainer)]
    assert strengths[0] == 1.0 and len(set(strengths)) == len(strengths)
    for now, then, mean in zip(strengths, strengths[1:], means, strict=False):
        assert then == pytest.approx(now * (1 + 0.1 * min(max(1 - mean / 0.3, -0.2), 0.2)))


@pytest.mark.parametrize("logging_steps", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_resumed_run_goes_on_with_the_same_strength(make_trainer, tmp_path, logging_steps):
    def run(steps, folder, resume=None):
        guide = AdaptiveGuide(BRANCH, target=0.3)
        trainer = make_trainer(
            output_dir=str(tmp_path / folder),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            logging_steps=logging_steps,
        )
        if steps < 4:
            from transformers import TrainerCallback

            class Stop(TrainerCallback):
                def on_step_end(self, args, state, control, **kwargs):
                    control.should_training_stop = state.global_step >= steps

            trainer.add_callback(Stop())
        with guided_kl(trainer, guide):
            trainer.train(resume_from_checkpoint=resume)
        return trainer, guide

    whole, guide = run(4, "whole")
    run(2, "cut")
    checkpoint = tmp_path / "cut" / "checkpoint-2"
    kept = json.loads((checkpoint / "trainer_state.json").read_text())["stateful_callbacks"]
    strength = kept["SageGuide"]["attributes"]["strength"]
    assert strength != 1.0
    if logging_steps == 1:
        assert strength == logged(whole)[2]["sage/strength"]
    resumed, again = run(4, "cut", str(checkpoint))
    assert again.strength == guide.strength
    if logging_steps == 1:
        assert [e["sage/strength"] for e in logged(resumed)[-2:]] == [
            e["sage/strength"] for e in logged(whole)[-2:]
        ]


def test_a_second_training_begins_anew(make_trainer):
    guide = AdaptiveGuide(BRANCH, target=0.3)
    for _ in range(2):
        trainer = make_trainer(max_steps=2)
        with guided_kl(trainer, guide):
            trainer.train()
        assert logged(trainer)[0]["sage/strength"] == 1.0


def test_a_checkpoint_without_the_guides_state_is_refused(make_trainer, tmp_path):
    trainer = make_trainer(save_strategy="steps", save_steps=2, max_steps=2)
    with guided_kl(trainer, BRANCH):
        trainer.train()
    checkpoint = tmp_path / "out" / "checkpoint-2"
    trainer = make_trainer(max_steps=4)
    with (
        pytest.raises(ValueError, match=r"checkpoint of step 2 must hold the state of its guide"),
        guided_kl(trainer, AdaptiveGuide(BRANCH, target=0.3)),
    ):
        trainer.train(resume_from_checkpoint=str(checkpoint))
