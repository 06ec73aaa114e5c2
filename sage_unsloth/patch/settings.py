"""Checks the arguments of `guided_kl` against the trainer."""

from typing import Any

from sage_unsloth.objective.choices import check_guide, check_teacher
from sage_unsloth.patch.choice import Choice
from sage_unsloth.trainers.data_parallel import check_data_parallel


def check_choice(trainer: Any, choice: Choice, *, unsloth: bool) -> None:
    """Raises if the trainer cannot train with the arguments of `guided_kl`.

    Args:
        unsloth: whether the trainer is Unsloth's, else TRL's own.

    Raises:
        TypeError: `guide` is not a guide.
        ValueError: with the rule, the value and what to change.
    """
    if choice.guide is not None:
        check_guide(choice.guide, trainer.beta)
    check_teacher(choice.guide, choice.teacher)
    _check_model(trainer, unsloth)
    check_data_parallel(trainer.accelerator, whole_model=unsloth)
    _check_ratio(trainer, choice)
    for method in choice.methods:
        method.check(trainer, choice)
    _check_columns(trainer)


RELIED_ON = (
    "use_bias_correction_kl",
    "loss_type",
    "importance_sampling_level",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
)


def fixed_settings(trainer: Any) -> dict[str, Any]:
    """The settings that `check_choice` has checked, which must not change afterwards."""
    own = {"beta": trainer.beta, "num_generations": trainer.num_generations}
    return own | {name: getattr(trainer.args, name) for name in RELIED_ON}


def _check_model(trainer: Any, unsloth: bool) -> None:
    """The trainer relies on these without checking."""
    if getattr(trainer.processing_class, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer must have a pad token, because completions are padded with it. Set "
            "tokenizer.pad_token before building the trainer"
        )
    if unsloth and not hasattr(trainer.model, "for_training"):
        raise ValueError(
            "Unsloth's trainer needs a model with for_training and for_inference, but "
            f"{type(trainer.model).__name__} has neither. Load it by "
            "FastLanguageModel.from_pretrained, or without a GPU by sage_unsloth.models.load_policy"
        )


def _check_ratio(trainer: Any, choice: Choice) -> None:
    """`use_bias_correction_kl` multiplies k3 by the importance ratio, so it must match the
    estimator.
    """
    # The record may be "k3, bounded" (methods/own_penalty.py).
    kl_estimator = choice.recorded("kl_estimator", "k3").partition(",")[0]
    ratio_inside = trainer.args.use_bias_correction_kl
    if ratio_inside is not (kl_estimator == "k3-is"):
        raise ValueError(
            "use_bias_correction_kl must be True for kl_estimator 'k3-is' and False otherwise, got "
            f"kl_estimator={kl_estimator!r} and use_bias_correction_kl={ratio_inside}. Set "
            f"GRPOConfig(use_bias_correction_kl={not ratio_inside}), or open kl_penalty(trainer, "
            f"{'k3-is' if ratio_inside else 'k3'!r}) before guided_kl"
        )


def _check_columns(trainer: Any) -> None:
    """TRL would miss a column only in the middle of the first step."""
    # An iterable dataset may not know its columns.
    columns = getattr(trainer.train_dataset, "column_names", None)
    if columns is None:
        return
    needed = ["prompt"]
    for reward in trainer.reward_funcs:
        needed += getattr(reward, "required_columns", ())
    for column in needed:
        if column not in columns:
            raise ValueError(
                f"the training dataset must have a column {column!r}, but it has "
                f"{sorted(columns)}. Rename one: dataset.rename_column(..., {column!r})"
            )
