"""Every check of `guided_kl`'s arguments against the trainer that they are given with."""

from typing import Any

from sage_unsloth.objective.advantage_rules import AdvantageRule, check_rule
from sage_unsloth.objective.choices import check_choices
from sage_unsloth.objective.kl import PENALTIES
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.objective.token_rules import check_updates
from sage_unsloth.patch.choice import Choice
from sage_unsloth.patch.data_parallel import check_data_parallel
from sage_unsloth.patch.switches import drops_equal_rewards, rollout_rejection


def check_settings(trainer: Any, choice: Choice, *, unsloth: bool, bounds_k3: bool) -> None:
    """Raise where the trainer cannot train what `guided_kl` was asked for.

    Args:
        trainer: as for `guided_kl`.
        choice: its other arguments.
        unsloth: whether it is Unsloth's generated trainer, else TRL's own.
        bounds_k3: whether the trainer's own k3 is bounded.

    Raises:
        TypeError: `guide` is not a guide.
        ValueError: with the rule, the value and what to change.
    """
    check_choices(
        guide=choice.guide,
        beta=trainer.beta,
        kl_estimator=choice.kl_estimator,
        credit=choice.credit,
        kl_in=choice.kl_in,
        teacher=choice.teacher,
    )
    _check_model(trainer, unsloth)
    check_data_parallel(trainer.accelerator, whole_model=unsloth)
    _check_estimator(trainer, choice.kl_estimator)
    _check_bound(choice.kl_estimator, choice.k3_bounded, bounds_k3)
    if unsloth:
        _check_own_penalty(trainer, choice.kl_estimator)
    if choice.credit == "sequence":
        _check_sequence_credit(trainer)
    if not choice.rule.is_grpo or choice.kl_in != "loss":
        _check_rule(trainer, choice.rule, choice.kl_in, unsloth)
    check_updates(choice.shape_advantages, _updates(trainer))
    _check_columns(trainer)


RELIED_ON = (
    "use_bias_correction_kl",
    "loss_type",
    "importance_sampling_level",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
)


def relied_on(trainer: Any) -> dict[str, Any]:
    """The trainer's settings that `check_settings` has judged; they must stay as they are."""
    own = {"beta": trainer.beta, "num_generations": trainer.num_generations}
    return own | {name: getattr(trainer.args, name) for name in RELIED_ON}


def _check_model(trainer: Any, unsloth: bool) -> None:
    """The trainer relies on these without looking."""
    if getattr(trainer.processing_class, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer must have a pad token because completions are padded with it; "
            "got pad_token_id=None; set tokenizer.pad_token before building the trainer"
        )
    if unsloth and not hasattr(trainer.model, "for_training"):
        raise ValueError(
            "the model must have for_training and for_inference because Unsloth's trainer calls "
            f"them; {type(trainer.model).__name__} has neither; load it by "
            "FastLanguageModel.from_pretrained, or without a GPU by "
            "sage_unsloth.models.load_policy, which calls prepare_for_cpu(model)"
        )


def _check_estimator(trainer: Any, kl_estimator: str) -> None:
    """The trainer's settings must be the estimator's, since Unsloth's own loss reads them."""
    ratio_inside = trainer.args.use_bias_correction_kl
    if ratio_inside is not (kl_estimator == "k3-is"):
        raise ValueError(
            "use_bias_correction_kl must be True for kl_estimator 'k3-is' and False for every "
            "other, because the trainer's loss follows it; got "
            f"kl_estimator={kl_estimator!r} and use_bias_correction_kl={ratio_inside}; set "
            f"GRPOConfig(use_bias_correction_kl={not ratio_inside}), or "
            f"guided_kl(..., kl_estimator={'k3-is' if ratio_inside else 'k3'!r})"
        )


def _check_bound(kl_estimator: str, k3_bounded: bool | None, bounds_k3: bool) -> None:
    if k3_bounded is None:
        return
    if kl_estimator in PENALTIES:
        raise ValueError(
            "k3_bounded is of the estimators 'k3' and 'k3-is', since the others have bounds of "
            f"their own; got {k3_bounded} and kl_estimator={kl_estimator!r}; leave it out"
        )
    if bounds_k3 and not k3_bounded:
        raise ValueError(
            "k3_bounded must be True or None with Unsloth's trainer, whose loss bounds k3; got "
            "False; leave it out, or train with TRL's own trainer, without Unsloth"
        )


def _check_own_penalty(trainer: Any, kl_estimator: str) -> None:
    """A penalty that Unsloth's loss does not have is reduced by it all the same."""
    if kl_estimator not in PENALTIES:
        return
    if trainer.args.loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type must be one of {LOSS_TYPES} for kl_estimator={kl_estimator!r}, because the "
            "penalty is reduced as these reduce the loss; got "
            f"loss_type={trainer.args.loss_type!r}; change it, or use 'k3' or 'k3-is'"
        )
    if rejection := rollout_rejection():
        raise ValueError(
            f"UNSLOTH_GRPO_ROLLOUT_RS must not be set with kl_estimator={kl_estimator!r}, because "
            "Unsloth's versions differ in whether a rejected token keeps its penalty; got "
            f"{rejection!r}; unset it, or use 'k3' or 'k3-is'"
        )


def _check_sequence_credit(trainer: Any) -> None:
    """Sequence credit compares the completions of a prompt, so they must meet in one
    micro-batch.
    """
    args = trainer.args
    if args.per_device_train_batch_size % trainer.num_generations:
        raise ValueError(
            "credit='sequence' needs all completions of a prompt in one process, so "
            "per_device_train_batch_size must be a multiple of "
            f"num_generations={trainer.num_generations}; got {args.per_device_train_batch_size} in "
            f"each of {trainer.accelerator.num_processes} processes; raise it, use fewer "
            "processes, or credit='token'"
        )
    if args.importance_sampling_level != "token" or args.loss_type not in LOSS_TYPES:
        raise ValueError(
            "credit='sequence' gives each token an advantage of its own, so "
            f"importance_sampling_level must be 'token' and loss_type one of {LOSS_TYPES}; got "
            f"{args.importance_sampling_level!r} and {args.loss_type!r}; change these, or use "
            "credit='token'"
        )
    if trainer.eval_dataset is not None and trainer.num_generations_eval < 2:
        raise ValueError(
            "credit='sequence' compares completions of a prompt, in evaluation too, so "
            f"num_generations_eval must be >= 2; got {trainer.num_generations_eval}; raise it, or "
            "evaluate outside this context"
        )
    if args.steps_per_generation != 1 or args.gradient_accumulation_steps != 1:
        raise ValueError(
            "credit='sequence' needs all completions of a prompt in one micro-batch, so "
            "gradient_accumulation_steps and steps_per_generation must be 1; got "
            f"{args.gradient_accumulation_steps} and {args.steps_per_generation}; raise "
            "per_device_train_batch_size instead (Unsloth's unsloth_grpo_mini_batch splits it for "
            "memory)"
        )


def _check_rule(trainer: Any, rule: AdvantageRule, kl_in: str, unsloth: bool) -> None:
    """The rule reads the sum of the rewards, and groups of equal rewards too."""
    check_rule(rule, trainer.num_generations, any_reward=kl_in == "reward")
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"advantages={rule.text!r} is a rule for the sum of the rewards, so "
            "multi_objective_aggregation must be 'sum_then_normalize'; got "
            f"{trainer.multi_objective_aggregation!r}; change it, or leave advantages at 'grpo' "
            "and kl_in at 'loss'"
        )
    if unsloth and drops_equal_rewards():
        raise ValueError(
            f"advantages={rule.text!r} may learn from groups of equal rewards, which "
            "UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE=1 drops; unset it, or leave advantages at 'grpo' "
            "and kl_in at 'loss'"
        )


def _updates(trainer: Any) -> int:
    """Optimizer steps that a rollout batch is used for."""
    args = trainer.args
    per_pass = args.steps_per_generation // args.gradient_accumulation_steps
    return trainer.num_iterations * max(per_pass, 1)


def _check_columns(trainer: Any) -> None:
    """TRL would find a missing column in the middle of the first step."""
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
                f"the training dataset must have a column {column!r}; it has {sorted(columns)}; "
                f"rename the column that holds it: dataset.rename_column(..., {column!r})"
            )
