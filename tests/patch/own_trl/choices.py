"""Credit, advantages, references and teachers under TRL's own trainer, against the oracle."""

from functools import partial

import pytest
import torch
from conftest import tiny_model
from oracle import train_and_check
from trl_trainer import build_trl_trainer, letters

from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.objective.guides import BranchGuide, TokenGuide
from sage_unsloth.patch.guided import guided_kl

GUIDES = {
    "none": None,
    "branch": BranchGuide(threshold=1.0),
    "token": TokenGuide(),
    "causal": TokenGuide(norm="causal"),
    "reference": BranchGuide(threshold=1.0, source="reference"),
}
CREDIT = dict(gradient_accumulation_steps=1, scale_rewards="none")


class Ones:
    needs = frozenset()

    def log_guide(self, signals, *, step, max_steps, generator=None):
        return torch.zeros(signals.mask.shape)


@pytest.fixture
def make_trainer(tmp_path):
    return partial(build_trl_trainer, output_dir=str(tmp_path / "out"), max_steps=2, reward=letters)


@pytest.mark.parametrize(("kl_estimator", "guide"), [("k2", "causal"), ("k3-is", "reference")])
def test_sequence_credit_equals_the_oracle(make_trainer, kl_estimator, guide):
    trainer = make_trainer(use_bias_correction_kl=kl_estimator == "k3-is", **CREDIT)
    train_and_check(trainer, GUIDES[guide], kl_estimator=kl_estimator, credit="sequence")
    assert trainer.state.log_history[-2]["sage/credit_abs"] > 0


@pytest.mark.parametrize(("rule", "guide"), [("maxrl", "none"), ("pkpo,k=2", "token")])
def test_group_rules_equal_the_oracle(make_trainer, rule, guide):
    def reward(completions, **_):
        return [float(len(c[0]["content"]) % 3 == 0) for c in completions]

    trainer = make_trainer(reward=reward, max_steps=3)
    train_and_check(trainer, GUIDES[guide], advantages=rule)
    assert "advantages/dead_groups" in trainer.state.log_history[0]


def test_a_shape_sees_the_log_probs_of_the_policy_that_drew(make_trainer):
    apart = []

    def shape(signals, advantages, *, old_logps):
        apart.append(float(((signals.policy_logps - old_logps) * signals.mask).abs().max()))
        return advantages

    trainer = make_trainer(num_iterations=2, gradient_accumulation_steps=1, max_steps=4)
    with guided_kl(trainer, shape=shape):
        trainer.train()
    assert apart[2] < 1e-5 < apart[3], "a batch has two updates; the first step has rate 0"


@pytest.mark.parametrize("rule", ["grpo"])
def test_the_kl_in_the_reward_leaves_the_loss(make_trainer, rule):
    trainer = make_trainer(scale_rewards="none")
    train_and_check(trainer, None, kl_in="reward", advantages=rule)
    assert trainer.beta == 0.05
    row = trainer.state.log_history[0]
    assert row["kl/ref_k3"] > 0 and "kl" not in row


def test_dynamic_sampling_equals_the_oracle(make_trainer):
    def ends_early(completions, **_):  # dead for most groups
        return [float(len(c[0]["content"]) < 12) for c in completions]

    trainer = make_trainer(max_steps=3, reward=ends_early)
    train_and_check(trainer, GUIDES["branch"], max_resamples=2)
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert all("sampling/resampled_groups" in row for row in rows)


# --- The reference and the teacher ---


def test_a_reference_model_of_its_own_gives_its_entropies(make_trainer):
    """All weights trained: TRL loads the start once more as the reference."""
    trainer, seen = make_trainer("model", max_steps=1), []
    forward = trainer.ref_model.forward

    class Shown(Ones):
        needs = frozenset({"ref_entropies", "entropies"})

        def log_guide(self, signals, *, step, max_steps, generator=None):
            seen.append((signals.entropies, signals.ref_entropies, signals.mask.bool()))
            return torch.zeros(signals.mask.shape)

    with guided_kl(trainer, Shown()):
        trainer.train()
    (entropies, ref_entropies, mask), *_ = seen
    assert entropies[mask].std() > 0.05
    torch.testing.assert_close(ref_entropies[mask], entropies[mask], rtol=0, atol=1e-6)
    assert trainer.ref_model.forward == forward


def test_an_adapter_to_begin_with_is_the_reference(make_trainer):
    """TRL keeps a copy of it under the name "ref"; the first KL is 0."""
    trainer = make_trainer("ref", max_steps=2)
    with guided_kl(trainer, log_entropy=True):
        trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert rows[0]["kl/ref_k3"] == pytest.approx(0, abs=1e-7) and rows[1]["kl/ref_k3"] > 1e-4


def test_a_teacher_of_its_own_scores_the_batch(make_trainer):
    torch.manual_seed(3)
    teacher = tiny_model(0.2).merge_and_unload().eval()
    forward = teacher.forward
    exact = tiny_model(0.2).merge_and_unload().double().eval()
    exact.load_state_dict({n: w.double() for n, w in teacher.state_dict().items()})
    train_and_check(make_trainer(), TeacherGuide(kappa=0.5), teacher=(teacher, exact))
    assert teacher.forward == forward


def test_an_adapter_of_the_policy_scores_as_teacher(make_trainer):
    trainer = make_trainer()
    config = trainer.model.peft_config["default"]
    trainer.model.add_adapter("teacher", config)
    for name, weight in trainer.model.named_parameters():
        if ".teacher." in name:
            torch.nn.init.normal_(weight, std=0.1)
            weight.requires_grad_(False)
    seen = []

    class Shown(TeacherGuide):
        def log_guide(self, signals, **given):
            seen.append((signals.teacher_logps - signals.policy_logps)[signals.mask.bool()])
            return super().log_guide(signals, **given)

    with guided_kl(trainer, Shown(), teacher="teacher"):
        trainer.train()
    assert seen and all(difference.abs().max() > 0.1 for difference in seen)
    assert trainer.model.active_adapter == "default"
