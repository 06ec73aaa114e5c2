"""The engine of the rollouts: its choice, its start, and the engine of the preflight."""

from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.teacher import is_adapter
from sage_unsloth.models.tokenizers import load_stop_tokens
from sage_unsloth.runs.processes import world_size
from sage_unsloth.sampling.cpu_engine import start_beside
from sage_unsloth.sampling.engine_arguments import (
    check_arguments,
    check_temperature,
    parse_arguments,
)
from sage_unsloth.sampling.engine_choice import choose_rollouts
from sage_unsloth.sampling.engine_errors import engine_errors
from sage_unsloth.sampling.engines import Engine, SamplingConfig, TransformersEngine
from sage_unsloth.sampling.vllm_engine import VllmEngine
from sage_unsloth.trainers.backends import TRL
from sage_unsloth.training.by_trl import choose_trl_rollouts
from sage_unsloth.training.rlvr_config import RlvrConfig


def choose_rollout_engine(config: RlvrConfig) -> str:
    """ "vllm" or "transformers".

    Raises:
        ValueError: vLLM cannot run, or cannot have an adapter as teacher; engine arguments without
            vLLM.
    """
    if config.backend == TRL:
        rollouts = choose_trl_rollouts(config.rollouts)
    else:
        rollouts = choose_rollouts(
            # vLLM inside each of several processes was not tried.
            "transformers" if config.rollouts == "auto" and world_size() > 1 else config.rollouts,
            full_finetuning=config.full_finetuning,
            load_in_4bit=config.load_in_4bit,
        )
    check_temperature(rollouts, config.temperature)
    beside_unsloth = rollouts == "vllm" and config.backend != TRL
    if beside_unsloth and config.teacher and is_adapter(config.teacher):
        raise ValueError(
            f"with vLLM a teacher must be a model, got the adapter {config.teacher}. Merge it "
            "(python -m sage_unsloth export), or set rollouts=transformers"
        )
    if config.engine_arguments and not beside_unsloth:
        raise ValueError(
            "engine_arguments are for vLLM with Unsloth's trainer, got "
            f"{', '.join(config.engine_arguments)} with rollouts by {rollouts} and "
            f"backend={config.backend!r}. Leave them out, or set rollouts=vllm"
        )
    return rollouts


def rollout_sampling(config: RlvrConfig, num_samples: int, batch_size: int) -> SamplingConfig:
    """Sampling settings outside the trainer, equal to those of its rollouts."""
    return SamplingConfig(
        num_samples=num_samples,
        temperature=config.temperature,
        top_p=config.top_p,
        min_p=config.min_p,
        max_completion_length=config.max_completion_length,
        batch_size=batch_size,
        grade_seconds=config.grade_seconds,
        seed=config.seed,
    )


def engine_kwargs(config: RlvrConfig, *, with_vllm: bool) -> dict[str, Any]:
    """Arguments of `load_policy` for vLLM, which Unsloth's loader starts on a GPU."""
    if not with_vllm or not has_gpu():
        return {}
    return {"use_vllm": True, "engine_arguments": parse_arguments(config.engine_arguments)}


def start_engine(config: RlvrConfig, model: Any, model_path: str | Path, max_length: int) -> None:
    """Starts vLLM for a policy that was loaded without it, as on a CPU.

    Raises:
        ValueError: an argument that vLLM does not have.
        EngineError: the engine does not start.
    """
    # On a GPU Unsloth's loader has started it.
    if hasattr(model, "vllm_engine"):
        return
    arguments = parse_arguments(config.engine_arguments)
    # Checked first: an unknown argument would otherwise fail inside vLLM without a clear message.
    with engine_errors(str(model_path), "import"):
        check_arguments(arguments)
    with engine_errors(str(model_path), "start", refusals=False):
        start_beside(model, model_path, max_length, config.lora.rank, arguments)


def preflight_engine(
    model: Any, tokenizer: Any, model_path: str | Path, *, by_vllm: bool
) -> Engine:
    """An engine that samples from the policy that training begins with.

    Args:
        by_vllm: use vLLM, which samples without an adapter; only correct if the adapter is fresh.
    """
    if by_vllm:
        stops = load_stop_tokens(model_path, tokenizer)
        return VllmEngine.around(model.vllm_engine, tokenizer, stops)
    return TransformersEngine(model, tokenizer)
