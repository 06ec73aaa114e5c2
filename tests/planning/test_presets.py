"""Parameter counts against the models that transformers builds, without weights, from the same
numbers.
"""

import json

import pytest
from meta_models import SHAPES, config_of, meta_model

from sage_unsloth.models.embedded import data_folder
from sage_unsloth.models.loading import LORA_TARGETS
from sage_unsloth.planning.architecture import read_architecture
from sage_unsloth.planning.presets import (
    CARDS,
    MODELS,
    ModelPreset,
    model_preset,
    nearest_card,
)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_real_model(name):
    family, architecture = SHAPES[name]
    model = meta_model(config_of(architecture, family))
    assert architecture.num_parameters == sum(p.numel() for p in model.parameters())
    linear = [
        p
        for key, p in model.named_parameters()
        if key.endswith(".weight") and "proj" in key and "lm_head" not in key
    ]
    assert architecture.linear_parameters == sum(p.numel() for p in linear)
    assert read_architecture(model.config) == architecture


def test_linear_layers_are_those_that_get_an_adapter():
    assert tuple(MODELS["qwen2.5-math-7b"].architecture.linear_shapes) == LORA_TARGETS


@pytest.mark.smoke
def test_published_sizes():
    """The figures of the model cards, in billions."""
    sizes = {
        name: round(preset.architecture.num_parameters / 1e9, 2) for name, preset in MODELS.items()
    }
    assert sizes["qwen2.5-math-7b"] == sizes["r1-distill-qwen-7b"] == 7.62
    assert sizes["qwen2.5-math-1.5b-instruct"] == 1.54
    assert sizes["qwen2.5-3b-instruct"] == 3.09
    assert sizes["llama-3.2-1b-instruct"] == 1.24
    # Qwen rounds to 1.7 and 0.6 and counts the tied embeddings once.
    assert (sizes["qwen3-1.7b"], sizes["qwen3-0.6b"]) == (1.72, 0.6)


def test_the_embedded_model_is_the_one_on_disk():
    preset = MODELS["arithmetic-base"]
    found = model_preset(data_folder() / "arithmetic-base")
    assert found.architecture == preset.architecture
    assert found.name == "arithmetic-base"
    pretrain = json.loads((data_folder() / "arithmetic-base" / "config.json").read_text())
    assert pretrain["dtype"] == preset.dtype


@pytest.mark.smoke
def test_paper_settings():
    r1 = MODELS["r1-distill-qwen-7b"]
    assert (r1.max_prompt_length, r1.max_completion_length, r1.sft_first) == (2048, 6144, False)
    base = MODELS["qwen2.5-math-7b"]
    assert base.sft_first and not base.full_finetuning
    assert base.max_prompt_length + base.max_completion_length == base.sft_max_length == 2048
    for name in ("qwen2.5-math-1.5b-instruct", "qwen2.5-3b-instruct"):
        assert MODELS[name].full_finetuning


def test_a_preset_by_its_hub_id():
    assert model_preset("Qwen/Qwen2.5-Math-7B") is MODELS["qwen2.5-math-7b"]
    assert all(model_preset(name) is preset for name, preset in MODELS.items())


def test_longer_than_the_positions_is_refused():
    architecture = MODELS["qwen2.5-math-7b"].architecture
    with pytest.raises(ValueError, match=r"must fit the 4096 positions of x, got 2048 \+ 6144"):
        ModelPreset(
            name="x",
            hub_id="x",
            architecture=architecture,
            max_prompt_length=2048,
            max_completion_length=6144,
        )


def test_an_unknown_model_names_the_presets():
    with pytest.raises(
        OSError, match=r"must be one of qwen2.5-math-7b, .*, got no/such.*give the path"
    ):
        model_preset("no/such")


def test_other_families_and_biases_are_refused():
    with pytest.raises(ValueError, match="got model_type='gpt2'"):
        read_architecture({"model_type": "gpt2"})
    for option in ("attention_bias", "mlp_bias"):
        with pytest.raises(ValueError, match="attention_bias or mlp_bias"):
            read_architecture({"model_type": "llama", option: True})


@pytest.mark.parametrize(
    ("memory", "card"),
    [(8, "16"), (14.6, "16"), (23.6, "24"), (39.5, "40"), (47.5, "48"), (139, "80")],
)
def test_nearest_card(memory, card):
    assert nearest_card(memory).name == card


def test_unsloths_standby_utilisation_is_the_cards():
    """Unsloth's standby mode overrides the setting by the card's size; its source is read for the
    same figures.
    """
    import importlib.util
    import re
    from pathlib import Path

    source = Path(importlib.util.find_spec("unsloth_zoo").origin).with_name("vllm_utils.py")
    text = source.read_text(encoding="utf-8")
    text = text[text.index("# Lowered tiers for <= 24GB GPUs") :]
    text = text[: text.index("if UNSLOTH_ENABLE_LOGGING")]
    tiers = [
        (float(size), float(share))
        for size, share in re.findall(
            r"if\s+ten_percent >= ([\d.]+): standby_target_gpu_util = ([\d.]+)", text
        )
    ]
    assert len(tiers) == 5
    for card in CARDS.values():
        if card.use_vllm:
            share = next(share for size, share in tiers if card.memory_gib / 10 >= size)
            assert card.gpu_memory_utilization == pytest.approx(share * 0.95, abs=0.01)
