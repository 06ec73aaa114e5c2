"""Checks that the trainer's settings after construction are those that `run.json` records.

Trainers fill in and override arguments: Unsloth's generated config turns an explicit
`scale_rewards="group"` into "none" for `loss_type="dr_grpo"`, with a line on the terminal. Such a
run is not the one that its record describes.
"""

from typing import Any

from sage_unsloth.runs.processes import world_size
from sage_unsloth.runs.settings import values_where
from sage_unsloth.training.rlvr_config import RlvrConfig

COPIED = (
    "beta",
    "num_generations",
    "max_completion_length",
    "loss_type",
    "scale_rewards",
    "entropy_coef",
    "epsilon_high",
    "top_entropy_quantile",
    "temperature",
    "top_p",
    "vllm_importance_sampling_correction",
)
"""Attributes that the trainer copies from its config and reads from the copy."""


def trainer_arguments(config: RlvrConfig, *, unsloth: bool) -> dict[str, Any]:
    """The settings that the trainer's config has under the same name (`trainer=True`).

    Exception: with "dr_grpo", Unsloth's config keeps `scale_rewards="group"` only if it gets None.
    """
    arguments = values_where(config, "trainer")
    if unsloth and config.loss_type == "dr_grpo" and config.scale_rewards == "group":
        arguments["scale_rewards"] = None
    return arguments


def check_trainer(trainer: Any, config: RlvrConfig, rollouts: str) -> None:
    """Compares a constructed trainer with the recorded settings.

    Args:
        rollouts: "vllm", "transformers" or "server".

    Raises:
        ValueError: the trainer has another value of a setting.
    """
    for name, (expected, actual) in _compare(trainer, config, rollouts).items():
        if actual != expected:
            raise ValueError(
                f"the trainer must train with the settings of run.json, got {name}={actual!r} from "
                f"{type(trainer).__name__} for {name}={expected!r}. Set {name} to a value that the "
                "trainer accepts, or install the tested versions (python -m sage_unsloth doctor)"
            )


def _compare(trainer: Any, config: RlvrConfig, rollouts: str) -> dict[str, tuple[Any, Any]]:
    """(expected, actual) of each setting."""
    args = trainer.args
    given = values_where(config, "trainer")
    pairs = {name: (value, getattr(args, name)) for name, value in given.items()}
    # Both places: the trainer copies some settings and reads only the copy.
    pairs |= {f"trainer.{name}": (getattr(config, name), getattr(trainer, name)) for name in COPIED}
    share = config.completions_per_step // world_size()
    micro_batch = config.micro_batch_size or share
    # All completions of a prompt must meet in one loss.
    if config.credit == "sequence":
        micro_batch = share
    pairs |= {
        "trainer.epsilon": (config.epsilon, trainer.epsilon_low),
        "micro_batch_size": (micro_batch, args.per_device_train_batch_size),
        "prompts_per_step": (
            config.prompts_per_step,
            args.per_device_train_batch_size
            * args.gradient_accumulation_steps
            * world_size()
            / args.num_generations,
        ),
        # Recorded as a share, passed as steps.
        "warmup_ratio": (round(config.warmup_ratio * config.max_steps), args.warmup_steps),
        "min_p": (config.min_p, args.min_p or 0.0),
        "trainer.min_p": (config.min_p, trainer.min_p or 0.0),
        "kl_estimator": (config.kl_estimator == "k3-is", args.use_bias_correction_kl),
        "rollouts": (rollouts in ("vllm", "server"), trainer.use_vllm),
    }
    if rollouts == "server":
        pairs["vllm_server"] = (config.vllm_server, args.vllm_server_base_url)
    # With "auto" the trainer decides.
    if config.precision != "auto":
        formats = (config.precision == "bfloat16", config.precision == "float16")
        pairs["precision"] = (formats, (args.bf16, args.fp16))
    adapters = getattr(trainer.model, "peft_config", {})
    pairs["full_finetuning"] = (config.full_finetuning, not adapters)
    # An adapter that is trained further has its own settings.
    if adapters and config.reference == "sft":
        adapter, lora = adapters["default"], config.lora
        expected = (lora.rank, lora.alpha, lora.dropout)
        pairs["lora"] = (expected, (adapter.r, adapter.lora_alpha, adapter.lora_dropout))
    return pairs
