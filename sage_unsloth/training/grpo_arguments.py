"""TRL's `GRPOConfig` without the defaults that would silently train something else."""

from pathlib import Path
from typing import Any

from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.sampling.engine_choice import generation_arguments
from sage_unsloth.training.stage import common_arguments

QUIET_DEFAULTS: dict[str, tuple[Any, str]] = {
    "beta": (PAPER_BETA, "0 has no KL term, and a guide is refused"),
    "loss_type": ("grpo", "'dapo' weighs long completions more"),
    "use_bias_correction_kl": (False, "True is another estimator of the KL than the paper's"),
    "gradient_accumulation_steps": (1, "Unsloth's 2 doubles the prompts of a step"),
    "vllm_importance_sampling_mode": (
        "token_truncate",
        "whole completions are weighed, and long ones to nothing once min-p cuts the distribution",
    ),
    "vllm_importance_sampling_clip_max": (2.0, "3 is not what the authors' TRL 0.23 had"),
}
"""Field of `GRPOConfig` -> the value set here, and what its default would do instead.

`generation_kwargs` also excludes the pad token, because Unsloth ends a completion at the first one.
"""
EXPLICIT: dict[str, Any] = {
    # Unsloth replaces None by a value for the loss type, and TRL's defaults have changed before.
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "num_iterations": 1,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "scale_rewards": "group",
    "mask_truncated_completions": False,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.01,
}


def grpo_arguments(
    folder: Path,
    pad_token_id: int,
    *,
    rollouts: str = "transformers",
    save_steps: int = 50,
    precision: str = "auto",
    optim: str = "auto",
    **given: Any,
) -> Any:
    """The `GRPOConfig` of a run; `given` wins over the values set here.

    Args:
        pad_token_id: the token that is never sampled.
        rollouts: "transformers", "vllm" or "server".
        precision, optim: see `RlvrConfig`.
        given: fields of `GRPOConfig`.
    """
    import trl

    # Unsloth replaces the class: its arguments have fields that TRL's do not.
    generated: Any = trl
    arguments = {name: value for name, (value, _) in QUIET_DEFAULTS.items()} | EXPLICIT
    by_vllm = rollouts in ("vllm", "server")
    arguments |= {
        "use_vllm": by_vllm,
        "generation_kwargs": generation_arguments("vllm" if by_vllm else rollouts, pad_token_id),
    }
    arguments |= common_arguments(folder, save_steps, precision, optim)
    # The caller wins, also over the quiet defaults.
    return generated.GRPOConfig(**(arguments | given))
