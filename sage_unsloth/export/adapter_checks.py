"""Checks of a trained adapter: it is not zero, it changes logits, merging keeps them."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.sampling.record_sets import prompt_ids

logger = logging.getLogger(__name__)

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PROMPTS = ("12*6=?", "17*6=?", "3+4=?", "19*8=?")
PARITY_TOKENS = 32


def check_adapter(adapter: Path) -> float:
    """The largest |B| of an adapter; ValueError for missing files, non-finite weights, or B = 0."""
    from safetensors.torch import load_file

    missing = [name for name in ADAPTER_FILES if not (adapter / name).exists()]
    if missing:
        raise ValueError(
            f"an adapter must have {' and '.join(ADAPTER_FILES)}, but {adapter} lacks {missing[0]}"
        )
    weights = load_file(adapter / ADAPTER_FILES[1])
    broken = [name for name, weight in weights.items() if not weight.isfinite().all()]
    if broken:
        raise ValueError(
            f"an adapter's weights must be finite, but {broken[0]} in {adapter} is not"
        )
    largest = max((float(w.abs().max()) for n, w in weights.items() if "lora_B" in n), default=0.0)
    if largest == 0:
        raise ValueError(f"an adapter must not be zero, but every B in {adapter} is")
    return largest


def check_effect(model: Any, tokenizer: Any, prompt: str = PROMPTS[0]) -> float:
    """The largest change of a logit by the adapter, on one prompt.

    Noise is the difference of two passes without the adapter, and float32's rounding.

    Raises:
        ValueError: logits are not finite, or the change is not above noise.
    """
    import torch

    ids = _prompt_ids(model, tokenizer, prompt)
    with model.disable_adapter():
        without, again = _logits(model, ids), _logits(model, ids)
    with_adapter = _logits(model, ids)
    if not (with_adapter.isfinite().all() and without.isfinite().all()):
        raise ValueError("logits must be finite with and without the adapter")
    noise = float((again - without).abs().max())
    noise += torch.finfo(torch.float32).eps * float(without.abs().max())
    change = float((with_adapter - without).abs().max())
    if change <= 4 * noise:
        raise ValueError(
            f"an adapter must change the logits by more than noise ({noise:.1e}), but it changes "
            f"them by {change:.1e}. Is it the adapter of this model?"
        )
    return change


@dataclass(frozen=True)
class Answers:
    """Greedy completions of a model with its adapter.

    Attributes:
        starts: position of each prompt's last token, whose logits choose the first new token.
        with_adapter, without: logits of `ids`.
    """

    ids: list[Any]
    starts: list[int]
    with_adapter: list[Any]
    without: list[Any]


def greedy_answers(model: Any, tokenizer: Any, prompts: Sequence[str] = PROMPTS) -> Answers:
    """Answers to compare the merged model with; call it before merging."""
    import torch

    answers = Answers([], [], [], [])
    for prompt in prompts:
        ids = _prompt_ids(model, tokenizer, prompt)
        with torch.inference_mode():
            longer = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=PARITY_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        answers.ids.append(longer)
        answers.starts.append(ids.shape[1] - 1)
        answers.with_adapter.append(_logits(model, longer))
        with model.disable_adapter():
            answers.without.append(_logits(model, longer))
    return answers


def check_parity(model: Any, answers: Answers, *, exact: bool = True) -> dict[str, float]:
    """Whether a merged model prefers the same tokens as base and adapter, on their greedy text.

    Args:
        exact: only rounding may differ. False after training on 4-bit weights, since the merged
            model has the original ones.

    Returns:
        `agreement`: share of tokens. `distance`: mean |logit difference| to base and adapter,
            divided by that of the base alone: the cost of 16-bit rounding in units of the
            training's effect. `kl`: mean KL(base and adapter ‖ model), nats a token.

    Raises:
        ValueError: with `exact`, a token differs despite a clear preference (beyond 16-bit
            rounding).
    """
    agree = total = 0
    apart = changed = divergence = 0.0
    for ids, start, expected, base in zip(
        answers.ids, answers.starts, answers.with_adapter, answers.without, strict=True
    ):
        result = _logits(model, ids)
        expected, result, base = (x[0, start:-1] for x in (expected, result, base))
        apart += float((result - expected).abs().mean())
        changed += float((base - expected).abs().mean())
        logps, others = expected.double().log_softmax(-1), result.double().log_softmax(-1)
        divergence += float((logps.exp() * (logps - others)).sum())
        chosen, preferred = result.argmax(-1), expected.argmax(-1)
        gap = expected.max(-1).values - expected.gather(-1, chosen[:, None])[:, 0]
        rounding = 4 * 2**-8 * float(expected.abs().max())
        if exact and float(gap.max()) > rounding:
            raise ValueError(
                "a merged model must answer as base and adapter do, but it prefers another token "
                f"by {float(gap.max()):.2f} logits, of which rounding explains {rounding:.2f}. "
                "Export the adapter instead, and report this"
            )
        agree += int((chosen == preferred).sum())
        total += len(chosen)
    distance = apart / changed if changed else float("inf")
    if exact and distance > 0.5:
        logger.warning(
            "rounding to 16 bits moves the merged model by %.0f %% of what training changed: share "
            "the adapter instead",
            100 * distance,
        )
    return {"agreement": agree / total, "distance": distance, "kl": divergence / total}


def _prompt_ids(model: Any, tokenizer: Any, prompt: str) -> Any:
    import torch

    return torch.tensor([prompt_ids(tokenizer, prompt)], device=model.device)


def _logits(model: Any, ids: Any) -> Any:
    import torch

    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.float().cpu()
