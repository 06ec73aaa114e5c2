"""Arguments of `vllm.LLM`: this package's, and a user's (`--engine-set`)."""

import ast
import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.weights import adapter_config
from sage_unsloth.planning.memory import GIB

CACHE_BYTES = GIB
"""Limit for keys and values; a quarter of the free memory if that is less."""
HOTTEST = 2.0
DECIDED_BY = {
    "model": "--models",
    "tokenizer": "--models",
    "dtype": "--dtype",
    "max_model_len": "--max-tokens",
    "enable_lora": "MODEL+ADAPTER",
    "max_loras": "MODEL+ADAPTER",
    "max_lora_rank": "MODEL+ADAPTER",
    "max_cpu_loras": "MODEL+ADAPTER",
    "generation_config": "the sampling options",
    "seed": "--seed",
}
"""Argument -> the setting that decides it."""
ARGUMENTS_WITHOUT_EFFECT = (
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "block_size",
    "disable_log_stats",
    "load_format",
    "download_dir",
)
"""Arguments that affect speed and memory, but not results."""


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """`["enforce_eager=true", "gpu_memory_utilization=.5"]` as keyword arguments of `vllm.LLM`.

    Raises:
        ValueError: not NAME=VALUE, a repeated name, or one that another setting decides.
    """
    arguments: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(
                "an engine argument must be NAME=VALUE, such as gpu_memory_utilization=0.5, got "
                f"{text!r}"
            )
        if name in DECIDED_BY:
            raise ValueError(
                f"the engine's {name} follows from {DECIDED_BY[name]}, got {text!r}. Set that "
                "instead"
            )
        if name in arguments:
            raise ValueError(f"an engine argument must be given once, got {name} twice")
        arguments[name] = _value(value)
    return arguments


def _value(text: str) -> Any:
    """true, false and none in any case, numbers, lists; else the text itself."""
    word = text.strip().capitalize()
    try:
        return ast.literal_eval(word if word in ("True", "False", "None") else text)
    except (ValueError, SyntaxError):
        return text


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Imports vLLM and raises ValueError for an unknown argument, with the nearest name."""
    if not arguments:
        return
    from vllm import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in arguments:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            raise ValueError(
                f"vLLM has no engine argument {name}. "
                + (f"The nearest: {', '.join(near)}" if near else "See vLLM's engine arguments")
            )


def check_temperature(engine: str, temperature: float) -> None:
    """Raises ValueError for a temperature above `HOTTEST` with vLLM."""
    if engine == "vllm" and temperature > HOTTEST:
        raise ValueError(
            f"temperature must be <= {HOTTEST:g} with vLLM, got {temperature}. Lower it, or use "
            "transformers"
        )


def not_free(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that affect results; they distinguish record sets."""
    return {
        name: value for name, value in arguments.items() if name not in ARGUMENTS_WITHOUT_EFFECT
    }


def engine_arguments(adapters: Sequence[str | Path], max_length: int, dtype: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` besides the model."""
    arguments: dict[str, Any] = {
        "max_model_len": max_length,
        "dtype": dtype,  # by its own rule vLLM runs a float32 model in 16 bits
        "enable_prefix_caching": True,
        "generation_config": "vllm",  # not the model's own defaults, a repetition penalty say
        "seed": 0,
    }
    arguments |= {"gpu_memory_utilization": 0.9} if has_gpu() else cpu_arguments(max_length)
    if adapters:
        arguments |= lora_arguments([adapter_config(adapter)["r"] for adapter in adapters])
    return arguments


def lora_arguments(ranks: Sequence[int]) -> dict[str, Any]:
    """Arguments for adapters of these ranks, one at a time."""
    # vLLM knows ranks of 8, 16, 32 and so on.
    rank = max(8, 1 << (max(ranks) - 1).bit_length())
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": rank,
        "max_cpu_loras": len(ranks),
    }


def cpu_arguments(max_length: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` on a CPU.

    Compiling takes minutes, and vLLM 0.32 cannot rewind a seeded CPU generator, as it must if a
    prompt is computed in chunks.

    Args:
        max_length: prompt and completion together, tokens.
    """
    return {
        "enforce_eager": True,
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, max_length),
        "kv_cache_memory_bytes": _cache_bytes(),
    }


def _cache_bytes() -> int:
    import psutil

    return min(CACHE_BYTES, psutil.virtual_memory().available // 4)
