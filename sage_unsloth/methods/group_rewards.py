"""Applies an advantage rule other than GRPO's to the rewards of all processes.

TRL centres and divides the rewards of a group inside `_generate_and_score_completions`, where a
group of equal rewards loses them. So the rewards are taken from `_calculate_rewards`, gathered from
every process, and the batch's `advantages` are replaced by the rule's for this process's rows.
First TRL's own advantages are recomputed from the same rewards and compared with the batch's:
another order of rows, or changed rewards, are a `ContractError`.

With several reward functions the rule reads the weighted sum, as TRL does. `scale_rewards` only
affects TRL's advantages. Evaluation keeps TRL's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.methods.advantage_rules import (
    GRPO_RULE,
    AdvantageRule,
    Rule,
    advantage_rule,
    check_rule,
)
from sage_unsloth.methods.group_advantages import GRPO_EPSILON
from sage_unsloth.methods.reference import reference_adapter
from sage_unsloth.patch.choice import Choice, Method, add_method
from sage_unsloth.patch.seam import seam_of
from sage_unsloth.patch.trained_with import describe_function
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import listening
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.switches import drops_equal_rewards
from sage_unsloth.trainers.trainer_names import ContractError

GROUPS_ATTRIBUTE = "_sage_unsloth_groups"
"""Our attribute of the trainer: the `_Groups` that changes its advantages."""
DEAD = "advantages/dead_groups"


@contextmanager
def advantages_by(trainer: Any, rule: Rule) -> Iterator[None]:
    """Within this context, this rule computes the advantages of each training rollout batch.

        with advantages_by(trainer, "pkpo,k=4"), guided_kl(trainer, guide):
            trainer.train()

    `advantages/dead_groups` is the share of groups whose advantages are all 0 under the rule. The
    trainer's `frac_reward_zero_std` stays the share of groups of equal rewards, from which a rule
    may learn.

    Args:
        rule: a name of `advantage_rules.RULES` with its settings, "module:function", or a function,
            (P, G) → (P, G). "grpo" is TRL's, and replaces nothing.

    Raises:
        ValueError: an unknown rule; from `guided_kl`, one that contradicts the trainer's settings;
            in training, a reward that the rule does not support.
        ContractError: the batch's advantages are not those of its rewards.
    """
    rule = advantage_rule(rule)
    if rule.is_grpo:
        yield
        return
    method = Method(
        name="advantages",
        record=describe_rule(rule),
        check=check_rewards_are_summed,
        needs_hook=False,
    )
    with (
        add_method(trainer, method),
        replace_group_advantages(trainer) as groups,
        replace_attributes(groups, rule=rule),
    ):
        yield


def describe_rule(rule: AdvantageRule) -> str:
    """A rule as named; for a custom rule also its code."""
    return rule.text if rule.is_ours else f"{rule.text}: {describe_function(rule.function)}"


def rule_in_force(trainer: Any) -> AdvantageRule | None:
    """The rule of the trainer's advantages; None if nothing changes them."""
    groups: _Groups | None = vars(trainer).get(GROUPS_ATTRIBUTE)
    return None if groups is None else groups.rule


@contextmanager
def replace_group_advantages(trainer: Any) -> Iterator["_Groups"]:
    """Within this context, advantages are computed by the groups' rule and reward term."""
    groups: _Groups | None = vars(trainer).get(GROUPS_ATTRIBUTE)
    if groups is not None:
        yield groups
        return
    groups = _Groups(trainer)
    listeners = {names.ROLLOUT: groups.roll_out, names.REWARDS: groups.grade}
    with (
        replace_attributes(trainer, **{GROUPS_ATTRIBUTE: groups}),
        listening(trainer, "advantages", **listeners),
    ):
        yield groups


class _Groups:
    """The rule and the reward term of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.rule = GRPO_RULE
        self.term: Callable[[dict[str, Any]], Tensor] | None = None
        """Function of a rollout batch: added to this process's rewards, (B,)."""
        self.graded: list[Tensor] = []

    def grade(self, proceed: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        rewards = proceed(*args, **kwargs)
        self.graded.append(rewards)
        return rewards

    def roll_out(self, proceed: Callable[..., dict], inputs: Any) -> dict[str, Any]:
        trainer = self.trainer
        self.graded.clear()
        batch = proceed(inputs)
        # In evaluation the advantages train nothing and TRL's own are logged.
        if not trainer.model.training:
            return batch
        rewards = _checked_rewards(trainer, self.graded, batch)
        if self.term is not None:
            # A term with a value for each completion of this process; the rewards are of all
            # processes.
            rewards = rewards + trainer.accelerator.gather(self.term(batch)).to(rewards)
        advantages = _advantages(trainer, self.rule, rewards, batch)
        first = trainer.accelerator.process_index * len(batch["advantages"])
        own = advantages[first : first + len(batch["advantages"])]
        batch["advantages"] = own.to(batch["advantages"])
        _put_into_completions_table(trainer, advantages)
        of_groups = (advantages.view(-1, trainer.num_generations) == 0).all(1)
        names.metrics_of(trainer, "train")[DEAD].append(of_groups.float().mean().item())
        return batch


def check_rewards_are_summed(trainer: Any, choice: Choice) -> None:
    """Raises ValueError unless rewards are summed and groups of equal rewards are kept."""
    rule = rule_in_force(trainer) or GRPO_RULE
    in_reward = choice.recorded("kl_in", "loss") == "reward"
    check_rule(rule, trainer.num_generations, any_reward=in_reward)
    if trainer.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError(
            f"advantages={rule.text!r} needs the sum of the rewards, so "
            "multi_objective_aggregation must be 'sum_then_normalize', got "
            f"{trainer.multi_objective_aggregation!r}"
        )
    if seam_of(trainer).name == "unsloth" and drops_equal_rewards():
        raise ValueError(
            f"advantages={rule.text!r} may learn from groups of equal rewards, which "
            "UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE=1 drops. Unset it, or use advantages='grpo' and "
            "kl_in='loss'"
        )


def total_rewards(trainer: Any, rewards: Tensor) -> Tensor:
    """The weighted sum of the functions' rewards, (B,); nan if none gave a reward.

    Args:
        rewards: of each completion and function, (B, F).
    """
    totals = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)
    # nansum of nothing is 0, which would be a reward.
    return torch.where(rewards.isnan().all(1), torch.nan, totals)


def dead_groups(trainer: Any, rewards: Tensor) -> list[int]:
    """The numbers of the groups without a signal under the trainer's rule.

    Args:
        rewards: `total_rewards`, (B,), those of a prompt next to each other.
    """
    rule = rule_in_force(trainer) or GRPO_RULE
    state = trainer.state
    taught = rule.teaches(
        rewards.view(-1, trainer.num_generations),
        step=state.global_step,
        max_steps=max(state.max_steps, 1),
    )
    return (~taught).nonzero().flatten().tolist()


def _checked_rewards(trainer: Any, graded: list[Tensor], batch: dict[str, Any]) -> Tensor:
    """The rewards behind the batch's advantages, of all processes, (B·processes,)."""
    rows = len(batch["advantages"]) * trainer.accelerator.num_processes
    expected = (rows, len(trainer.reward_funcs))
    if [tuple(rewards.shape) for rewards in graded] != [expected]:
        raise ContractError(
            f"{names.ROLLOUT} must call {names.REWARDS} once, for the rewards of all processes",
            actual=[tuple(rewards.shape) for rewards in graded],
            expected=[expected],
        )
    rewards = total_rewards(trainer, graded[0])
    first = trainer.accelerator.process_index * len(batch["advantages"])
    of_trl = _of_trl(rewards, trainer.num_generations, trainer.scale_rewards)
    of_trl = of_trl[first : first + len(batch["advantages"])]
    result = batch["advantages"]
    # In 16 bits the trainer's advantages have three digits.
    if not torch.allclose(result.float(), of_trl.to(result.device).float(), rtol=1e-3, atol=1e-4):
        raise ContractError(
            f"the advantages of {names.ROLLOUT} must be those of the rewards of {names.REWARDS}, "
            "in its order",
            actual=result.tolist(),
            expected=of_trl.tolist(),
        )
    return rewards


def _of_trl(rewards: Tensor, num_generations: int, scale: str) -> Tensor:
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.nanmean(1, keepdim=True)
    if scale != "none":
        # nan-aware throughout, as TRL's: a completion that no function rewards has no part in the
        # group.
        of = centred if scale == "group" else (rewards - rewards.nanmean()).unsqueeze(0)
        count = (~of.isnan()).sum(1, keepdim=True)
        deviation = (of.square().nansum(1, keepdim=True) / (count - 1)).sqrt()
        centred = centred / (deviation + GRPO_EPSILON)
    return centred.flatten().nan_to_num(nan=0.0)


def _advantages(
    trainer: Any, rule: AdvantageRule, rewards: Tensor, batch: dict[str, Any]
) -> Tensor:
    """The rule's advantages of all processes, (B·processes,)."""
    signals: dict[str, Any] = {
        "step": trainer.state.global_step,
        "max_steps": max(trainer.state.max_steps, trainer.args.max_steps, 1),
    }
    shape = (-1, trainer.num_generations)
    if rule.is_grpo:
        return _of_trl(rewards, trainer.num_generations, trainer.scale_rewards)
    if "mean_logps" in rule.needs:
        # The mean and not the sum, or a long completion would always be the unlikely one.
        lengths = token_mask(trainer, batch).sum(1)
        own = drawn_logps(trainer, batch).sum(1) / lengths.clamp(min=1)
        signals["mean_logps"] = trainer.accelerator.gather(own).to(rewards).view(shape)
    return rule(rewards.view(shape), **signals).flatten()


def token_mask(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """1 on the tokens of each completion, (B, T), truncated ones included.

    `mask_truncated_completions` sets their rows to 0 in the batch.
    """
    mask, ids = batch["completion_mask"], batch["completion_ids"]
    # A truncated completion ends in neither EOS nor padding, so its last other token is its end.
    is_token = (ids != trainer.processing_class.pad_token_id).to(mask.dtype)
    up_to_the_last = is_token.flip(1).cummax(1).values.flip(1)
    return torch.where(mask.any(1, keepdim=True), mask, up_to_the_last)


def drawn_logps(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """log π_old of the tokens of a rollout batch, nats, (B, T), 0 outside `token_mask`.

    From the batch, or else scored once more by the current policy, which has sampled the batch.
    """
    return _logps(trainer, batch, batch.get("old_per_token_logps"), trainer.model)


def reference_logps(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """log π_ref of the same tokens, (B, T)."""
    scored = batch["ref_per_token_logps"]
    if trainer.ref_model is not None:
        return _logps(trainer, batch, scored, trainer.ref_model)
    with reference_adapter(trainer):
        return _logps(trainer, batch, scored, trainer.model)


@torch.no_grad()
def _logps(trainer: Any, batch: dict[str, Any], logps: Tensor | None, model: Any) -> Tensor:
    """`logps` in the completions' layout; scored by the model if they are None or masked."""
    mask = token_mask(trainer, batch)
    if logps is None or not torch.equal(mask, batch["completion_mask"]):
        score: Callable = getattr(trainer, names.SCORE)
        scored: Tensor = score(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], mask], 1),
            mask.shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
        )[0]
        logps = scored
    return seam_of(trainer).scoring.in_completion_layout(logps, batch | {"completion_mask": mask})


def _put_into_completions_table(trainer: Any, advantages: Tensor) -> None:
    """Replaces TRL's advantages, which were just appended."""
    logged = getattr(trainer, names.TABLE)["advantages"]
    # A deque with a maximal length: it may hold fewer than were appended.
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())
