"""An algorithm: a row of settings and a guide."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.methods.choices import UNDECIDED, check_choices
from sage_unsloth.methods.rehearsal import rehearsal_rule
from sage_unsloth.methods.token_rules import token_rule
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
"""Settings by which algorithms differ."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What one algorithm sets; data, seeds, sampling and learning rate belong to the run.

    `algorithm.beta` reads a setting as a run of it has it.

    Attributes:
        name: for `--algorithm`.
        description: one line: its gradient, or what a comparison with it isolates.
        settings: fields of `RlvrConfig` -> values. A missing one of `SETTINGS` has its default; any
            other is the run's.
        guide: shapes the KL anchor; None is q = 1.
        paper_row: its row in the paper's tables, or None.

    Raises:
        ValueError: an unknown setting, loss type, rule, estimator or credit; or a guide, penalty or
            credit without its KL term.
        TypeError: `guide` is not a guide.
    """

    name: str
    description: str
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    guide: Guide | None = None
    group: str = "your own"
    paper_row: str | None = None

    def __post_init__(self) -> None:
        known = {item.name for item in fields(RlvrConfig)}
        if unknown := [name for name in self.settings if name not in known]:
            raise ValueError(
                "an algorithm's settings must be fields of RlvrConfig, got "
                f"{', '.join(map(repr, unknown))} for {self.name!r}"
            )
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(f"loss_type must be one of {LOSS_TYPES}, got {self.loss_type!r}")
        advantage_rule(self.advantages)
        token_rule(self.token_advantages)  # raises for an unknown one
        rehearsal_rule(self.rehearsal)
        self._check_choices()

    def __getattr__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise AttributeError(f"an Algorithm has no attribute {name!r}")
        # Defaults are attributes of the dataclass itself.
        return self.settings.get(name, getattr(RlvrConfig, name))

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
        """This algorithm under a run's settings, checked before data, plan or model are loaded.

        Args:
            settings: fields of `RlvrConfig` that replace the algorithm's own.

        Raises:
            ValueError: they contradict each other, the guide or the teacher.
        """
        decided = self.all_settings()
        own = {name: value for name, value in settings.items() if name in decided}
        changed = replace(self, settings={**self.settings, **own})
        changed._check_choices(teacher=settings.get("teacher") or None)
        return changed

    def check_name(self, settings: Mapping[str, Any]) -> None:
        """Checks that a run under this name still has what the algorithm changes.

        A strength may change (β, settings of a rule), but not to or from 0, and not the kind.

        Raises:
            ValueError: a setting contradicts the name.
        """
        for name in (name for name in SETTINGS if name in settings):
            # A setting that the algorithm leaves at its default may be changed freely.
            mine, usual = _kind(getattr(self, name)), _kind(getattr(RlvrConfig, name))
            if mine != usual and _kind(settings[name]) != mine:
                raise ValueError(
                    f"{self.name} is named for {name}={getattr(self, name)}, got "
                    f"{name}={settings[name]}. Leave it out, or use --algorithm grpo"
                )

    def configure(self, config: RlvrConfig) -> RlvrConfig:
        """`config` with this algorithm's settings; the guide is passed to `rlvr` separately."""
        return replace(config, **self.all_settings())

    def all_settings(self) -> dict[str, Any]:
        """Every setting that the algorithm decides, with the defaults of `SETTINGS`."""
        return {name: getattr(RlvrConfig, name) for name in SETTINGS} | dict(self.settings)


def _kind(value: Any) -> Any:
    """A setting without its strength: a rule's name, or whether a number is 0."""
    return value.partition(",")[0] if isinstance(value, str) else value != 0
