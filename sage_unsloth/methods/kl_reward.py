"""The KL in the reward, instead of a penalty in the loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.methods.choices import check_together
from sage_unsloth.methods.group_rewards import (
    check_rewards_are_summed,
    drawn_logps,
    reference_logps,
    replace_group_advantages,
    token_mask,
)
from sage_unsloth.patch.choice import Choice, Method, add_method
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.listening import listen
from sage_unsloth.trainers.replaced import replace_attributes


@contextmanager
def kl_in_reward(trainer: Any) -> Iterator[None]:
    """Within this context, the KL is part of the reward, and the loss has no KL term.

    β times the log-ratio of each whole completion to π_ref is subtracted from its reward before
    advantages are computed (`less_kl`). `guided_kl` then accepts no guide and no other penalty.

        with kl_in_reward(trainer), guided_kl(trainer):
            trainer.train()
    """
    method = Method(name="kl_in", record="reward", check=_check_trainer)
    beta = trainer.beta

    def term(batch: dict[str, Any]) -> Tensor:
        scored = drawn_logps(trainer, batch), reference_logps(trainer, batch)
        # From 0, since `roll_out` adds the term to the rewards.
        nothing = torch.zeros_like(batch["advantages"])
        return less_kl(nothing, *scored, token_mask(trainer, batch), beta=beta)

    def compute_loss(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replace_attributes(trainer, beta=0.0):  # it is in the advantages already
            return proceed(*args, **kwargs)

    with (
        add_method(trainer, method),
        replace_group_advantages(trainer) as groups,
        replace_attributes(groups, term=term),
        listen(trainer, "kl_in", **{names.COMPUTE_LOSS: compute_loss}),
    ):
        yield


def _check_trainer(trainer: Any, choice: Choice) -> None:
    check_together(trainer, choice)
    check_rewards_are_summed(trainer, choice)


def less_kl(
    rewards: Tensor, logps: Tensor, ref_logps: Tensor, completion_mask: Tensor, *, beta: float
) -> Tensor:
    """r − β Σ_t (log π_old(y_t) − log π_ref(y_t)), the KL in the reward (k1, whole completions).

    The log-ratio of a completion is an unbiased estimate of KL(π‖π_ref) over completions. As a
    reward it credits a token with the KL of later ones: with r − mean of the others as advantage,
    the gradient is that of E[r] − β KL (RLHF's, arXiv 2203.02155; compared with a KL in the loss in
    2512.21852). Under a rule that divides, β is divided with the reward.

    Args:
        rewards: (B,).
        logps, ref_logps: of the sampling policy and of the reference, nats, (B, T).
        completion_mask: (B, T).

    Returns:
        (B,), in units of reward.
    """
    # k1 and not k3: k3's gradient as a reward is not that of the KL over completions.
    difference = torch.where(completion_mask.bool(), logps.float() - ref_logps.float(), 0.0)
    return rewards - beta * difference.sum(1).to(rewards)
