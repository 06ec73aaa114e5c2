"""What notebooks train by the card: a T4, an L4, an A100, none."""

from pathlib import Path

import pytest

from sage_unsloth import plan_for_card
from sage_unsloth.models.embedded import data_folder
from sage_unsloth.planning.presets import CARDS, model_preset
from sage_unsloth.training.starting import rlvr_config

PAPER, SMALL = "qwen2.5-math-7b", "qwen3-1.7b"
T4, L4, A100 = 16, 24, 40  # the sizes on their boxes


@pytest.mark.parametrize(
    ("size", "model", "rollouts", "micro_batch"),
    [
        (T4, "Qwen/Qwen3-1.7B", "transformers", 1),
        (L4, "Qwen/Qwen2.5-Math-7B", "vllm", 1),
        (A100, "Qwen/Qwen2.5-Math-7B", "vllm", 4),
    ],
)
def test_the_card_decides(size, model, rollouts, micro_batch):
    card = plan_for_card(PAPER, SMALL, memory=size)
    assert card.gpu and card.model == model and not card.load_in_4bit
    assert (card.rollouts, card.micro_batch) == (rollouts, micro_batch)
    assert f"{CARDS[str(size)].memory_gib} GiB" in card.reasons[0] and "16 bits" in card.reasons[0]
    assert any("in 16 bits it needs 17.3 GiB" in reason for reason in card.reasons) == (size == T4)
    assert card._repr_markdown_().startswith(f"**{card.reasons[0]}**\n\n- ")


@pytest.mark.parametrize("size", [T4, L4, A100])
def test_sizes_are_those_of_the_command(size):
    """Bits apart: on a T4 the commands take 4 bits for every model."""
    for model in (PAPER, SMALL, "llama-3.2-1b-instruct"):
        card = plan_for_card(model, memory=size)
        config = rlvr_config(model_preset(model), CARDS[str(size)].memory_gib)
        assert (card.max_prompt, card.max_completion, card.steps) == (
            config.max_prompt_length, config.max_completion_length, config.max_steps,
        )  # fmt: skip
        assert (card.prompts_per_step, card.num_generations, card.micro_batch) == (
            config.prompts_per_step, config.num_generations, config.micro_batch_size,
        )  # fmt: skip
        assert card.recompute_logits == config.recompute_logits
        assert card.gpu_memory_utilization == config.gpu_memory_utilization


def test_4_bits_where_16_do_not_fit():
    card = plan_for_card(PAPER, memory=T4)
    assert card.load_in_4bit and "in 4 bits" in card.reasons[0]
    with pytest.raises(ValueError, match=r"must fit the GPU's 3\.1 GiB"):
        plan_for_card(PAPER, memory=3.1)


def test_without_a_gpu_the_embedded_model_and_how_to_get_one(tmp_path):
    card = plan_for_card(tmp_path / "sft/model", PAPER)
    assert not card.gpu and card.model == "arithmetic-base"
    assert "instead of qwen2.5-math-7b" in card.reasons[0]
    assert "Runtime > Change runtime type > T4 GPU" in card.reasons[0]
    assert "no such folder" in card.reasons[1]
    config = rlvr_config(model_preset("arithmetic-base"))
    assert (card.prompts_per_step, card.num_generations, card.micro_batch) == (
        config.prompts_per_step, config.num_generations, config.completions_per_step,
    )  # fmt: skip


def test_a_folder_that_another_notebook_left(tmp_path):
    """The embedded model's is taken without a GPU, and passed over with one."""
    small = Path(data_folder() / "arithmetic-base")
    assert plan_for_card(small, PAPER).model == str(small)
    card = plan_for_card(small, SMALL, memory=T4)
    assert card.model == "Qwen/Qwen3-1.7B" and "trained without a GPU" in card.reasons[1]
    large = tmp_path / "model"
    large.mkdir()
    (large / "model.safetensors").write_bytes(bytes(33 << 20))
    card = plan_for_card(large, PAPER)
    assert card.model == "arithmetic-base" and "too large" in card.reasons[1]
