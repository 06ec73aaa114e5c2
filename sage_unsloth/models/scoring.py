"""Log-probabilities and entropies of given completions, by a plain forward pass of transformers.

Shapes: B completions, T tokens of the longest one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LOGITS_AT_ONCE = 2**28
"""Largest number of logits in one forward pass: half a GiB in 16 bits."""


def score(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float = 1.0,
) -> tuple["Tensor", "Tensor", "Tensor"]:
    """Log-probability of each completion token, and the entropy before it, both at `temperature`.

    Args:
        model: a causal language model of transformers or peft.
        prompts, completions: token ids; no completion may be empty.

    Returns:
        `logps` log π(y_t | s_t), `entropies` H_t over the whole vocabulary, and `mask`, each (B, T)
        float32 on the CPU, in nats; 0 outside the mask.

    Raises:
        ValueError: an empty prompt or completion, or a temperature that is not > 0.
    """
    import torch

    if not temperature > 0:
        raise ValueError(
            f"temperature must be > 0 because logits are divided by it, got {temperature}"
        )
    if not completions or not all(map(len, prompts)) or not all(map(len, completions)):
        raise ValueError("completions to score and their prompts must have at least one token each")
    rows = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
    longest, first = max(map(len, rows)), min(map(len, prompts)) - 1
    ids, attention = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):  # padded on the right, where nothing looks at it
        ids[number, : len(row)] = torch.tensor(row)
        attention[number, : len(row)] = 1
    with torch.inference_mode():
        # The logits before the first completion token and later ones are enough.
        logits = model(
            input_ids=ids.to(model.device),
            attention_mask=attention.to(model.device),
            logits_to_keep=longest - first,
        ).logits
    logps, entropies, mask = torch.zeros(3, len(rows), max(map(len, completions)))
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        start = len(prompt) - 1 - first
        # A row at a time: (T, V) in float32.
        log_probs = torch.log_softmax(
            logits[number, start : start + len(completion)].float() / temperature, -1
        )
        targets = torch.tensor(completion, device=log_probs.device)[:, None]
        size = slice(0, len(completion))
        logps[number, size] = log_probs.gather(-1, targets)[:, 0].cpu()
        entropies[number, size] = torch.special.entr(log_probs.exp()).sum(-1).cpu()
        mask[number, size] = 1.0
    return logps, entropies, mask
