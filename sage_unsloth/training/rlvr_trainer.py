"""The GRPO trainer, Unsloth's or TRL's own, configured by `RlvrConfig`, and additional metrics."""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.grading.total_reward import TotalReward
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.prompts import turns_of
from sage_unsloth.runs.files import append_jsonl
from sage_unsloth.runs.processes import gather_rows, rank, world_size
from sage_unsloth.sampling.engine_choice import check_calls
from sage_unsloth.sampling.record_sets import gold_of
from sage_unsloth.sampling.server_calls import check_requests
from sage_unsloth.trainers.backends import TRL
from sage_unsloth.training.by_trl import (
    keep_base_as_reference,
    rollout_arguments,
)
from sage_unsloth.training.grpo_arguments import grpo_arguments
from sage_unsloth.training.rlvr_config import RlvrConfig
from sage_unsloth.training.sharded import let_generation_wait
from sage_unsloth.training.stage import COMPLETIONS
from sage_unsloth.training.trainer_settings import check_trainer, trainer_arguments

logger = logging.getLogger(__name__)

RESERVED_COLUMNS = ("id", "problem", "messages", "answer", "gold")
"""Columns that rewards get in another form, or not at all."""
FIRST_KL_MAX = 1e-3
"""Nats per token; a larger first KL means that policy and reference were not the same model."""


def make_trainer(
    config: RlvrConfig,
    model: Any,
    tokenizer: Any,
    rows: Sequence[dict],
    folder: Path,
    reward: TotalReward,
    rollouts: str,
) -> Any:
    """The trainer, with every setting explicit; `rollouts` is "vllm" or "transformers".

    Raises:
        ValueError: the trainer changed a recorded setting; its reference is not the model without
            its adapter; or vLLM did not get the settings of the rollouts.
    """
    import trl
    from datasets import Dataset

    # Unsloth replaces this class in the module.
    generated: Any = trl
    data = Dataset.from_list([trainer_row(row) for row in rows])
    # TRL's batch sizes count completions, `prompts_per_step` counts prompts.
    batch = config.completions_per_step // world_size()
    micro_batch = config.micro_batch_size or batch
    by_trl = config.backend == TRL
    # None: Unsloth chooses by the free memory.
    parts = None
    if config.credit == "sequence":
        # A prompt's completions must meet in the loss; Unsloth computes their logits part by part.
        parts, micro_batch = batch // micro_batch if config.micro_batch_size else None, batch
    own_arguments: dict[str, Any] = {"unsloth_grpo_mini_batch": parts}
    if by_trl:
        own_arguments = rollout_arguments(config, rollouts)
    trainer = generated.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=list(reward.functions),
        train_dataset=data,
        args=grpo_arguments(
            folder,
            tokenizer.pad_token_id,
            rollouts=rollouts,
            precision=config.precision,
            optim=config.optim,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            warmup_steps=round(config.warmup_ratio * config.max_steps),
            reward_weights=reward.weights,
            # TRL has this one estimator itself; the others replace its penalty.
            use_bias_correction_kl=config.kl_estimator == "k3-is",
            min_p=config.min_p or None,
            **trainer_arguments(config, unsloth=not by_trl),
            **own_arguments,
        ),
    )
    check_trainer(trainer, config, rollouts)
    if by_trl:
        keep_base_as_reference(model)
        let_generation_wait(trainer)
    if "ref" in getattr(model, "peft_config", {}):
        raise ValueError(
            "π_ref must be the model without its adapter, but the trainer uses a second adapter "
            "named 'ref'. Use the tested versions (python -m sage_unsloth doctor)"
        )
    if rollouts in ("vllm", "server"):
        expected = {
            "temperature": config.temperature,
            "top_p": config.top_p,
            "min_p": config.min_p,
            "max_tokens": config.max_completion_length,
            # The pad token is never sampled.
            "logit_bias": {tokenizer.pad_token_id: -100.0},
        }
        if rollouts == "vllm":
            check_calls(trainer.vllm_generation.llm, expected)
        # Only the first process talks to the server.
        elif rank() == 0:
            check_requests(trainer.vllm_generation.vllm_client, expected)
    return trainer


def trainer_row(row: dict) -> dict[str, Any]:
    """A row for the trainer and the rewards: `prompt`, `answer` (the verifier's gold), other
    columns.
    """
    answer = {"answer": gold_of(row)} if "answer" in row else {}
    return (
        {"prompt": turns_of(row)} | answer | {k: row[k] for k in row if k not in RESERVED_COLUMNS}
    )


def extra_metrics(
    config: RlvrConfig, guide: Guide | None, folder: Path, reward: TotalReward
) -> Callable[[int, dict], dict[str, Any]]:
    """A function that adds counts of grades, and of correct answers by kind, to a step's row.

    A kind that does not occur has no key. It also samples completions into their file, and stops a
    run whose first KL is not 0.
    """
    graded = log_grades(folder, reward, config.sample_steps)

    def extra(step: int, logs: dict) -> dict[str, Any]:
        # The trainer's `kl` is the chosen penalty to the anchor: the KL to the reference only
        # without a guide and with k3.
        plain = guide is None and config.kl_estimator in ("k3", "k3-is")
        kl = logs.get("kl/ref_k3", logs.get("kl") if plain else None)
        if step == 1 and config.reference == "sft" and kl is not None and abs(kl) > FIRST_KL_MAX:
            raise ValueError(
                "before the first step policy and reference must be the same model, got a KL of "
                f"{kl:.5f} nats per token, allowed {FIRST_KL_MAX:g}. Was the model's folder "
                "changed while it was loaded, or is this an untested version of Unsloth (python -m "
                "sage_unsloth doctor)?"
            )
        return graded(step, logs)

    return extra


def log_grades(
    folder: Path, reward: SolutionReward | TotalReward, sample_steps: int
) -> Callable[[int, dict], dict[str, Any]]:
    """The grades' part of `extra_metrics`, for `extra` of `stage.run_trainer`.

    Args:
        folder: gets `completions.jsonl`.
        reward: of the run; means of custom rewards are logged too.
        sample_steps: optimizer steps between samples of completions; 0 writes none.
    """

    def graded(step: int, logs: dict) -> dict[str, Any]:
        if sample_steps and (step == 1 or step % sample_steps == 0):
            batch = gather_rows(reward.last_batch)
            if rank() == 0:
                append_jsonl(folder / COMPLETIONS, [{"step": step} | row for row in batch])
        counts = gather_rows([reward.pop_counts()])
        kinds = gather_rows([reward.pop_kinds()])
        sums = gather_rows([reward.pop_sums()]) if isinstance(reward, TotalReward) else [{}]
        means = {}
        for name in sums[0]:
            # Sums and counts, so that the mean is over the completions of all processes.
            total, count = (sum(of_one[name][i] for of_one in sums) for i in (0, 1))
            means[f"reward/{name}"] = total / count if count else None
        return (
            means
            | {f"reward/{grade}": sum(of_one[grade] for of_one in counts) for grade in counts[0]}
            | {
                f"reward/correct by {kind}": sum(of_one.get(kind, 0) for of_one in kinds)
                for kind in dict.fromkeys(kind for of_one in kinds for kind in of_one)
            }
        )

    return graded


def warn_if_untrained(weights: Iterable[tuple[str, Any]]) -> None:
    """Warns if B of an adapter is still 0: no group had mixed rewards, or the rate is 0."""
    sizes = [weight.detach().abs().max().item() for name, weight in weights if "lora_B" in name]
    if sizes and max(sizes) == 0:
        logger.warning(
            "The adapter is still zero, so the model has not changed: look at frac_reward_zero_std "
            "in metrics.jsonl. Where it is 1, every group got one reward and there was nothing to "
            "learn from. Easier problems or more SFT help."
        )
