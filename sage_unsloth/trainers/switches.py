"""Every environment variable of Unsloth that this package sets or reads."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def run_without_gpu() -> None:
    """Before the import: makes Unsloth load, and score correctly, without a GPU.

    Sequence packing is off because a plain transformers forward ignores its arguments and would
    score wrongly. Compilation is off unless the caller has set `UNSLOTH_COMPILE_DISABLE=0`.
    """
    os.environ["UNSLOTH_ALLOW_CPU"] = "1"
    os.environ["UNSLOTH_GRPO_SEQ_PACKING"] = "0"
    os.environ.setdefault("UNSLOTH_COMPILE_DISABLE", "1")


def compilation_is_on() -> bool:
    """Whether Unsloth compiles its loss."""
    return os.environ.get("UNSLOTH_COMPILE_DISABLE", "0") == "0"


def use_standby() -> None:
    """Before the import: vLLM's cache is freed for training and restored for rollouts."""
    if os.environ.get("UNSLOTH_VLLM_STANDBY", "0") != "0":
        return
    if "unsloth" in sys.modules:
        logger.warning(
            "Unsloth was imported without standby, so vLLM keeps its memory while the policy "
            "trains. Set UNSLOTH_VLLM_STANDBY=1 before Python starts if memory runs out"
        )
    else:
        os.environ["UNSLOTH_VLLM_STANDBY"] = "1"


def keep_vllm_memory_share() -> None:
    """Before loading a model with vLLM: keeps the requested share of GPU memory.

    Under standby Unsloth would replace it by its own.
    """
    os.environ["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] = "1"


def recompute_logits(on: bool) -> None:
    """Whether the loss recomputes its logits in the backward pass instead of storing them."""
    os.environ["UNSLOTH_GRPO_LOGPROB_RECOMPUTE"] = "1" if on else "0"


@contextmanager
def forward_returns_logits() -> Iterator[None]:
    """Within this context a forward pass returns logits, as generation needs; restores Unsloth's
    variables.
    """
    before = {name: value for name, value in os.environ.items() if name.startswith("UNSLOTH_")}
    os.environ["UNSLOTH_RETURN_HIDDEN_STATES"] = "0"
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("UNSLOTH_")]:
            if name not in before:
                del os.environ[name]
        os.environ.update(before)


def rollout_rejection() -> str | None:
    """The rule by which Unsloth drops rollout tokens from the loss, or None."""
    return os.environ.get("UNSLOTH_GRPO_ROLLOUT_RS") or None


def drops_equal_rewards() -> bool:
    """Whether Unsloth excludes groups of equal rewards from the loss and its normaliser."""
    return os.environ.get("UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE", "0") == "1"


def train_in_float32() -> None:
    """Before making a trainer of a float32 model: no autocast, which Unsloth would turn on."""
    os.environ["UNSLOTH_MIXED_PRECISION"] = "bfloat16"
