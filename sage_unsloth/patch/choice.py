"""What one `guided_kl` was asked for, in one place."""

from dataclasses import dataclass
from typing import Any

from sage_unsloth.objective.advantage_rules import AdvantageRule
from sage_unsloth.objective.advantages import ShapeAdvantages
from sage_unsloth.objective.kl import PENALTIES
from sage_unsloth.objective.protocols import Guide


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The arguments of `guided_kl`, by their names; `rule` is `advantages`, looked up.

    It is checked against the trainer (`settings.check_settings`), recorded in each checkpoint and
    compared on resume (`trained_with`), and what the hook goes by.
    """

    guide: Guide | None
    kl_estimator: str
    k3_bounded: bool | None
    credit: str
    kl_in: str
    teacher: Any
    rule: AdvantageRule
    shape_advantages: ShapeAdvantages | None
    log_entropy: bool

    @property
    def needs(self) -> set[str]:
        """The optional signals that the guide reads."""
        return set() if self.guide is None else set(self.guide.needs)

    @property
    def needs_entropies(self) -> bool:
        return self.log_entropy or "entropies" in self.needs

    def is_bounded(self, bounds_k3: bool) -> bool:
        """Whether k3 is bounded, by a trainer whose own is (`bounds_k3`) or by the setting."""
        return bounds_k3 if self.k3_bounded is None else self.k3_bounded

    def needs_hook(self, bounds_k3: bool) -> bool:
        """Whether anything of the trainer's loss must be replaced."""
        if self.kl_estimator in PENALTIES or self.is_bounded(bounds_k3) != bounds_k3:
            return True
        asked = (self.guide, self.shape_advantages)
        other = self.credit != "token" or self.kl_in != "loss" or self.log_entropy
        return other or any(value is not None for value in asked)
