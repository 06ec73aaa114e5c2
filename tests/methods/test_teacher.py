"""The teacher's guide by hand, and on the embedded task: a better teacher pulls the policy to
itself where no reward does.
"""

import math
import shutil
from dataclasses import replace

import pytest
import torch

from sage_unsloth.methods.teacher_guide import TeacherGuide
from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.teacher import load_teacher
from sage_unsloth.models.tokenizers import load_tokenizer
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import QuickstartConfig, smoke_config
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import sft
from sage_unsloth.training.stage import read_metrics

BASE = data_folder() / BASE_MODEL
TIME = {"step": 0, "max_steps": 10}
CONFIG = QuickstartConfig()


def signals(teacher, ref, mask=None):
    teacher, ref = torch.tensor(teacher), torch.tensor(ref)
    mask = torch.ones_like(ref) if mask is None else torch.tensor(mask)
    return TokenSignals(torch.zeros_like(ref), ref, mask, teacher_logps=teacher)


def test_values_by_hand():
    s = signals([[-1.0, -1.0, -1.0, -9.0]], [[-1.0, -1.2, -3.0, -1.0]])
    found = TeacherGuide().log_guide(s, **TIME)
    assert torch.allclose(found, torch.tensor([[0.0, 0.2, math.log(1.4), math.log(0.6)]]))
    half = TeacherGuide(kappa=0.5).log_guide(s, **TIME)
    assert torch.allclose(half, torch.tensor([[0.0, 0.1, math.log(1.4), math.log(0.6)]]))
    assert TeacherGuide(kappa=0.0).log_guide(s, **TIME).abs().max() == 0


def test_what_stands_outside_the_mask_does_not_come_through():
    s = signals([[-1.0, math.nan]], [[-1.2, math.inf]], [[1, 0]])
    assert TeacherGuide().log_guide(s, **TIME)[0, 1] == 0


def test_without_a_clip_the_anchor_is_the_teacher():
    s = signals([[-0.3, -4.0]], [[-2.0, -1.0]])
    wide = TeacherGuide(q_min=1e-6, q_max=1e6)
    assert torch.allclose(s.ref_logps + wide.log_guide(s, **TIME), s.teacher_logps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": -1.0}, r"kappa must be finite and >= 0.*got -1\.0"),
        ({"q_min": 0.0}, "q_min must be > 0"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        TeacherGuide(**settings)


def test_signals_without_a_teacher_are_refused():
    zeros = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=r"TeacherGuide needs the signal 'teacher_logps'"):
        TeacherGuide().log_guide(TokenSignals(zeros, zeros, zeros + 1), **TIME)


# --- the embedded task ---


@pytest.fixture(scope="module")
def students(tmp_path_factory, unsloth_module):
    """A model of little SFT, and one of more SFT on top of it: (model, better model, its
    adapter).
    """
    rows, folder = arithmetic.problems("sft"), tmp_path_factory.mktemp("sft")
    little = sft(replace(CONFIG.sft, max_steps=8), BASE, rows, folder / "little")
    more = sft(replace(CONFIG.sft, max_steps=60, warmup_steps=0), little, rows, folder / "more")
    return little, more, folder / "more" / "adapter"


RLVR = replace(
    smoke_config().rlvr,
    max_steps=8,
    prompts_per_step=4,
    num_generations=4,
    learning_rate=5e-3,
    beta=1.0,
    preflight_prompts=0,
    save_steps=3,
)
# No reward can be had, so that nothing but the anchor moves the policy.
UNREACHABLE = [row | {"answer": "123456789"} for row in arithmetic.problems("train")]


@pytest.mark.long
def test_a_better_teacher_pulls_the_policy_where_no_reward_does(students, tmp_path):
    """A whole model as teacher is the same run (`test_both_kinds_of_teacher_are_one`)."""
    little, _, adapter = students
    trained = rlvr(
        replace(RLVR, teacher=str(adapter)), little, UNREACHABLE, tmp_path, TeacherGuide()
    )
    metrics = read_metrics(tmp_path)
    assert all(row["reward"] == 0 for row in metrics)
    agreement = [row["sage/log_guide_mean"] for row in metrics]
    assert sum(agreement[-3:]) / 3 > sum(agreement[:3]) / 3 + 0.01
    assert sorted(file.name for file in trained.iterdir() if file.is_dir()) == []
    model, _ = load_policy(little, adapter=trained)
    assert list(model.peft_config) == ["default"]


@pytest.mark.long
def test_both_kinds_of_teacher_are_one(students, tmp_path):
    """An adapter scores as the model that it makes: the runs differ by rounding alone."""
    little, more, adapter = students
    losses = []
    for kind, teacher in {"adapter": adapter, "model": more}.items():
        config = replace(RLVR, max_steps=2, teacher=str(teacher))
        rlvr(config, little, UNREACHABLE, tmp_path / kind, TeacherGuide())
        losses.append(
            [(row["loss"], row["sage/guide_mean"]) for row in read_metrics(tmp_path / kind)]
        )
    for one, other in zip(*losses, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_weights(students, tmp_path, monkeypatch):
    """The teacher's adapter is in the checkpoint too, where transformers would take it for the
    policy's.
    """
    from safetensors.torch import load_file

    from sage_unsloth.grading.reward import SolutionReward

    little, _, adapter = students
    config = replace(RLVR, max_steps=5, teacher=str(adapter))
    whole = rlvr(config, little, UNREACHABLE, tmp_path / "whole", TeacherGuide())
    calls, reward = [], SolutionReward.__call__

    def dies(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return reward(self, *args, **kwargs)

    monkeypatch.setattr(SolutionReward, "__call__", dies)
    with pytest.raises(KeyboardInterrupt):
        rlvr(config, little, UNREACHABLE, tmp_path / "cut", TeacherGuide())
    monkeypatch.undo()
    checkpoint = tmp_path / "cut" / "checkpoints" / "checkpoint-3"
    assert not (checkpoint / "teacher").exists()
    shutil.copytree(adapter, checkpoint / "teacher")  # a kill before it was taken out
    resumed = rlvr(config, little, UNREACHABLE, tmp_path / "cut", TeacherGuide())
    expected, found = (
        load_file(folder / "adapter_model.safetensors") for folder in (whole, resumed)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.long
def test_another_teacher_is_another_run(students, tmp_path):
    little, more, adapter = students
    config = replace(RLVR, max_steps=1, teacher=str(adapter))
    rlvr(config, little, UNREACHABLE, tmp_path, TeacherGuide())
    with pytest.raises(ValueError, match="teacher was"):
        rlvr(replace(config, teacher=str(more)), little, UNREACHABLE, tmp_path, TeacherGuide())


@pytest.mark.long
def test_refusals(students, tmp_path, make_tokenizer):
    little, more, adapter = students
    with pytest.raises(
        ValueError, match=r"exactly with a guide that needs 'teacher_logps', got none. Set teacher"
    ):
        rlvr(RLVR, little, UNREACHABLE, tmp_path / "a", TeacherGuide())
    with pytest.raises(ValueError, match=r"got teacher='.*' without such a guide"):
        rlvr(replace(RLVR, teacher=str(more)), little, UNREACHABLE, tmp_path / "b")
    with pytest.raises(ValueError, match="needs a policy with an adapter, got full fine-tuning"):
        full = replace(RLVR, teacher=str(adapter), full_finetuning=True, learning_rate=1e-4)
        rlvr(full, little, UNREACHABLE, tmp_path / "c", TeacherGuide())
    with pytest.raises(ValueError, match="needs the base that it was trained on"):
        rlvr(replace(RLVR, teacher=str(adapter)), more, UNREACHABLE, tmp_path / "d", TeacherGuide())
    other = tmp_path / "other"
    shutil.copytree(more, other)
    make_tokenizer().save_pretrained(other)
    model, _ = load_policy(little)
    with pytest.raises(ValueError, match="a teacher must have the policy's tokenizer"):
        load_teacher(other, little, model, load_tokenizer(little))
