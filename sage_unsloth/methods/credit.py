"""Sequence credit: what later tokens add to the advantage of y_t under Eq. 6."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.methods.choices import check_together
from sage_unsloth.methods.group_rewards import rule_in_force
from sage_unsloth.objective.kl import UNSLOTH_K3_MAX, k3
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.choice import Choice, Method, add_method


@contextmanager
def credit_sequences(trainer: Any) -> Iterator[None]:
    """Within this context, a `guided_kl` of the trainer follows Eq. 6.

    Each token's advantage then includes the guide and the KL of the tokens after it.

        with kl_penalty(trainer, "k2"), credit_sequences(trainer), guided_kl(trainer, guide):
            trainer.train()

    It needs a penalty with the reverse KL's gradient, token-level importance ratios, and all
    completions of a prompt in one micro-batch; `guided_kl` raises otherwise. TRL's advantages are
    multiplied by n/(n − 1) (`leave_one_out`). `sage/credit_abs` is the token mean of the credit's
    size, in units of reward.
    """
    beta = trainer.beta

    def shape(
        signals: TokenSignals,
        advantages: Tensor,
        *,
        log_guide: Tensor | None,
        groups: Tensor,
        metrics: dict[str, Tensor],
    ) -> Tensor:
        # Read at each batch: use_advantages may be opened around or inside this context.
        rule = rule_in_force(trainer)
        advantages, credit = with_sequence_credit(
            advantages,
            signals,
            groups,
            beta=beta,
            log_guide=log_guide,
            own_baseline=rule is not None and not rule.is_grpo,
        )
        metrics["credit_abs"] = credit.float().abs()
        return advantages

    method = Method(
        name="credit",
        record="sequence",
        check=_check_trainer,
        shape=shape,
        needs=frozenset({"groups"}),
    )
    with add_method(trainer, method):
        yield


def _check_trainer(trainer: Any, choice: Choice) -> None:
    """Checks that all completions of a prompt are in one micro-batch, to be compared."""
    check_together(trainer, choice)
    args = trainer.args
    if args.per_device_train_batch_size % trainer.num_generations:
        raise ValueError(
            "credit='sequence' needs all completions of a prompt in one process: "
            "per_device_train_batch_size must be a multiple of "
            f"num_generations={trainer.num_generations}, got {args.per_device_train_batch_size} in "
            f"each of {trainer.accelerator.num_processes} processes. Raise it, use fewer "
            "processes, or credit='token'"
        )
    if args.importance_sampling_level != "token" or args.loss_type not in LOSS_TYPES:
        raise ValueError(
            "credit='sequence' has advantages of tokens, so importance_sampling_level must be "
            f"'token' and loss_type one of {LOSS_TYPES}, got {args.importance_sampling_level!r} "
            f"and {args.loss_type!r}. Change these, or use credit='token'"
        )
    if trainer.eval_dataset is not None and trainer.num_generations_eval < 2:
        raise ValueError(
            "credit='sequence' compares completions of a prompt, so num_generations_eval must be "
            f">= 2, got {trainer.num_generations_eval}. Raise it, or evaluate outside this context"
        )
    if args.steps_per_generation != 1 or args.gradient_accumulation_steps != 1:
        raise ValueError(
            "credit='sequence' needs all completions of a prompt in one micro-batch: "
            "gradient_accumulation_steps and steps_per_generation must be 1, got "
            f"{args.gradient_accumulation_steps} and {args.steps_per_generation}. Raise "
            "per_device_train_batch_size instead (Unsloth's unsloth_grpo_mini_batch splits it for "
            "memory)"
        )


def sequence_credit(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    groups: Tensor,
    *,
    beta: float,
    log_guide: Tensor | None = None,
) -> Tensor:
    """What the tokens after y_t add to its advantage, so that the update follows Eq. 6.

    The gradient of E_π[r − β Σ_t log(π/(q·π_ref))] with q held constant gives y_t the return r and,
    with −β, the sum of the later log-ratios. A per-token penalty with the reverse KL's gradient
    holds the states fixed and gives y_t only its own log-ratio. This is the rest, for completion i
    of a prompt:

        c_t = log q_t − k3(π_ref(y_t)/π(y_t))                          what y_t earns
        R_t = β Σ_{t' > t} c_t',    N_t = number of tokens after y_t
        result = (R_t − mean_j R_t) − β m (N_t − mean_j N_t)

    with means over the prompt's other completions j (R_t and N_t are 0 after the end of j) and m
    their mean log q per token. k3 to π_ref replaces log(π/π_ref): the same expectation, less
    variance. The term with m removes what a completion would earn by length alone: Π_t q_t of
    Branch grows with every branch point, so Eq. 4 prefers long completions. The optimum is π_ref ·
    Π_t (q_t/e^m) · exp(r/β) instead, which is Eq. 4 among completions of one length. All means
    exclude completion i itself, so none biases its gradient.

    Args:
        per_token_logps: log π(y_t | s_t), (B, T); its gradient is not used.
        ref_per_token_logps: log π_ref(y_t | s_t), (B, T).
        completion_mask: 1 for the tokens of the completion, (B, T).
        groups: a number for each completion, equal for those of one prompt, (B,).
        beta: KL coefficient β.
        log_guide: log q_t, (B, T); None is q = 1.

    Returns:
        (B, T) in units of reward, without gradient, 0 outside the mask; to be added to
        `leave_one_out(advantages)`.

    Raises:
        ValueError: a prompt has a single completion.
    """
    with torch.no_grad(), torch.autocast(per_token_logps.device.type, enabled=False):
        return _sequence_credit(
            per_token_logps, ref_per_token_logps, completion_mask, groups, beta, log_guide
        )


def _sequence_credit(
    per_token_logps: Tensor,
    ref_per_token_logps: Tensor,
    completion_mask: Tensor,
    groups: Tensor,
    beta: float,
    log_guide: Tensor | None,
) -> Tensor:
    """In float32 at least: under autocast sums over completions would be 16-bit products."""
    dtype = torch.promote_types(per_token_logps.dtype, torch.float32)
    per_token_logps, ref_per_token_logps = per_token_logps.to(dtype), ref_per_token_logps.to(dtype)
    valid = completion_mask.bool()
    # Bounded as in Unsloth's loss, so that one rare token does not decide every token before it.
    kl = k3(per_token_logps, ref_per_token_logps, k3_max=UNSLOTH_K3_MAX)
    others = _others(groups).to(kl.dtype)
    # Without completion i itself, or its own return would bias its gradient.
    weights = others / others.sum(-1, keepdim=True)
    earned = torch.where(valid, -kl, 0.0)
    if log_guide is None:
        later = _sum_of_later(earned)
        result = later - weights @ later
    else:
        log_guide = torch.where(valid, log_guide.to(kl.dtype), 0.0)
        tokens = valid.sum(-1, dtype=kl.dtype)
        # Mean log q per token of the others: what length alone would earn.
        mean = (others @ log_guide.sum(-1)) / (others @ tokens).clamp(min=1)
        later, count = _sum_of_later(earned + log_guide), _sum_of_later(valid.to(kl.dtype))
        result = later - weights @ later - mean.unsqueeze(1) * (count - weights @ count)
    return torch.where(valid, beta * result, 0.0)


def _sum_of_later(values: Tensor) -> Tensor:
    """Σ_{t' > t} values_t', (B, T)."""
    # A reversed cumulative sum includes t itself, which the penalty in the loss pays already.
    return values.flip(-1).cumsum(-1).flip(-1) - values


def leave_one_out(advantages: Tensor, groups: Tensor) -> Tensor:
    """A · n/(n − 1): TRL's baseline, the mean of all n, becomes the mean of the n − 1 others.

    For (B,) or (B, T). With the completion's own reward in its baseline the policy gradient is (n −
    1)/n of its value, so reward and KL would have other weights than in Eq. 6.
    """
    others = _others(groups).sum(-1).to(advantages.dtype)
    factor = (others + 1) / others
    return advantages * (factor if advantages.dim() == 1 else factor.unsqueeze(1))


def _others(groups: Tensor) -> Tensor:
    """Whether completions i and j are different ones of the same prompt, (B, B) bool."""
    others = groups.unsqueeze(0) == groups.unsqueeze(1)
    others.fill_diagonal_(False)
    if not others.any(-1).all():
        raise ValueError(
            "with credit='sequence' a micro-batch must hold at least two completions of each "
            f"prompt, got groups {groups.tolist()}"
        )
    return others


def with_sequence_credit(
    advantages: Tensor,
    signals: TokenSignals,
    groups: Tensor,
    *,
    beta: float,
    log_guide: Tensor | None,
    own_baseline: bool = False,
) -> tuple[Tensor, Tensor]:
    """The advantages for credit="sequence", (B, T), and the credit in them, (B, T).

    Args:
        advantages: TRL's, whose baseline is the mean over all completions of a prompt, (B,) or (B,
            T).
        groups: a number for each completion, equal for those of one prompt, (B,).
        log_guide: log q_t, (B, T); None is q = 1.
        own_baseline: the advantages come from a rule with its own baseline (`group_advantages`) and
            are not rescaled.

    Raises:
        ValueError: a prompt has a single completion in the batch, or the signals no reference.
    """
    ref_logps = signals.require("ref_logps", "credit='sequence'")
    credit = sequence_credit(
        signals.policy_logps, ref_logps, signals.mask, groups, beta=beta, log_guide=log_guide
    )
    if not own_baseline:
        advantages = leave_one_out(advantages, groups)
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(1)
    return advantages + credit.to(advantages.dtype), credit
