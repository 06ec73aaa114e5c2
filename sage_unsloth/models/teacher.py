"""Loads the frozen teacher of a `TeacherGuide`, and excludes it from saved models.

A teacher is another adapter on the policy's base, which shares the base's weights, or another model
with the same tokenizer.
"""

import shutil
from pathlib import Path
from typing import Any

from sage_unsloth.models.loading import load_policy
from sage_unsloth.models.weights import check_adapter_fits

ADAPTER = "teacher"
"""The name of a teacher's adapter in the policy's model."""


def is_adapter(path: str | Path) -> bool:
    """Whether a teacher is an adapter's folder, not a model."""
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
    """The name of a frozen adapter, now in `model`, or a separate frozen model, for `guided_kl`.

    Args:
        path: an adapter's folder, or a model's folder or hub id.
        base: folder or hub id of the model below the policy's adapter.
        max_length: prompt and completion together, tokens; only Unsloth's GPU loader uses it.
        load_in_4bit: quantise a teacher that is a model.

    Raises:
        ValueError: an adapter for another base, or for a policy without one; a model with another
            tokenizer.
    """
    if is_adapter(path):
        if not hasattr(model, "peft_config"):
            raise ValueError(
                "an adapter as teacher needs a policy with an adapter, got full fine-tuning and "
                f"{path}. Merge the teacher (python -m sage_unsloth export)"
            )
        check_adapter_fits(base, path)
        model.load_adapter(str(path), ADAPTER, is_trainable=False)
        return ADAPTER
    teacher, its_tokenizer = load_policy(path, max_length=max_length, load_in_4bit=load_in_4bit)
    if its_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"a teacher must have the policy's tokenizer, but {path} has another")
    return teacher.requires_grad_(False).eval()


def drop_teacher(model: Any, teacher: Any) -> None:
    """Removes the teacher's adapter from the trained model, so that it is not saved."""
    if teacher == ADAPTER:
        model.delete_adapter(ADAPTER)


def forget_teacher(checkpoint: Path | None) -> None:
    """Removes the teacher's adapter from a checkpoint.

    transformers would restore it instead of the policy's.
    """
    if checkpoint is not None:
        shutil.rmtree(checkpoint / ADAPTER, ignore_errors=True)
