"""A guide learned elsewhere: a teacher that knows better ways of solving, in the place of π_ref where it was asked to look.

The paper leaves learned guides to the future. Here a frozen teacher (another adapter on the same base, or another model with the
same tokenizer) scores each rollout batch once, without gradient, and

    q_t = clip((π_teacher(y_t | s_t) / π_ref(y_t | s_t))^κ, q_min, q_max)

so that with κ = 1 and no clip the anchor q·π_ref is the teacher itself.
"""

import math
import shutil
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sage_unsloth.guides import Q_MAX, Q_MIN, TokenSignals, check_clip
from sage_unsloth.models import load_policy
from sage_unsloth.weights import check_adapter

ADAPTER = "teacher"
"""The name of a teacher's adapter in the policy's model."""


@dataclass(frozen=True)
class TeacherGuide:
    """q_t = clip((π_teacher/π_ref)^κ): the anchor leans towards what the teacher finds likelier than the reference does.

    q_t depends on the token and on what is before it alone, so Π_t q_t is a guide of Eq. 7, clipped token by token.

    Attributes:
        kappa: κ >= 0; 0 leaves the anchor at π_ref.
        q_min, q_max: q_t is clipped to [q_min, q_max].
    """

    kappa: float = 1.0
    q_min: float = Q_MIN
    q_max: float = Q_MAX
    needs: ClassVar[Set[str]] = frozenset({"teacher_logps"})

    def __post_init__(self) -> None:
        check_clip(self.q_min, self.q_max)
        if not (math.isfinite(self.kappa) and self.kappa >= 0):
            raise ValueError(
                f"kappa must be finite and >= 0 because it is an exponent; got {self.kappa}"
            )

    @torch.no_grad()
    def log_guide(
        self,
        signals: TokenSignals,
        *,
        step: int,
        max_steps: int,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """log q_t, (B, T) float32; `step`, `max_steps` and `generator` are not used.

        Raises:
            ValueError: the signals carry no log-probabilities of a teacher.
        """
        teacher, ref = signals.require("teacher_logps", self), signals.require("ref_logps", self)
        log_guide = self.kappa * (teacher.float() - ref.float())
        log_guide = log_guide.clamp(math.log(self.q_min), math.log(self.q_max))
        return torch.where(signals.mask.bool(), log_guide, 0.0)


def is_adapter(path: str | Path) -> bool:
    """Whether a teacher is an adapter's folder, and not a model's folder or hub id."""
    return (Path(path) / "adapter_config.json").is_file()


def load_teacher(
    path: str | Path,
    base: str | Path,
    model: Any,
    tokenizer: Any,
    *,
    max_length: int = 2048,
    load_in_4bit: bool = False,
) -> Any:
    """What `guided_kl` takes as its teacher: the name of a frozen adapter in `model`, or a frozen model of its own.

    Args:
        path: an adapter's folder, or a model's folder or hub id.
        base: folder or hub id of the model below the policy's adapter.
        model: the policy.
        tokenizer: the policy's.
        max_length: prompt and completion together, tokens; only Unsloth's GPU loader uses it.
        load_in_4bit: quantise a teacher that is a model (GPU only).

    Raises:
        ValueError: an adapter for another base, or beside a policy without one; a model with another tokenizer.
    """
    if is_adapter(path):
        if not hasattr(model, "peft_config"):
            raise ValueError(
                f"a teacher that is an adapter needs a policy that trains one; got full fine-tuning and {path}; merge the "
                "teacher into a model of its own (python -m sage_unsloth export)"
            )
        check_adapter(base, path)
        model.load_adapter(str(path), ADAPTER, is_trainable=False)
        return ADAPTER
    teacher, its_tokenizer = load_policy(path, max_length=max_length, load_in_4bit=load_in_4bit)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            "a teacher must have the policy's tokenizer, because it scores the policy's tokens; "
            f"{path} has another; take a teacher of the same family"
        )
    return teacher.requires_grad_(False).eval()


def drop_teacher(model: Any, teacher: Any) -> None:
    """Take the teacher's adapter out of the trained model, so that it is not saved with it."""
    if teacher == ADAPTER:
        model.delete_adapter(ADAPTER)


def forget_teacher(checkpoint: Path | None) -> None:
    """Take the teacher's adapter out of a checkpoint: transformers, finding it there, would restore it and not the policy's."""
    if checkpoint is not None:
        shutil.rmtree(checkpoint / ADAPTER, ignore_errors=True)
