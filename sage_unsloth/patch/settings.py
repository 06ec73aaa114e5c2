"""Every check of `guided_kl`'s arguments and of the trainer that they are given with."""

import os
from collections.abc import Set
from typing import Any

from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.objective.adaptive import AdaptiveGuide
from sage_unsloth.objective.credit import check_credit
from sage_unsloth.objective.guides import Guide, TokenGuide
from sage_unsloth.objective.kl import PENALTIES, check_kl_estimator
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.objective.signals import OPTIONAL_SIGNALS


def check_guide(guide: Guide, beta: float) -> None:
    """What can be said before a model is loaded: it is a guide, and there is a KL term for it to
    shape.

    Raises:
        TypeError: `guide` is not a guide.
        ValueError: `beta` is 0.
    """
    if (
        not isinstance(guide, Guide)
        or not isinstance(guide.needs, Set)
        or not guide.needs <= {*OPTIONAL_SIGNALS}
    ):
        raise TypeError(
            "a guide must have a method log_guide(signals, *, step, max_steps, generator) and a "
            "set `needs` with none but "
            f"{OPTIONAL_SIGNALS}; got {guide!r}"
        )
    if beta == 0.0:
        raise ValueError(
            "beta must not be 0 because the guide shapes the KL anchor, and beta = 0 drops the KL; "
            f"got beta={beta}; set GRPOConfig(beta=0.05), or train without a guide"
        )


def check_teacher(needs: Set[str], teacher: Any) -> None:
    """A teacher is there exactly if the guide reads it.

    Raises:
        ValueError: it is missing, or nobody would read it.
    """
    if ("teacher_logps" in needs) != (teacher is not None):
        raise ValueError(
            "a teacher must be given exactly with a guide that needs 'teacher_logps'; got "
            + (
                f"teacher={teacher!r:.100} without one; leave it out"
                if teacher is not None
                else "none; set teacher to an adapter or a model with the same tokenizer"
            )
        )


def check_causal(credit: str, guide: Guide | None) -> None:
    """Sequence credit pays a token for what comes after it, so log q_t must not depend on what
    comes after y_t.

    Raises:
        ValueError: `guide` is a TokenGuide whose norm reads the whole completion.
    """
    inner = guide
    while isinstance(inner, AdaptiveGuide):
        inner = inner.guide
    if credit == "sequence" and isinstance(inner, TokenGuide) and inner.norm != "causal":
        raise ValueError(
            "credit='sequence' needs a guide that reads no later token, because it pays a token "
            "only for those after it; got "
            f"TokenGuide(norm={inner.norm!r}); set norm='causal', or credit='token'"
        )


def check_penalty(kl_estimator: str, beta: float) -> None:
    """What can be said of the penalty before a model is loaded: it exists, and there is a KL term
    that it replaces.

    Raises:
        ValueError: an unknown estimator; or `beta` is 0 with one that is not Unsloth's own.
    """
    check_kl_estimator(kl_estimator)
    if kl_estimator in PENALTIES and beta == 0.0:
        raise ValueError(
            f"beta must not be 0 because kl_estimator={kl_estimator!r} chooses the KL penalty, "
            f"and beta = 0 drops it; "
            f"got beta={beta}; set beta=0.05, or leave kl_estimator at 'k3'"
        )


def check_estimator(trainer: Any, kl_estimator: str) -> None:
    """The trainer's settings must be the estimator's, since Unsloth's own loss reads them."""
    check_penalty(kl_estimator, trainer.beta)
    ratio_inside = trainer.args.use_bias_correction_kl
    if ratio_inside is not (kl_estimator == "k3-is"):
        raise ValueError(
            "use_bias_correction_kl must be True for kl_estimator 'k3-is' and False for every "
            "other, because Unsloth's loss "
            f"follows it; got kl_estimator={kl_estimator!r} and "
            f"use_bias_correction_kl={ratio_inside}; set "
            f"GRPOConfig(use_bias_correction_kl={not ratio_inside}), or guided_kl(..., "
            f"kl_estimator="
            f"{'k3-is' if ratio_inside else 'k3'!r})"
        )
    if kl_estimator in PENALTIES and trainer.args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type must be one of {LOSS_TYPES} for kl_estimator={kl_estimator!r}, because "
            f"the penalty is reduced as "
            f"these reduce the loss; got loss_type={trainer.args.loss_type!r}; change it, or use "
            f"'k3' or 'k3-is'"
        )
    rejection = os.environ.get("UNSLOTH_GRPO_ROLLOUT_RS")
    if kl_estimator in PENALTIES and rejection:
        raise ValueError(
            f"UNSLOTH_GRPO_ROLLOUT_RS must not be set with kl_estimator={kl_estimator!r}, "
            f"because Unsloth's versions differ "
            f"in whether a rejected token keeps its penalty; got {rejection!r}; unset it, or use "
            f"'k3' or 'k3-is'"
        )


def check_trainer_credit(trainer: Any, credit: str, kl_estimator: str) -> None:
    """Sequence credit compares the completions of a prompt, so they must meet in one
    micro-batch.
    """
    check_credit(credit, kl_estimator, trainer.beta)
    if credit == "token":
        return
    args = trainer.args
    if args.per_device_train_batch_size % trainer.num_generations:
        raise ValueError(
            "credit='sequence' needs all completions of a prompt in one process, so "
            "per_device_train_batch_size must be a multiple "
            f"of num_generations={trainer.num_generations}; got "
            f"{args.per_device_train_batch_size} in each of "
            f"{trainer.accelerator.num_processes} processes; raise it, use fewer processes, or "
            f"credit='token'"
        )
    if args.importance_sampling_level != "token" or args.loss_type not in LOSS_TYPES:
        raise ValueError(
            "credit='sequence' gives each token an advantage of its own, so "
            "importance_sampling_level must be 'token' and "
            f"loss_type one of {LOSS_TYPES}; got {args.importance_sampling_level!r} and "
            f"{args.loss_type!r}; change these, or "
            "use credit='token'"
        )
    if trainer.eval_dataset is not None and trainer.num_generations_eval < 2:
        raise ValueError(
            "credit='sequence' compares completions of a prompt, in evaluation too, so "
            "num_generations_eval must be >= 2; got "
            f"{trainer.num_generations_eval}; raise it, or evaluate outside this context"
        )
    if args.steps_per_generation != 1 or args.gradient_accumulation_steps != 1:
        raise ValueError(
            "credit='sequence' needs all completions of a prompt in one micro-batch, so "
            "gradient_accumulation_steps and "
            f"steps_per_generation must be 1; got {args.gradient_accumulation_steps} and "
            f"{args.steps_per_generation}; raise "
            "per_device_train_batch_size instead: Unsloth's unsloth_grpo_mini_batch splits it "
            "for memory"
        )


def check_columns(trainer: Any) -> None:
    """TRL would find a missing column in the middle of the first step."""
    columns = getattr(
        trainer.train_dataset, "column_names", None
    )  # an iterable dataset may not know them
    graded = any(isinstance(reward, SolutionReward) for reward in trainer.reward_funcs)
    for column in ("prompt", "answer") if graded else ("prompt",):
        if columns is not None and column not in columns:
            raise ValueError(
                f"the training dataset must have a column {column!r}; it has {sorted(columns)}; "
                f"rename the column that holds it: dataset.rename_column(..., {column!r})"
            )
