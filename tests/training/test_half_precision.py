"""Both stages in bfloat16 and float16 on a CPU; float16's loss scaling, which skips steps."""

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sage_unsloth.models.embedded import BASE_MODEL, data_folder
from sage_unsloth.models.loading import LoraSettings, load_policy
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.problems import arithmetic
from sage_unsloth.quickstart import smoke_config
from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.trainers.finite import NotFiniteError
from sage_unsloth.training import loss_scale
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.rlvr_stage import rlvr
from sage_unsloth.training.sft_stage import SftConfig, sft

pytestmark = pytest.mark.long

BASE = data_folder() / BASE_MODEL
TRAIN = arithmetic.problems("train")
FORMATS = ("bfloat16", "float16")


def trained(folder, dtype, **settings):
    config = replace(smoke_config().rlvr, precision=dtype, learning_rate=5e-3, max_steps=2)
    adapter = rlvr(replace(config, **settings), BASE, TRAIN, folder, BranchGuide())
    return load_file(adapter / "adapter_model.safetensors"), read_jsonl(folder / "metrics.jsonl")


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_adapter_is_float32_on_a_base_in_the_format(unsloth_module, dtype):
    model, _ = load_policy(BASE, lora=LoraSettings(), dtype=dtype)
    wide = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {n for n, _ in model.named_parameters() if "lora_" in n}
    assert {p.dtype for p in model.get_base_model().parameters()} == {
        torch.float32,
        getattr(torch, dtype),
    }


SFT = replace(smoke_config().sft, learning_rate=5e-3, warmup_steps=0)


@pytest.fixture(scope="module")
def exact(unsloth_module, tmp_path_factory):
    """SFT in float32."""
    return sft(SFT, BASE, arithmetic.problems("sft"), tmp_path_factory.mktemp("exact"))


@pytest.mark.parametrize("dtype", FORMATS)
def test_sft_trains_in_the_format(exact, tmp_path, dtype):
    merged = sft(replace(SFT, precision=dtype), BASE, arithmetic.problems("sft"), tmp_path / "half")
    assert {w.dtype for w in load_file(merged / "model.safetensors").values()} == {
        getattr(torch, dtype)
    }
    half, single = (read_jsonl(path.parent / "metrics.jsonl") for path in (merged, exact))
    # A mean over some hundred tokens of log-probs that are each right to a few units of rounding.
    rounding = torch.finfo(getattr(torch, dtype)).eps
    assert half[0]["loss"] == pytest.approx(single[0]["loss"], rel=8 * rounding)
    assert half[0]["loss"] != single[0]["loss"]
    assert (loss_scale.LOSS_SCALE in half[0]) == (dtype == "float16")
    adapter = load_file(merged.parent / "adapter" / "adapter_model.safetensors")
    assert {w.dtype for w in adapter.values()} == {torch.float32}
    assert any("lora_B" in name and w.any() for name, w in adapter.items())


@pytest.mark.parametrize("dtype", FORMATS)
def test_rlvr_trains_in_the_format(unsloth_module, tmp_path, dtype):
    weights, rows = trained(tmp_path, dtype)
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert any("lora_B" in name and w.any() for name, w in weights.items())
    assert abs(rows[0]["kl/ref_k3"]) < 1e-6, "policy and reference are one model"
    assert rows[0]["grad_norm"] > 0
    assert json.loads((tmp_path / "run.json").read_text())["settings"]["precision"] == dtype


def test_a_step_that_overflows_in_float16_is_skipped_and_counted(
    unsloth_module, tmp_path, monkeypatch
):
    """A scale that makes the first gradients overflow: the weights stay, the scale is halved, and
    training goes on once it fits. A run that resumes has the scale that it had.
    """
    scaler = torch.amp.GradScaler

    def large(device):
        return scaler(device, init_scale=2.0**60, backoff_factor=2.0**-44)

    monkeypatch.setattr(torch.amp, "GradScaler", large)
    weights, rows = trained(tmp_path / "whole", "float16", max_steps=3, save_steps=1)
    assert [row[loss_scale.SKIPPED] for row in rows] == [1, 0, 0]
    assert [row[loss_scale.LOSS_SCALE] for row in rows] == [2.0**16] * 3
    assert "grad_norm" not in rows[0] and rows[1]["grad_norm"] > 0
    assert rows[1]["kl/ref_k3"] == pytest.approx(0, abs=1e-6), "nothing was trained by step 1"
    assert any("lora_B" in name and w.any() for name, w in weights.items())


def test_a_gradient_that_is_not_finite_at_scale_1_stops_the_run(
    unsloth_module, tmp_path, monkeypatch
):
    from sage_unsloth.training import rlvr_stage as module

    scaler, make_trainer = torch.amp.GradScaler, module.make_trainer

    def overflows(*arguments):
        trainer = make_trainer(*arguments)
        weight = next(p for p in trainer.model.parameters() if p.requires_grad)
        weight.register_hook(lambda gradient: gradient + math.inf)
        return trainer

    monkeypatch.setattr(torch.amp, "GradScaler", lambda d: scaler(d, init_scale=1.0))
    monkeypatch.setattr(module, "make_trainer", overflows)
    with pytest.raises(NotFiniteError, match=r"the gradient of .* is (nan|inf|-inf)"):
        trained(tmp_path, "float16")


@pytest.mark.parametrize("config", [SftConfig, RlvrConfig])
def test_bad_formats_are_refused(config):
    with pytest.raises(ValueError, match="precision must be one of auto, bfloat16, float16, got"):
        config(precision="fp8")
    with pytest.raises(ValueError, match="full fine-tuning trains float32 weights"):
        RlvrConfig(precision="bfloat16", full_finetuning=True)
    with pytest.raises(ValueError, match=r"is for Unsloth's trainer.* Set precision=auto"):
        RlvrConfig(precision="bfloat16", backend="trl")
