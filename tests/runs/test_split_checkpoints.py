"""Checkpoints of a model that is split among processes, in the files that FSDP and DeepSpeed
write.
"""

import pytest
import torch
from safetensors.torch import save_file

from sage_unsloth.runs.checkpoints import last_checkpoint

FILES = {
    "FSDP": ("pytorch_model_fsdp.bin", "optimizer.bin"),
    "DeepSpeed": (
        "global_step3/mp_rank_00_model_states.pt",
        "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
}


@pytest.fixture(params=FILES)
def checkpoint(request, tmp_path, monkeypatch):
    """A whole one of two processes, and what is its own of the kind."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    folder = tmp_path / "checkpoint-3"
    (folder / "global_step3").mkdir(parents=True)
    (folder / "trainer_state.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, folder / "adapter_model.safetensors")
    others = ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")
    for name in (*FILES[request.param], *others):
        torch.save({"x": torch.zeros(9)}, folder / name)
    if request.param == "DeepSpeed":
        (folder / "latest").write_text("global_step3")
    return folder, FILES[request.param]


def test_a_whole_one_is_found_and_a_damaged_one_passed_over(checkpoint):
    folder, own = checkpoint
    assert last_checkpoint(folder.parent) == folder
    for name in own:
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[: len(kept) // 2])
        assert last_checkpoint(folder.parent) is None, name
        (folder / name).write_bytes(kept)
    assert last_checkpoint(folder.parent) == folder


def test_one_that_lacks_a_part_is_passed_over(checkpoint):
    folder, own = checkpoint
    (folder / own[-1]).unlink()
    assert last_checkpoint(folder.parent) is None
