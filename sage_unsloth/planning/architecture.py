"""The sizes of a model that determine its memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a Llama-type decoder, named as in transformers' config.json.

    Attributes:
        num_kv_heads: below `num_heads` with grouped-query attention.
        tied_embeddings: the output head is the embedding.
        qkv_bias: q, k and v projections have a bias (Qwen2).
        qk_norm: queries and keys are normalised per head (Qwen3).
        max_position_embeddings: the longest text, tokens.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    qkv_bias: bool = True
    qk_norm: bool = False
    max_position_embeddings: int

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear map in a layer, by its name."""
        hidden, wide = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (hidden, q),
            "k_proj": (hidden, kv),
            "v_proj": (hidden, kv),
            "o_proj": (q, hidden),
            "gate_proj": (hidden, wide),
            "up_proj": (hidden, wide),
            "down_proj": (wide, hidden),
        }

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear maps, which 4-bit quantisation covers."""
        return self.num_layers * sum(a * b for a, b in self.linear_shapes.values())

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, and of an untied output head."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)

    @property
    def num_parameters(self) -> int:
        """All weights: embeddings, linear maps, biases, and norms (two a layer and a last one)."""
        small = 2 * self.hidden_size
        small += (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * self.qkv_bias
        small += 2 * self.head_dim * self.qk_norm
        norms = self.num_layers * small + self.hidden_size
        return self.embedding_parameters + self.linear_parameters + norms


def read_architecture(config: Any) -> Architecture:
    """The sizes in a transformers config.

    Args:
        config: an `AutoConfig` or its dict.

    Raises:
        ValueError: a family or an option that is not supported here, or a missing number.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    family = values.get("model_type")
    if family not in ("qwen2", "qwen3", "llama"):
        raise ValueError(
            f"memory is computed for the families qwen2, qwen3 and llama, got model_type={family!r}"
        )
    if values.get("mlp_bias") or (family != "qwen2" and values.get("attention_bias")):
        raise ValueError("memory is not computed for configs with attention_bias or mlp_bias")
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    absent = {*sizes, "vocab_size", "max_position_embeddings"} - values.keys()
    if absent:
        raise ValueError(
            f"a config.json must give the model's sizes, but lacks {', '.join(sorted(absent))}"
        )
    heads = values["num_attention_heads"]
    return Architecture(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        vocab_size=values["vocab_size"],
        tied_embeddings=bool(values.get("tie_word_embeddings")),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        max_position_embeddings=values["max_position_embeddings"],
    )
