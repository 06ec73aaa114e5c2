"""The scorer in Unsloth's loss: one pass over the logits (`scoring.py`) where possible.

Unsloth's loss imports its scorer at each call. While the loss of one trainer runs, ours is there
under those names. Unsloth's own is used, and the log says so,

    for a trained output head               ours gives a gradient only to the hidden states
    for an entropy bonus                    our entropies have no gradient
    for a part of the vocabulary in rollouts, and for a float32 copy of the head
    on Unsloth 2026.10.8 and later, except in float32 on a CPU: its kernel scores the reference
        there and rounds 16-bit products in another way, and policy and reference must be scored
        alike. That kernel is made for GPUs and makes one pass too.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.patch.scoring import logps_and_entropies
from sage_unsloth.trainers.listening import listen
from sage_unsloth.trainers.loading import trainer_module
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import (
    COMPUTE_LOSS,
    SCORER_PARAMETERS,
    SCORER_WITH_ENTROPY,
    SCORERS,
    ZOO,
)

KNOWN_OPTIONS = {"max_rows_per_chunk", "lm_head_bias", "return_entropy", "entropy_requires_grad",
                 "fp32_lm_head", "fused_linear"}  # fmt: skip

logger = logging.getLogger(__name__)


class OnePassScorers:
    """Replacements for Unsloth's scorers, by name.

    Args:
        trainer: for whose loss they score; None for scoring without a gradient, which is not
            logged.
    """

    def __init__(self, trainer: Any | None) -> None:
        self.trainer = trainer
        self.zoo = importlib.import_module(ZOO)
        # Not every tested version has all of these names.
        originals = {name: getattr(self.zoo, name) for name in SCORERS if hasattr(self.zoo, name)}
        options = inspect.signature(originals[SCORER_WITH_ENTROPY]).parameters
        self.fp32_lm_head = bool(options["fp32_lm_head"].default)
        self.most_rows = options["max_rows_per_chunk"].default
        self.has_own_kernel = has_one_pass_kernel(originals[SCORER_WITH_ENTROPY])
        self.by_name = {name: self._scorer(function) for name, function in originals.items()}
        self.calls = 0
        self._logged: set[str | None] = set()

    def _scorer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def score(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
            self.calls += 1
            given = dict(zip(SCORER_PARAMETERS, args, strict=False)) | kwargs
            # Decided at every call: autocast and what is trained can change between two.
            reason = self.why_unsupported(given, len(args))
            self._log(reason)
            if reason is not None:
                return original(*args, **kwargs)
            hidden, head, index, chunks, *transforms = (
                given.get(name, default)
                for name, default in zip(
                    SCORER_PARAMETERS, (None, None, None, 4, 0.0, 0.0, 0.0, 1.0), strict=True
                )
            )
            most_rows = given.get("max_rows_per_chunk") or self.most_rows
            # Unsloth caps rows per chunk too. Chunks must be cut alike, or logits round otherwise.
            if most_rows > 0:
                chunks = max(chunks, -(-index.numel() // most_rows))
            logps, entropies = logps_and_entropies(
                hidden, head, index, chunks, *transforms, lm_head_bias=given.get("lm_head_bias")
            )
            return (logps, entropies) if given.get("return_entropy") else logps

        score.__signature__ = inspect.signature(original)  # where Unsloth's loss reads a default
        return score

    def why_unsupported(self, given: dict[str, Any], positional: int = 0) -> str | None:
        """Why this call needs Unsloth's own scorer; None if ours can answer it."""
        head, bias = given["lm_head"], given.get("lm_head_bias")
        known = {*SCORER_PARAMETERS, *KNOWN_OPTIONS}
        if positional > len(SCORER_PARAMETERS) or not given.keys() <= known:
            return "it is called with options that ours does not have"
        if self.fp32_lm_head or given.get("fp32_lm_head"):
            return "UNSLOTH_VLLM_FP32_LM_HEAD asks for a float32 copy of the output head"
        differentiates = self.trainer is not None and has_entropy_bonus(self.trainer)
        if given.get("return_entropy") and differentiates:
            return "entropy_coef needs the entropies' gradient"
        trained = head.requires_grad or (bias is not None and bias.requires_grad)
        if trained and torch.is_grad_enabled():
            return "the output head is trained"
        if self.has_own_kernel:
            kind = head.device.type
            autocast = torch.is_autocast_enabled(kind)
            dtype = torch.get_autocast_dtype(kind) if autocast else head.dtype
            if kind != "cpu" or dtype != torch.float32:
                return (
                    f"the reference is scored by its kernel, which rounds {kind} {dtype} otherwise"
                )
        return None

    def _log(self, reason: str | None) -> None:
        if self.trainer is None or reason in self._logged:
            return
        self._logged.add(reason)
        if reason is None:
            logger.info("The loss scores the policy in one pass over the logits.")
        else:
            logger.info("The loss scores the policy by Unsloth's own function: %s.", reason)


def has_one_pass_kernel(scorer: Callable[..., Any]) -> bool:
    """Whether Unsloth's own scorer can skip the gradient of entropies (2026.10.8 on)."""
    return "entropy_requires_grad" in inspect.signature(scorer).parameters


def has_entropy_bonus(trainer: Any) -> bool:
    coef = getattr(trainer, "entropy_coef", getattr(trainer.args, "entropy_coef", 0.0))
    return bool(coef) and not getattr(trainer.args, "use_adaptive_entropy", False)


@contextmanager
def one_pass_loss(trainer: Any) -> Iterator[None]:
    """Within this context, the loss of `trainer` scores the policy in one pass over the logits.

        with one_pass_loss(trainer):
            trainer.train()

    Loss and gradient are Unsloth's within rounding; time and memory are less on a CPU
    (docs/architecture.md). `guided_kl` does this itself if entropies are needed; the two can be
    combined in either order. Where it is not possible, Unsloth's own scorer is used, and the log
    says why.

    Args:
        trainer: Unsloth's generated `GRPOTrainer`.

    Raises:
        ContractError: another trainer. TRL's own loss makes one pass by itself.
    """
    # Refuses TRL's trainer, whose loss imports none of these functions.
    trainer_module(type(trainer))
    scorers, losses = OnePassScorers(trainer), 0

    def compute(proceed: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal losses
        losses += 1
        with replace_attributes(scorers.zoo, **scorers.by_name):
            return proceed(*args, **kwargs)

    with listen(trainer, "one_pass", **{COMPUTE_LOSS: compute}):
        yield
    if losses and not scorers.calls:
        logger.warning(
            "one_pass_loss had no effect, because Unsloth's loss called none of the functions that "
            "it replaces: the model returns logits, or completions are long. guided_kl(trainer, "
            "log_entropy=True) covers long ones"
        )
