"""What may not be chosen together: guide, β, KL penalty, credit and teacher, judged in one place."""

from typing import Any, Final

from sage_unsloth.objective.credit import check_credit
from sage_unsloth.objective.guides import Guide

UNDECIDED: Final = object()
"""In the place of a teacher that is chosen later."""


def check_choices(
    *,
    guide: Guide | None,
    beta: float,
    kl_estimator: str = "k3",
    credit: str = "token",
    teacher: Any = UNDECIDED,
) -> None:
    """Raise where the parts of an objective contradict each other."""
    from sage_unsloth.patch.settings import check_causal, check_guide, check_penalty, check_teacher

    if guide is not None:
        check_guide(guide, beta)
    check_penalty(kl_estimator, beta)
    check_credit(credit, kl_estimator, beta)
    check_causal(credit, guide)
    if teacher is not UNDECIDED:
        check_teacher(frozenset() if guide is None else guide.needs, teacher)
