"""The checks around the loss pass here, and find a planted defect."""

import pytest
import torch

from sage_unsloth.selftest import costs, stages
from sage_unsloth.selftest.findings import FAILED, NOT_HERE, PASSED
from sage_unsloth.trainers.trainer_names import ContractError


def test_the_contract_passes_and_its_error_ends_the_process(unsloth_module, tmp_path, monkeypatch):
    assert [f.status for f in stages.contract(tmp_path)] == [PASSED]
    from sage_unsloth.trainers import trainer_names

    monkeypatch.setitem(trainer_names.EXPECTED_PARAMETERS, trainer_names.LOSS, ("trainer", "ids"))
    with pytest.raises(ContractError):
        list(stages.contract(tmp_path))


@pytest.mark.long
def test_a_resumed_run_is_the_straight_one(unsloth_module, tmp_path, monkeypatch):
    (finding,) = stages.check_resume(tmp_path / "right")
    assert finding.status == PASSED, finding
    assert finding.figures["way"] > 1e-3, "the weights must have moved"
    # A guide that draws other noise after the checkpoint.
    trained = stages._train

    def other_seed(*arguments, resume=None, **options):
        if resume is not None:
            monkeypatch.setattr(stages.policy, "SEED", 1)
        return trained(*arguments, resume=resume, **options)

    monkeypatch.setattr(stages, "_train", other_seed)
    (finding,) = stages.check_resume(tmp_path / "wrong")
    assert finding.status == FAILED and finding.remedy


@pytest.mark.long
def test_an_export_passes_and_a_wrong_merge_is_found(unsloth_module, tmp_path, monkeypatch):
    assert [f.status for f in stages.check_export(tmp_path / "right")] == [PASSED] * 3
    decoder_of = stages.make_decoder

    def other_scale(model):
        decoder = decoder_of(model)
        decoder.scale *= 2
        return decoder

    monkeypatch.setattr(stages, "make_decoder", other_scale)
    *_, finding = stages.check_export(tmp_path / "wrong")
    assert finding.status == FAILED and "share the adapter" in finding.remedy


@pytest.mark.long
def test_a_guided_step_is_measured_beside_a_plain_one(unsloth_module, tmp_path):
    found = {finding.name: finding for finding in costs.step_costs(tmp_path)}
    for name in ("weights", "adapter", "gradients", "optimizer"):
        item = found[f"plan, {name}"]
        assert item.status == PASSED, item
    # 8 · (inputs + outputs) of each linear map of two layers, in float32.
    inside = 256 + 256
    wide = 256 + 512
    adapter = 2 * 8 * (4 * inside + 3 * wide) * 4
    assert found["plan, adapter"].figures["measured_bytes"] == adapter
    assert found["plan, optimizer"].figures["measured_bytes"] == pytest.approx(2 * adapter)
    ratio = found["guided step, time"].figures
    assert ratio["ratio"] == pytest.approx(ratio["guided"] / ratio["plain"]) and ratio["plain"] > 0
    if not torch.cuda.is_available():
        assert found["plan, KV cache"].status == NOT_HERE


def test_a_ratio_above_the_allowed_fails():
    assert costs._ratio("time", [1.0, 1.4], 1.5, "s", 1.0).status == PASSED
    finding = costs._ratio("time", [1.0, 1.6], 1.5, "s", 1.0)
    assert (
        finding.status == FAILED and "1.60 times the plain one's 1 s (allowed 1.5)" in finding.found
    )
