"""Defaults that TRL's own trainer needs, because Unsloth is not there to set them.

optimiser       AdamW in 32 bits (Unsloth's 8-bit AdamW needs bitsandbytes)
precision       autocast to the GPU's 16-bit format; float32 on a CPU
recomputation   of activations, on a GPU, by transformers
π_ref           always the model without its adapter
"""

from typing import Any

from sage_unsloth.models.device import has_gpu, sixteen_bit_dtype
from sage_unsloth.runs.processes import is_sharded, world_size
from sage_unsloth.sampling.engine_choice import why_no_vllm
from sage_unsloth.sampling.server_calls import check_client
from sage_unsloth.trainers.backends import TRL
from sage_unsloth.training.rlvr_config import RlvrConfig

REFERENCE = "ref"
"""Name of the reference adapter that TRL adds to a model that already has an adapter."""


PLANNED_BY_TRL = {
    "optimizer_8bit": False,
    "gradient_checkpointing": "layers",
    "recompute_logits": True,
}
"""Fields of `planning.setup.Setup` for TRL's own trainer, whose loss keeps no logits."""


def check_trl_config(config: RlvrConfig) -> None:
    """Raises ValueError for settings that the chosen backend does not support."""
    if config.backend != TRL:
        if config.rollouts == "server":
            raise ValueError(
                f"rollouts='server' needs TRL's own trainer, got backend={config.backend!r}. Set "
                "backend=trl, or rollouts=auto"
            )
        return
    if config.load_in_4bit:
        raise ValueError(
            "load_in_4bit needs Unsloth, got backend='trl'. Set load_in_4bit=False, or "
            "backend=unsloth"
        )
    if config.recompute_logits:
        raise ValueError(
            "recompute_logits is for Unsloth's loss, got it with backend='trl'. Set "
            "recompute_logits=False"
        )
    if config.rollouts == "server":
        check_client()
    reason = None
    if config.rollouts == "vllm":
        reason = why_no_vllm() if has_gpu() else "beside TRL's own trainer it needs a CUDA device"
    if reason is not None:
        raise ValueError(
            f"rollouts='vllm' is not available: {reason}. Or set rollouts to 'auto' or "
            "'transformers'"
        )
    share = config.completions_per_step // world_size()
    # A prompt's completions must meet in one loss, and TRL's loss has no smaller parts.
    if config.credit == "sequence" and (config.micro_batch_size or share) != share:
        raise ValueError(
            "credit='sequence' with backend='trl' needs a process's whole share of a step "
            f"({share}) in one micro-batch, got micro_batch_size={config.micro_batch_size}. Set "
            "micro_batch_size=None, or backend=unsloth"
        )
    if is_sharded() and config.eval_steps:
        raise ValueError(
            "evaluations on held-out rows are not supported under FSDP and DeepSpeed, got "
            f"eval_steps={config.eval_steps}. Set eval_steps=0, and evaluate the trained adapter "
            "afterwards"
        )


def choose_trl_rollouts(expected: str) -> str:
    """The engine of the rollouts: "auto" is transformers; "vllm" runs in each process."""
    return "transformers" if expected == "auto" else expected


def common_trl_arguments() -> dict[str, Any]:
    """Arguments of TRL's trainers that replace Unsloth's."""
    sixteen = sixteen_bit_dtype() if has_gpu() else None
    return {
        "bf16": sixteen == "bfloat16",
        "fp16": sixteen == "float16",
        "gradient_checkpointing": has_gpu(),
        # Reentrant checkpointing drops the gradient where no input of a block requires one, as with
        # a frozen embedding under an adapter.
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        # Every trained weight is used in each step, and looking for others costs a pass over the
        # graph.
        "ddp_find_unused_parameters": False,
    }


def rollout_arguments(config: RlvrConfig, rollouts: str) -> dict[str, Any]:
    """Arguments of TRL's GRPO trainer that choose the vLLM for the rollouts."""
    if rollouts == "vllm":
        return {
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": config.gpu_memory_utilization,
            # vLLM plans its cache for the model's own length otherwise, which may not fit.
            "vllm_max_model_length": config.max_prompt_length + config.max_completion_length,
        }
    if rollouts == "server":
        return {"vllm_mode": "server", "vllm_server_base_url": config.vllm_server}
    return {}


def keep_base_as_reference(model: Any) -> None:
    """Removes the adapter that TRL adds as the reference: π_ref is the model without adapters.

    TRL scores the reference with a copy of the initial adapter. For a fresh adapter, whose B is 0,
    that is the same; for one trained before (`reference="base"`) it is not. Without the copy TRL
    scores with adapters off.
    """
    if REFERENCE in getattr(model, "peft_config", {}):
        model.delete_adapter(REFERENCE)
