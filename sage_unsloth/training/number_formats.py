"""The precision that an adapter is trained in."""

from typing import Any

from sage_unsloth.models.device import has_gpu

PRECISIONS = ("auto", "bfloat16", "float16")
"""Of frozen weights and products; "auto" is float32 on a CPU, and on a GPU the trainer's choice."""


def check_precision(
    precision: str, *, full_finetuning: bool = False, backend: str = "unsloth"
) -> None:
    """Raises ValueError for an unknown precision, 16-bit full fine-tuning, or TRL's own trainer."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if full_finetuning and precision != "auto":
        raise ValueError(
            f"full fine-tuning trains float32 weights, got precision={precision!r}. Set "
            "precision=auto, or train an adapter"
        )
    if backend != "unsloth" and precision != "auto":
        raise ValueError(
            "precision is for Unsloth's trainer, and TRL's uses the GPU's own, got "
            f"precision={precision!r} with backend={backend!r}. Set precision=auto"
        )


def dtype_of_weights(precision: str) -> str | None:
    """The `dtype` of `load_policy`."""
    return None if precision == "auto" else precision


def precision_arguments(precision: str) -> dict[str, Any]:
    """The trainer's `bf16` and `fp16`; empty for "auto" on a GPU, where Unsloth decides."""
    if has_gpu() and precision == "auto":
        return {}
    return {"bf16": precision == "bfloat16", "fp16": precision == "float16"}
