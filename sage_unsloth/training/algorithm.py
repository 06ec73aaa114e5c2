"""What an algorithm is: a row of settings and a guide."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.methods.choices import UNDECIDED, check_choices
from sage_unsloth.methods.rehearsal import rehearsal_rule
from sage_unsloth.methods.token_rules import check_token_rule
from sage_unsloth.objective.loss import LOSS_TYPES
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.training.rlvr_config import RlvrConfig

SETTINGS = (
    "loss_type",
    "scale_rewards",
    "advantages",
    "token_advantages",
    "entropy_coef",
    "rehearsal_coef",
    "rehearsal",
    "epsilon_high",
    "beta",
    "kl_estimator",
    "credit",
    "kl_in",
)
"""The fields of an algorithm that are settings of `RlvrConfig`; its guide is the other choice."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What one algorithm sets; everything else of a run (data, seeds, sampling, learning rate) is
    the run's own.

    Attributes:
        name: as given to `--algorithm`.
        description: one line: which gradient it has, or what a comparison with it isolates.
        paper_row: its row in the paper's tables; None where they have none.
        loss_type: how token losses are reduced.
        scale_rewards: what advantages are divided by ("group": the standard deviation of the
            prompt's rewards; "none").
        advantages: the rule that makes advantages of a group's rewards
            (`sage_unsloth.methods.advantage_rules`).
        token_advantages: the rule that changes those of single tokens
            (`sage_unsloth.methods.token_rules`).
        entropy_coef: weight of an entropy bonus.
        rehearsal_coef, rehearsal: weight and kind of a divergence from π_ref on its own completions
            (`sage_unsloth.methods.rehearsal`).
        epsilon_high: upper clip of the importance ratio.
        beta: KL coefficient β; 0 drops the KL term.
        kl_estimator: the KL penalty, one of `sage_unsloth.methods.penalties.KL_ESTIMATORS`.
        credit: "token", the paper's loss, or "sequence", the gradient of Eq. 6
            (`sage_unsloth.methods.credit.sequence_credit`).
        kl_in: "loss", the paper's, or "reward", the KL of whole completions in the reward.
        guide: shapes the KL anchor; None is q = 1.

    Raises:
        ValueError: an unknown loss type, rule, estimator or credit, or a guide, penalty or credit
            of ours without its KL term.
        TypeError: `guide` is not a guide.
    """

    name: str
    description: str
    paper_row: str | None = None
    loss_type: str = RlvrConfig.loss_type
    scale_rewards: str = RlvrConfig.scale_rewards
    advantages: str = RlvrConfig.advantages
    token_advantages: str = RlvrConfig.token_advantages
    entropy_coef: float = RlvrConfig.entropy_coef
    rehearsal_coef: float = RlvrConfig.rehearsal_coef
    rehearsal: str = RlvrConfig.rehearsal
    epsilon_high: float = RlvrConfig.epsilon_high
    beta: float = RlvrConfig.beta
    kl_estimator: str = RlvrConfig.kl_estimator
    credit: str = RlvrConfig.credit
    kl_in: str = RlvrConfig.kl_in
    guide: Guide | None = None

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {LOSS_TYPES}; got {self.loss_type!r}")
        advantage_rule(self.advantages)
        check_token_rule(self.token_advantages)
        rehearsal_rule(self.rehearsal)
        self._check_choices()

    def _check_choices(self, teacher: Any = UNDECIDED) -> None:
        check_choices(
            guide=self.guide,
            beta=self.beta,
            kl_estimator=self.kl_estimator,
            credit=self.credit,
            kl_in=self.kl_in,
            teacher=teacher,
        )

    def with_settings(self, settings: Mapping[str, Any]) -> "Algorithm":
        """This algorithm under settings of a run, judged before data, plan or model are loaded.

        Args:
            settings: fields of `RlvrConfig`. Those in `SETTINGS` take the place of the algorithm's
                own, `teacher` must suit its guide, and all others are the run's affair.

        Raises:
            ValueError: they contradict each other, the guide, the teacher, or what the algorithm
                is named for.
        """
        own = {name: value for name, value in settings.items() if name in SETTINGS}
        changed = replace(self, **own)
        changed._check_choices(teacher=settings.get("teacher") or None)
        return changed

    def check_name(self, settings: Mapping[str, Any]) -> None:
        """Check that a run under this name would still have what the algorithm changes.

        A strength may change (β, the settings of a rule), but not to or from 0, and not the kind.

        Raises:
            ValueError: a setting contradicts the name.
        """
        for name in (name for name in SETTINGS if name in settings):
            mine, usual = (_kind(getattr(row, name)) for row in (self, Algorithm))
            if mine != usual and _kind(settings[name]) != mine:
                raise ValueError(
                    f"{self.name} is named for {name}={getattr(self, name)}; got "
                    f"{name}={settings[name]}; leave it out, or take a row that leaves it open: "
                    "--algorithm grpo"
                )

    def configure(self, config: RlvrConfig) -> RlvrConfig:
        """`config` with this algorithm's settings; the guide is passed to `rlvr` beside it."""
        return replace(config, **{name: getattr(self, name) for name in SETTINGS})


def _kind(value: Any) -> Any:
    """What a setting is, without its strength: a rule's name, or whether a number is 0."""
    return value.partition(",")[0] if isinstance(value, str) else value != 0
