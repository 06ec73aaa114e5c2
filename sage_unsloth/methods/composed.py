"""The settings of a run as one context: `guided_kl` with the methods around it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from sage_unsloth.methods.advantage_rules import GRPO, Rule
from sage_unsloth.methods.choices import check_places
from sage_unsloth.methods.credit import credit_sequences
from sage_unsloth.methods.group_rewards import use_advantages
from sage_unsloth.methods.kl_reward import kl_in_reward
from sage_unsloth.methods.own_penalty import kl_penalty
from sage_unsloth.methods.rehearsal import RehearsalRule, Stored, add_rehearsal, rehearsal_rule
from sage_unsloth.methods.resampling import dynamic_sampling
from sage_unsloth.methods.token_rules import NONE, use_token_advantages
from sage_unsloth.objective.advantages import ShapeAdvantages
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.patch.guided import guided_kl


@contextmanager
def with_methods(
    trainer: Any,
    guide: Guide | None = None,
    *,
    advantages: Rule = GRPO,
    token_advantages: str | ShapeAdvantages | None = NONE,
    kl_estimator: str = "k3",
    k3_bounded: bool | None = None,
    credit: str = "token",
    kl_in: str = "loss",
    rehearsal: str | RehearsalRule = RehearsalRule.divergence,
    rehearsal_coef: float = 0.0,
    stored: Sequence[Stored] = (),
    max_resamples: int = 0,
    **options: Any,
) -> Iterator[None]:
    """Within this context, the trainer trains with these settings.

        with with_methods(trainer, guide, advantages="pkpo,k=4", kl_estimator="k2"):
            trainer.train()

    A setting at its default opens nothing.

    Args:
        advantages: as for `use_advantages`.
        token_advantages: as for `use_token_advantages`.
        kl_estimator, k3_bounded: as for `kl_penalty`.
        credit: "token", or "sequence" (`credit_sequences`).
        kl_in: "loss", or "reward" (`kl_in_reward`).
        rehearsal, rehearsal_coef, stored: as for `add_rehearsal`.
        max_resamples: as for `dynamic_sampling`.
        options: further arguments of `guided_kl`.

    Raises:
        ValueError: an unknown setting, or settings that contradict each other or the trainer.
        ContractError: see `guided_kl`.
    """
    rule = rehearsal_rule(rehearsal) if isinstance(rehearsal, str) else rehearsal
    check_places(credit, kl_in)
    with ExitStack() as stack:
        for method in (
            use_advantages(trainer, advantages),
            use_token_advantages(trainer, token_advantages),
            kl_penalty(trainer, kl_estimator, bounded=k3_bounded),
            *([credit_sequences(trainer)] if credit == "sequence" else []),
            *([kl_in_reward(trainer)] if kl_in == "reward" else []),
            add_rehearsal(trainer, stored, coef=rehearsal_coef, rule=rule),
            dynamic_sampling(trainer, max_resamples),
            guided_kl(trainer, guide, **options),
        ):
            stack.enter_context(method)
        yield
