"""What a guide must be, and what it requires."""

from collections.abc import Set
from typing import Any

from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.signals import OPTIONAL_SIGNALS


def check_guide(guide: Guide, beta: float) -> None:
    """Raises TypeError for an object that is not a guide, and ValueError for β = 0."""
    if isinstance(guide, type):
        raise TypeError(
            f"a guide must be an instance, got the class {guide.__name__}. Pass {guide.__name__}()"
        )
    if (
        not isinstance(guide, Guide)
        or not isinstance(guide.needs, Set)
        or not guide.needs <= {*OPTIONAL_SIGNALS}
    ):
        raise TypeError(
            "a guide must have a method log_guide(signals, *, step, max_steps, generator) and a "
            f"set `needs` of {OPTIONAL_SIGNALS}, got {guide!r:.100} with `needs` "
            f"{getattr(guide, 'needs', None)!r:.100}"
        )
    if beta == 0.0:
        raise ValueError(
            "beta must not be 0 with a guide, because the guide shapes the KL anchor, got "
            f"beta={beta}. Set beta=0.05, or train without a guide"
        )


def check_teacher(guide: Guide | None, teacher: Any) -> None:
    """Raises ValueError unless a teacher is given exactly if the guide reads one."""
    needed = guide is not None and "teacher_logps" in guide.needs
    if needed != (teacher is not None):
        raise ValueError(
            "a teacher is given exactly with a guide that needs 'teacher_logps', got "
            + (
                "none. Set teacher to an adapter or a model with the same tokenizer"
                if needed
                else f"teacher={teacher!r:.100} without such a guide"
            )
        )
