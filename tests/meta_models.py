"""Models as transformers builds them from an architecture's numbers, on the meta device: shapes
without weights.
"""

from sage_unsloth.planning.presets import MODELS, Architecture

FAMILIES = {"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "llama": "LlamaConfig"}


def config_of(architecture, family="qwen2"):
    import transformers

    a = architecture
    return getattr(transformers, FAMILIES[family])(
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        tie_word_embeddings=a.tied_embeddings,
        max_position_embeddings=a.max_position_embeddings,
    )


def meta_model(config):
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


SMALL = dict(
    num_layers=3,
    hidden_size=24,
    intermediate_size=40,
    num_heads=6,
    num_kv_heads=2,
    vocab_size=31,
    max_position_embeddings=64,
)
FAMILY = {"qwen3": "qwen3", "llama": "llama"}  # by how a preset's name begins
SHAPES = {
    name: (FAMILY.get(name.partition("-")[0], "qwen2"), preset.architecture)
    for name, preset in MODELS.items()
} | {
    "llama": ("llama", Architecture(**SMALL, head_dim=4, tied_embeddings=False, qkv_bias=False)),
    "qwen3, heads of their own size": (
        "qwen3",
        Architecture(**SMALL, head_dim=16, tied_embeddings=True, qkv_bias=False, qk_norm=True),
    ),
}
