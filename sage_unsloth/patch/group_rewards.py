"""Advantages by another rule than GRPO's, from the rewards of all processes.

TRL centres and divides the rewards of a group inside `_generate_and_score_completions`, and a group
of equal rewards has lost them by then. So the rewards are taken where `_calculate_rewards` returns
them, gathered from every process, and the batch's `advantages` are replaced by the rule's for this
process's rows. Before that, TRL's own advantages are computed once more from the same rewards and
compared with the batch's: rows in another order, or rewards that something changed on the way, are
a `ContractError`.

With several reward functions the rule reads what TRL reads, the weighted sum. `scale_rewards` says
how TRL's advantages are divided and has no effect on a rule's. Evaluation keeps TRL's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.objective.advantage_rules import RULES, AdvantageRule
from sage_unsloth.objective.advantages import less_kl
from sage_unsloth.objective.group_advantages import GRPO_EPSILON
from sage_unsloth.patch.reference import reference_adapter
from sage_unsloth.patch.replaced import replaced
from sage_unsloth.patch.rollout_batch import SCORE, Scoring
from sage_unsloth.patch.unsloth_names import ContractError

BATCH, GRADE = "_generate_and_score_completions", "_calculate_rewards"
RULE = "_sage_unsloth_rule"
"""Ours, on the trainer: the rule while one is in force."""
DEAD = "advantages/dead_groups"


@contextmanager
def rule_advantages(
    trainer: Any, rule: AdvantageRule, *, scoring: Scoring, kl_in: str = "loss"
) -> Iterator[None]:
    """While open, the advantages of each rollout batch of training are the rule's.

    Logged for each batch as `advantages/dead_groups`: the share of groups whose advantages are all
    0 under the rule. The trainer's `frac_reward_zero_std` stays the share of groups of equal
    rewards, from which a rule may learn.

    Args:
        trainer: a GRPO trainer.
        rule: "grpo" replaces nothing.
        scoring: the trainer's.
        kl_in: "reward" takes β times each completion's log-ratio to π_ref from its reward, under
            "grpo" too.

    Raises:
        ValueError: a reward that the rule does not take.
        ContractError: the batch's advantages are not those of its rewards.
    """
    if rule.is_grpo and kl_in == "loss":
        yield
        return
    generate = getattr(trainer, BATCH)

    def generated(inputs: Any) -> dict[str, Any]:
        if not trainer.model.training:
            return generate(inputs)
        graded: list[Tensor] = []
        grade = getattr(trainer, GRADE)

        def keeping(*args: Any, **kwargs: Any) -> Tensor:
            graded.append(grade(*args, **kwargs))
            return graded[-1]

        with replaced(trainer, **{GRADE: keeping}):
            batch = generate(inputs)
        rewards = _checked_rewards(trainer, graded, batch)
        if kl_in == "reward":
            own = less_kl(
                torch.zeros_like(batch["advantages"]),
                drawn_logps(trainer, scoring, batch),
                reference_logps(trainer, scoring, batch),
                token_mask(trainer, batch),
                beta=trainer.beta,
            )
            rewards = rewards + trainer.accelerator.gather(own).to(rewards)
        advantages = _advantages(trainer, rule, scoring, rewards, batch)
        first = trainer.accelerator.process_index * len(batch["advantages"])
        own = advantages[first : first + len(batch["advantages"])]
        batch["advantages"] = own.to(batch["advantages"])
        _put_into_completions_table(trainer, advantages)
        of_groups = (advantages.view(-1, trainer.num_generations) == 0).all(1)
        trainer._metrics["train"][DEAD].append(of_groups.float().mean().item())
        return batch

    with replaced(trainer, **{BATCH: generated, RULE: rule}):
        yield


def total_rewards(trainer: Any, rewards: Tensor) -> Tensor:
    """What advantages are taken of: the weighted sum of the functions' rewards, nan where none gave
    one, (B,).

    Args:
        rewards: of each completion and function, (B, F).
    """
    totals = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)
    return torch.where(rewards.isnan().all(1), torch.nan, totals)


def dead_groups(trainer: Any, rewards: Tensor) -> list[int]:
    """The groups that teach nothing under the rule that is in force on the trainer, by number.

    Args:
        rewards: `total_rewards`, those of a prompt side by side, (B,).
    """
    rule = vars(trainer).get(RULE) or AdvantageRule("grpo", RULES["grpo"])
    state = trainer.state
    taught = rule.teaches(
        rewards.view(-1, trainer.num_generations),
        step=state.global_step,
        max_steps=max(state.max_steps, 1),
    )
    return (~taught).nonzero().flatten().tolist()


def _checked_rewards(trainer: Any, graded: list[Tensor], batch: dict[str, Any]) -> Tensor:
    """The rewards of all processes that the batch's advantages were computed of, (B·processes,)."""
    rows = len(batch["advantages"]) * trainer.accelerator.num_processes
    expected = (rows, len(trainer.reward_funcs))
    if [tuple(rewards.shape) for rewards in graded] != [expected]:
        raise ContractError(
            f"{BATCH} must call {GRADE} once, for the rewards of all processes",
            found=[tuple(rewards.shape) for rewards in graded],
            expected=[expected],
        )
    rewards = total_rewards(trainer, graded[0])
    first = trainer.accelerator.process_index * len(batch["advantages"])
    of_trl = _of_trl(rewards, trainer.num_generations, trainer.scale_rewards)
    of_trl = of_trl[first : first + len(batch["advantages"])]
    found = batch["advantages"]
    if not torch.allclose(found.float(), of_trl.to(found.device).float(), rtol=1e-3, atol=1e-4):
        raise ContractError(
            f"the advantages of {BATCH} must be those of the rewards of {GRADE}, in its order",
            found=found.tolist(),
            expected=of_trl.tolist(),
        )
    return rewards


def _of_trl(rewards: Tensor, num_generations: int, scale: str) -> Tensor:
    """TRL's advantages of (B,) rewards."""
    groups = rewards.view(-1, num_generations)
    centred = groups - groups.nanmean(1, keepdim=True)
    if scale != "none":
        of = centred if scale == "group" else (rewards - rewards.nanmean()).unsqueeze(0)
        count = (~of.isnan()).sum(1, keepdim=True)
        deviation = (of.square().nansum(1, keepdim=True) / (count - 1)).sqrt()
        centred = centred / (deviation + GRPO_EPSILON)
    return centred.flatten().nan_to_num(nan=0.0)


def _advantages(
    trainer: Any, rule: AdvantageRule, scoring: Scoring, rewards: Tensor, batch: dict[str, Any]
) -> Tensor:
    """The rule's, of all processes, (B·processes,)."""
    signals: dict[str, Any] = {
        "step": trainer.state.global_step,
        "max_steps": max(trainer.state.max_steps, trainer.args.max_steps, 1),
    }
    shape = (-1, trainer.num_generations)
    if rule.is_grpo:
        return _of_trl(rewards, trainer.num_generations, trainer.scale_rewards)
    if "mean_logps" in rule.needs:
        lengths = token_mask(trainer, batch).sum(1)
        own = drawn_logps(trainer, scoring, batch).sum(1) / lengths.clamp(min=1)
        signals["mean_logps"] = trainer.accelerator.gather(own).to(rewards).view(shape)
    return rule(rewards.view(shape), **signals).flatten()


def token_mask(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """1 on the tokens of each completion, (B, T), of a truncated one too, whose row
    `mask_truncated_completions` sets to 0 in the batch.
    """
    mask, ids = batch["completion_mask"], batch["completion_ids"]
    # A truncated completion ends in neither EOS nor padding, so its last other token is its end.
    is_token = (ids != trainer.processing_class.pad_token_id).to(mask.dtype)
    up_to_the_last = is_token.flip(1).cummax(1).values.flip(1)
    return torch.where(mask.any(1, keepdim=True), mask, up_to_the_last)


def drawn_logps(trainer: Any, scoring: Scoring, batch: dict[str, Any]) -> Tensor:
    """log π_old of the tokens of a rollout batch, nats, (B, T), 0 outside `token_mask`: what the
    batch has, or one more scoring by the policy as it is, which has drawn the batch.
    """
    return _logps(trainer, scoring, batch, batch.get("old_per_token_logps"), trainer.model)


def reference_logps(trainer: Any, scoring: Scoring, batch: dict[str, Any]) -> Tensor:
    """log π_ref of the same tokens, (B, T)."""
    scored = batch["ref_per_token_logps"]
    if trainer.ref_model is not None:
        return _logps(trainer, scoring, batch, scored, trainer.ref_model)
    with reference_adapter(trainer):
        return _logps(trainer, scoring, batch, scored, trainer.model)


@torch.no_grad()
def _logps(
    trainer: Any, scoring: Scoring, batch: dict[str, Any], logps: Tensor | None, model: Any
) -> Tensor:
    """`logps` in the layout of the completions, or the model's where they are None or where the
    batch hides a completion's tokens from the model.
    """
    mask = token_mask(trainer, batch)
    if logps is None or not torch.equal(mask, batch["completion_mask"]):
        score: Callable = getattr(trainer, SCORE)
        scored: Tensor = score(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1),
            torch.cat([batch["prompt_mask"], mask], 1),
            mask.shape[1],
            batch_size=trainer.args.per_device_train_batch_size,
        )[0]
        logps = scored
    return scoring.in_completion_layout(logps, batch | {"completion_mask": mask})


def _put_into_completions_table(trainer: Any, advantages: Tensor) -> None:
    """In the place of TRL's, which it has just appended."""
    logged = trainer._logs["advantages"]
    for _ in range(min(len(advantages), len(logged))):
        logged.pop()
    logged.extend(advantages.tolist())
