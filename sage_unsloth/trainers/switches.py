"""Every environment variable of Unsloth that this package sets or reads."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


def run_without_gpu() -> None:
    """Before the import: Unsloth loads, and scores correctly, on a machine without a GPU.

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
    """Before the import: vLLM's cache gives way to training and comes back for the rollouts."""
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
    """Before a model with vLLM is loaded: under standby Unsloth would replace the share of the
    card's memory that was asked for by one of its own.
    """
    os.environ["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] = "1"


def recompute_logits(on: bool) -> None:
    """The loss computes its logits again in the backward pass instead of keeping them."""
    os.environ["UNSLOTH_GRPO_LOGPROB_RECOMPUTE"] = "1" if on else "0"


@contextmanager
def forward_returns_logits() -> Iterator[None]:
    """Within this context a model's forward pass returns logits, as generation needs them;
    afterwards every variable of Unsloth's is what it was.
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
    """The rule by which Unsloth drops rollout tokens from the loss; None without one."""
    return os.environ.get("UNSLOTH_GRPO_ROLLOUT_RS") or None


def drops_equal_rewards() -> bool:
    """Whether Unsloth leaves groups of equal rewards out of the loss and its normaliser."""
    return os.environ.get("UNSLOTH_GRPO_ZERO_VARIANCE_EXCLUDE", "0") == "1"


def train_in_float32() -> None:
    """Before a trainer over a float32 model is made: no autocast, which Unsloth would otherwise
    turn on for such a model too.
    """
    os.environ["UNSLOTH_MIXED_PRECISION"] = "bfloat16"
