"""A Qwen2 of any shape with random weights, for work that needs no trained model.

Speed and memory do not depend on the weights' values, and numerical comparisons work with any.
"""

from pathlib import Path
from typing import Any

from sage_unsloth.models.embedded import BASE_MODEL, data_folder


def save_random_model(
    folder: Path,
    hidden_size: int,
    vocab_size: int | None = None,
    *,
    num_layers: int = 1,
    dtype: str = "float32",
    head_std: float | None = None,
    **shape: Any,
) -> Path:
    """Saves a random Qwen2 with the embedded model's tokenizer; its folder.

    Args:
        hidden_size: a multiple of 64, the size of a head.
        vocab_size: None takes the tokenizer's.
        head_std: the standard deviation of an untied output head; None ties it to the embedding.
            Logits have a spread of about head_std · √hidden_size.
        shape: further fields of `Qwen2Config`.

    Raises:
        ValueError: the hidden size is not a multiple of 64, or the vocabulary is smaller than the
            tokenizer's.
    """
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(data_folder() / BASE_MODEL)
    vocab_size = len(tokenizer) if vocab_size is None else vocab_size
    if hidden_size < 64 or hidden_size % 64:
        raise ValueError(
            f"the hidden size must be a multiple of 64, the size of a head, got {hidden_size}"
        )
    if vocab_size < len(tokenizer):
        raise ValueError(
            f"the vocabulary must hold the embedded tokenizer's {len(tokenizer)} tokens, got "
            f"{vocab_size}"
        )
    torch.manual_seed(0)
    heads = hidden_size // 64
    settings: dict[str, Any] = dict(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=head_std is None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(Qwen2Config(**(settings | shape)))
    if head_std is not None:
        torch.nn.init.normal_(model.lm_head.weight, std=head_std)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
