"""How Unsloth scores a rollout batch: by chunks, in a layout of its own.

The reference's entropies come from the scoring that Unsloth does anyway: while it runs, the
function that turns hidden states or logits into log-probabilities also computes the entropy of each
chunk, never of (B, T, V).

Unsloth arranges the values of a chunk as (B, T) in one of several ways: padded rows below each
other, or one packed row that is scattered in row-major order. The log-probabilities show which one
it was: they must be bit-identical in their places, and anything else is a `ContractError`.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_unsloth.patch.one_pass import OnePassScorers, has_one_pass_kernel
from sage_unsloth.trainers.replaced import replace_attributes
from sage_unsloth.trainers.trainer_names import (
    OF_LOGITS,
    ROLLOUT,
    SCORE,
    SCORER_WITH_ENTROPY,
    SCORERS,
    ZOO,
    ContractError,
)

ENTROPY_PART = 1 << 26
"""Elements of the float32 copy of the logits for one part of the entropies."""


class Scored(NamedTuple):
    """One call of a scorer: log-probabilities and entropies of the same tokens, nats."""

    logps: Tensor
    entropies: Tensor


class UnslothScoring:
    """`rollout_batch.Scoring` of Unsloth's generated trainer."""

    def check(self, trainer: Any) -> None:
        _check_functions(trainer)

    def prepare(
        self, trainer: Any, *, with_entropies: bool, teacher: Any
    ) -> AbstractContextManager:
        return nullcontext()

    def score_with_entropies(
        self, score: Callable[..., tuple], with_entropies: bool, *args: Any, **kwargs: Any
    ) -> tuple[tuple, Callable[[], Tensor]]:
        with _record_scores(with_entropies) as calls:
            result = score(*args, **kwargs)
        return result, lambda: in_layout(result[0], calls)

    def in_completion_layout(self, logps: Tensor, batch: dict[str, Any]) -> Tensor:
        return in_completion_layout(logps, batch)


def in_completion_layout(logps: Tensor, batch: dict[str, Any]) -> Tensor:
    """(B, T) float32 from Unsloth's layout, 0 outside the mask.

    Unsloth shifts each row left by its padding, and keeps T + the largest such padding columns.
    """
    mask = batch["completion_mask"]
    left_pad = batch["prompt_mask"].shape[1] - batch["prompt_mask"].sum(1)
    # The last T columns of a row that was shifted left by its padding begin here.
    start = logps.shape[1] - mask.shape[1] - left_pad
    if (start < 0).any():
        raise ContractError(
            f"{SCORE} must return its log-probs by rows that are shifted left by their padding",
            actual=tuple(logps.shape),
            expected=f"at least {mask.shape[1] + int(left_pad.max())} columns",
        )
    columns = start.unsqueeze(1) + torch.arange(mask.shape[1], device=mask.device)
    return torch.where(mask.bool(), logps.float().gather(1, columns.to(logps.device)), 0.0)


def in_layout(ref_logps: Tensor, calls: list[Scored]) -> Tensor:
    """The entropies of the scorer's calls in the layout of `ref_logps`, (B, T), else 0.

    Raises:
        ContractError: `ref_logps` is not made of the log-probabilities of these calls.
    """
    rows: list[Scored] = []
    for call in reversed(calls):
        if call.logps.shape[1:] != ref_logps.shape[1:]:
            break
        rows.insert(0, call)
        if sum(len(c.logps) for c in rows) >= len(ref_logps):
            break
    if rows and torch.equal(torch.cat([c.logps for c in rows]).float(), ref_logps.float()):
        return torch.cat([c.entropies for c in rows])
    places = ref_logps != 0
    for call in reversed(calls):
        logps, entropies = call.logps.flatten().float(), call.entropies.flatten()
        # 0 marks padding. A token of probability 1 drops out on both sides, and its entropy is 0.
        put = logps != 0
        if torch.equal(logps[put], ref_logps[places].float()):
            result = torch.zeros(ref_logps.shape, dtype=entropies.dtype, device=ref_logps.device)
            result[places] = entropies[put].to(ref_logps.device)
            return result
    raise ContractError(
        "the reference's log-probabilities must be those of one scorer's call, scattered in "
        "row-major order, or of several, "
        "a block of rows each",
        actual=[tuple(c.logps.shape) for c in calls],
        expected=tuple(ref_logps.shape),
    )


@contextmanager
def _record_scores(record: bool) -> Iterator[list[Scored]]:
    """Within this context, every call of Unsloth's two scorers also computes entropies."""
    calls: list[Scored] = []
    if not record:
        yield calls
        return
    zoo = importlib.import_module(ZOO)
    plain = {name: getattr(zoo, name) for name in (*SCORERS, OF_LOGITS) if hasattr(zoo, name)}
    # Where Unsloth has a kernel that makes one pass, the reference stays its own to the last bit.
    one_pass = not has_one_pass_kernel(plain[SCORER_WITH_ENTROPY])
    with_entropy = plain[SCORER_WITH_ENTROPY]
    if one_pass:
        with_entropy = OnePassScorers(None).by_name[SCORER_WITH_ENTROPY]

    def of_hidden_states(name: str, *args: Any, **kwargs: Any) -> Tensor:
        whole = {k: v for k, v in kwargs.items() if not k.startswith("support_")}
        with torch.no_grad():
            logps, entropies = with_entropy(*args, **whole, return_entropy=True)
        # The reference must be scored as the policy is, so its log-probs are those of the scorer
        # that was asked: ours are that one's bit for bit (2026.10.7). Over a part of the vocabulary
        # too; the entropy stays the whole's.
        if len(whole) < len(kwargs) or not one_pass:
            before = len(calls)
            logps = plain[name](*args, **kwargs)
            del calls[before:]
        calls.append(Scored(logps, entropies))
        return logps

    def of_logits(
        logits: Tensor, index: Tensor, temperature: float = 1.0, *args: Any, **kwargs: Any
    ) -> Tensor:
        logps = plain[OF_LOGITS](logits, index, temperature, *args, **kwargs)
        calls.append(Scored(logps, entropies_of_logits(logits, temperature)))
        return logps

    replaced = {name: functools.partial(of_hidden_states, name) for name in plain}
    with replace_attributes(zoo, **replaced | {OF_LOGITS: of_logits}):
        yield calls


@torch.no_grad()
def entropies_of_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """H_t of softmax(logits / temperature), nats, (B, T) float32, from (B, T, V), by parts."""
    flat = logits.reshape(-1, logits.shape[-1])
    parts = []
    for rows in flat.split(max(1, ENTROPY_PART // flat.shape[-1])):
        log_p = (rows.float() / temperature).log_softmax(-1)
        parts.append(-(log_p.exp() * log_p).sum(-1))
    return torch.cat(parts).reshape(logits.shape[:-1])


def _check_functions(trainer: Any) -> None:
    """Checks that the names exist, and that the scoring looks up its scorers at each call."""
    zoo = importlib.import_module(ZOO)
    needed = (SCORERS[0], OF_LOGITS, SCORER_WITH_ENTROPY)
    missing = [
        name for name in (ROLLOUT, SCORE) if not callable(getattr(type(trainer), name, None))
    ]
    missing += [name for name in needed if not hasattr(zoo, name)]
    if missing:
        raise ContractError(
            "the trainer and unsloth_zoo.rl_replacements must have these functions",
            actual=f"no {', '.join(missing)}",
            expected=(ROLLOUT, SCORE, *needed),
        )
    source = inspect.getsource(getattr(type(trainer), SCORE))
    requested = "from unsloth_zoo.rl_replacements import" in source and f"{OF_LOGITS}," in source
    parameters = inspect.signature(getattr(zoo, SCORER_WITH_ENTROPY)).parameters
    if not requested or "return_entropy" not in parameters:
        raise ContractError(
            f"{SCORE} must import its scorers when it is called, and {SCORER_WITH_ENTROPY} must "
            f"return entropies",
            actual=f"import {requested}, parameters {tuple(parameters)}",
            expected="import True, return_entropy",
        )
