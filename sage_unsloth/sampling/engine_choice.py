"""What draws the completions of RL: vLLM inside Unsloth on a GPU, transformers elsewhere; one
setting decides.

The sampling settings must reach the engine. On vLLM they pass through GRPOConfig, TRL's
`VLLMGeneration` and Unsloth's wrapper before they are `SamplingParams`, so every call of the engine
is compared with what was asked for.
"""

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

ROLLOUTS = ("auto", "vllm", "transformers")
VLLM_CAPABILITY = (8, 0)
"""The oldest compute capability that the pinned vLLM runs on; 0.11.2 was the last for 7.5 (a
T4).
"""

logger = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """Completions would be drawn otherwise than configured."""


def why_no_vllm(*, full_finetuning: bool = False, load_in_4bit: bool = False) -> str | None:
    """What speaks against vLLM on this machine, with the remedy, or None."""
    import torch

    if not torch.cuda.is_available():
        return "it needs a CUDA device; this machine has none"
    capability = torch.cuda.get_device_capability()
    if capability < VLLM_CAPABILITY:
        return (
            f"the pinned vLLM needs compute capability "
            f"{VLLM_CAPABILITY[0]}.{VLLM_CAPABILITY[1]}; this card has "
            f"{capability[0]}.{capability[1]} (vllm 0.11.2 was the last for a T4)"
        )
    if importlib.util.find_spec("vllm") is None:
        return 'it is not installed; pip install "sage_unsloth[vllm]"'
    if load_in_4bit and importlib.util.find_spec("vllm_bnb_plugin") is None:
        return "from 0.28 on it reads 4-bit weights by another package; pip install vllm-bnb-plugin"
    if full_finetuning:
        return "Unsloth shares weights with vLLM for LoRA only, and full fine-tuning has no adapter"
    return None


def choose_rollouts(wanted: str, **run: bool) -> str:
    """ "vllm" or "transformers"; a fall back from "auto" is said aloud.

    Raises:
        ValueError: an unknown choice, or "vllm" where it cannot run.
    """
    if wanted not in ROLLOUTS:
        raise ValueError(f"rollouts must be one of {', '.join(ROLLOUTS)}; got {wanted!r}")
    if wanted == "transformers":
        return wanted
    reason = why_no_vllm(**run)
    if reason is None:
        return "vllm"
    if wanted == "vllm":
        raise ValueError(
            f"rollouts='vllm' cannot be had: {reason}; or set rollouts to 'auto' or 'transformers'"
        )
    logger.info("Completions by transformers: vLLM is not used because %s.", reason)
    return "transformers"


def generation_arguments(rollouts: str, pad_token_id: int) -> dict[str, Any]:
    """`GRPOConfig.generation_kwargs`: a sampled pad token would be taken for the end of its
    completion, so none is sampled.
    """
    if rollouts == "vllm":
        return {"logit_bias": {pad_token_id: -100.0}}
    return {"suppress_tokens": [pad_token_id]}


def check_calls(engine: Any, expected: Mapping[str, Any]) -> None:
    """Compare the sampling parameters of every call of a vLLM engine with `expected` (names of
    `SamplingParams`).

    Raises, in that call:
        RolloutError: a setting did not reach the engine.
    """
    generate = engine.generate

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        for params in given if isinstance(given, list) else [given]:
            found = {name: getattr(params, name, "absent") for name in expected}
            if found != dict(expected):
                raise RolloutError(
                    f"the engine must sample as configured; it was told {found}, expected "
                    f"{dict(expected)}; "
                    "use the tested versions (python -m sage_unsloth doctor), or "
                    "rollouts='transformers'"
                )
        return generate(*args, **kwargs)

    engine.generate = checked
