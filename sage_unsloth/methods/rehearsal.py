"""Rehearsal: a divergence from π_ref on completions that π_ref sampled before training.

GRPO's KL penalty is computed on the policy's own samples, so it says nothing about solutions that
the policy no longer samples. DPH-RL (arXiv 2509.07430) computes it on stored correct completions of
π_ref, and has no other KL term. With u_t = π(y_t | s_t) / π_ref(y_t | s_t) on a stored token:

    forward-kl    u − 1 − log u                    gradient (u − 1) ∇log π
    js            u log u − (u + 1) log((u + 1)/2)  gradient u log(2u/(u + 1)) ∇log π
    sft           − log u                          gradient − ∇log π

The first two are 0, without a gradient, if π = π_ref. In expectation over all completions of π_ref
the first is KL(π_ref ‖ π), the second twice the Jensen–Shannon divergence; over correct ones alone
they are neither, and hold the policy at π_ref where π_ref was correct. The third is the loss of
SFT; adding its gradient to RL's is the parallel averaging of arXiv 2606.04272, which uses written
solutions instead of π_ref's.

As in the code of DPH-RL: k3 with policy and reference exchanged is the first, and all tokens of a
completion count. Different: log u is at most 10 and has no gradient beyond, so a slope can reach
22,025, where theirs bounds the value at 10, which is u about 12.9; a problem is stored as soon as
one completion is correct (`solved=1` stores those that π_ref always solves, as the paper does), and
RL trains on it too.

In training, `add_rehearsal` gives the term its own backward pass after the trainer's, so its
activations are never in memory together with those of the loss, and Unsloth's buffers for
checkpointing serve one pass at a time.

Shapes: B stored completions, T tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sage_unsloth.methods.advantage_rules import rule_settings
from sage_unsloth.methods.reference import reference_adapter
from sage_unsloth.patch.scoring import logps_and_entropies
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.clock import Clock
from sage_unsloth.trainers.listening import listen
from sage_unsloth.trainers.trainer_names import ContractError

MAX_LOG_RATIO = 10.0
"""Bound of log u, nats, without a gradient above, so that one token cannot overflow."""

METRIC = "rehearsal/divergence"
SCORING_TOLERANCE, SCORING_TOLERANCE_16_BIT = 1e-3, 0.05
"""Mean difference in nats that is allowed between two ways to score a completion's tokens: in 16
bits a logit of 20 is rounded by .06, while a missed scale or cap of the logits costs tenths.
"""


def forward_kl_term(log_ratio: Tensor) -> Tensor:
    return torch.expm1(log_ratio) - log_ratio


def jensen_shannon(log_ratio: Tensor) -> Tensor:
    log_mean = torch.nn.functional.softplus(log_ratio) - math.log(2)
    ratio = log_ratio.exp()
    return ratio * log_ratio - (ratio + 1) * log_mean


def cross_entropy(log_ratio: Tensor) -> Tensor:
    """SFT's loss minus π_ref's, so it is negative if the policy is more certain."""
    return -log_ratio


DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "forward-kl": forward_kl_term,
    "js": jensen_shannon,
    "sft": cross_entropy,
}


@dataclass(frozen=True)
class RehearsalRule:
    """What is stored, and how the policy is held to it.

    Attributes:
        divergence: a name of `DIVERGENCES`.
        problems: training problems that are sampled before training, evenly spaced; all if there
            are fewer.
        samples: completions of each by π_ref; the correct ones are stored.
        batch: stored completions for each micro-batch.
        solved: share of a problem's samples that must be correct to store them.

    Raises:
        ValueError: an unknown divergence, or a number out of range.
    """

    divergence: str = "forward-kl"
    problems: int = 256
    samples: int = 8
    batch: int = 8
    solved: float = 0.0

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(
                f"rehearsal must be one of {', '.join(DIVERGENCES)}, then its settings "
                f"(forward-kl,samples=16), got {self.divergence!r}"
            )
        for name in ("problems", "samples", "batch"):
            value = getattr(self, name)
            if value != int(value) or value < 1:
                raise ValueError(f"{name} of a rehearsal must be a whole number >= 1, got {value}")
            object.__setattr__(self, name, int(value))
        if not 0 <= self.solved <= 1:
            raise ValueError(f"solved of a rehearsal must be in [0, 1], got {self.solved}")

    def stores(self, num_correct: int) -> bool:
        """Whether a problem with this many correct samples is stored."""
        return num_correct / self.samples >= self.solved


def rehearsal_rule(text: str) -> RehearsalRule:
    """The rule of `"forward-kl"`, or `"js,samples=16,batch=4"`.

    Raises:
        ValueError: see `RehearsalRule`; an unknown setting, or not NAME=VALUE.
    """
    name, *texts = (part.strip() for part in text.split(","))
    known = [field.name for field in fields(RehearsalRule) if field.name != "divergence"]
    return RehearsalRule(name, **rule_settings(texts, known, f"rehearsal={name!r}"))


def rehearsal_loss(logps: Tensor, ref_logps: Tensor, mask: Tensor, divergence: str) -> Tensor:
    """The divergence of stored completions, nats: the mean over tokens, then over completions.

    It is >= 0 except for "sft".

    Args:
        logps: log π(y_t | s_t), nats, (B, T), with gradient.
        ref_logps: log π_ref(y_t | s_t), (B, T).
        mask: (B, T), 1 on their tokens.
        divergence: a name of `DIVERGENCES`.
    """
    # exp of the ratio is in some divergences, so one far token could be inf.
    log_ratio = torch.where(mask.bool(), logps - ref_logps, 0.0).clamp(max=MAX_LOG_RATIO)
    values = DIVERGENCES[divergence](log_ratio) * mask
    return (values.sum(1) / mask.sum(1).clamp(min=1)).mean()


class Stored(NamedTuple):
    """A correct completion of π_ref, as token ids; `problem` groups them."""

    problem: int
    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]


@contextmanager
def add_rehearsal(
    trainer: Any,
    stored: Sequence[Stored],
    *,
    coef: float,
    rule: RehearsalRule | None = None,
) -> Iterator[None]:
    """Within this context, each training step adds `coef` times the divergence to the loss.

        with add_rehearsal(trainer, stored, coef=0.1), guided_kl(trainer):
            trainer.train()

    `guided_kl` checks its gradient too. A micro-batch gets `rule.batch` completions: a problem is
    chosen uniformly, then one of its completions; a resumed run chooses the same. π_ref is that of
    the trainer's KL: the model without its adapter, or with TRL's copy "ref" of an initial adapter.
    It scores the same completions in the same step. Both are scored without dropout, so the term is
    0 if they are one model.

    Args:
        stored: completions with their EOS.
        coef: weight of the term; 0 adds none.
        rule: divergence and batch; by default the forward KL and 8. Its settings of sampling are
            not used here.

    Raises:
        ValueError: no completions, or an empty one; a negative weight; a model without an adapter,
            or with a trained head; several processes.
        ContractError: the model's logits are not just its head's product.
    """
    if coef == 0:
        yield
        return
    if not 0 < coef < float("inf"):
        raise ValueError(f"coef of a rehearsal must be >= 0, got {coef}")
    term = _Term(trainer, stored, rule or RehearsalRule())

    def step(proceed: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        loss = proceed(*args, **kwargs)
        accelerator = trainer.accelerator
        # Around the backward pass too, in which checkpointing computes the model again.
        with without_dropout(trainer.model):
            with trainer.compute_loss_context_manager():
                divergence = term()
            weighted = coef / trainer.current_gradient_accumulation_steps * divergence
            # Which divides what it is given by this number, as the trainer has done already.
            accelerator.backward(weighted * accelerator.gradient_accumulation_steps)
        names.logged_metrics(trainer, "train")[METRIC].append(divergence.item())
        return loss + weighted.detach()

    with listen(trainer, "rehearsal", **{names.STEP: step}):
        yield


@contextmanager
def without_dropout(model: torch.nn.Module) -> Iterator[None]:
    """Within this context dropout is off, in adapters and attention, but the model is in training
    mode.

    Evaluation mode would switch checkpointing off.
    """
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.training]
    attentions: list[Any] = [
        m for m in model.modules() if isinstance(vars(m).get("attention_dropout"), float)
    ]
    shares = [m.attention_dropout for m in attentions]
    try:
        for layer in layers:
            layer.training = False
        for attention in attentions:
            attention.attention_dropout = 0.0
        yield
    finally:
        for layer in layers:
            layer.training = True
        for attention, share in zip(attentions, shares, strict=True):
            attention.attention_dropout = share


class _Term:
    """The divergence of the next micro-batch's stored completions."""

    def __init__(self, trainer: Any, stored: Sequence[Stored], rule: RehearsalRule) -> None:
        self.trainer, self.rule = trainer, rule
        if not stored or not all(item.prompt_ids and item.completion_ids for item in stored):
            raise ValueError(
                "a rehearsal needs completions with at least one token after the prompt, got "
                f"{len(stored)}"
            )
        if trainer.accelerator.num_processes > 1:
            raise ValueError(
                f"a rehearsal needs a single process, got {trainer.accelerator.num_processes}"
            )
        model = trainer.accelerator.unwrap_model(trainer.model)
        if not hasattr(model, "disable_adapter"):
            raise ValueError(
                "a rehearsal needs a model with an adapter, because π_ref is the model without it, "
                f"got {type(model).__name__}"
            )
        # `logps_and_entropies` gives the head no gradient.
        if model.get_output_embeddings().weight.requires_grad:
            raise ValueError(
                "a rehearsal needs a frozen output head. Leave lm_head out of the adapter's target "
                "modules and modules_to_save"
            )
        self.by_problem: dict[int, list[Stored]] = {}
        for item in stored:
            self.by_problem.setdefault(item.problem, []).append(item)
        # Sorted, since the draw is by place and a resumed run must draw the same.
        self.problems = sorted(self.by_problem)
        self.clock, self.checked = Clock(trainer, "rehearsal"), False

    def __call__(self) -> Tensor:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        rows = self._drawn(self.clock.tick().generator)
        # Scored again at each step rather than stored: the same kernels and padding for both
        # models.
        with torch.no_grad(), reference_adapter(self.trainer):
            reference, mask = completion_logps(model, rows, self.trainer.temperature)
        logps, _ = completion_logps(model, rows, self.trainer.temperature)
        if not self.checked:
            _check_scoring(model, rows[0], logps[0], self.trainer.temperature)
            self.checked = True
        return rehearsal_loss(logps, reference, mask, self.rule.divergence)

    def _drawn(self, generator: torch.Generator) -> list[Stored]:
        numbers = torch.rand(self.rule.batch, 2, generator=generator, dtype=torch.float64).tolist()
        drawn = []
        for first, second in numbers:
            # The problem first: one with many stored completions is not rehearsed more often.
            own = self.by_problem[self.problems[int(first * len(self.problems))]]
            drawn.append(own[int(second * len(own))])
        return drawn


def completion_logps(
    model: Any, rows: Sequence[Stored], temperature: float
) -> tuple[Tensor, Tensor]:
    """log π(y_t | s_t) at the sampling temperature, nats, and the mask, each (B, T) float32.

    Values outside the mask mean nothing.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    device, width = head.weight.device, max(len(row.completion_ids) for row in rows)
    longest = max(len(row.prompt_ids) + len(row.completion_ids) for row in rows)
    ids, attention = torch.zeros(2, len(rows), longest, dtype=torch.long)
    index, place = torch.zeros(2, len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width)
    for number, item in enumerate(rows):  # padded on the right, where nothing looks at it
        row, length = [*item.prompt_ids, *item.completion_ids], len(item.completion_ids)
        ids[number, : len(row)] = torch.tensor(row)
        attention[number, : len(row)] = 1
        index[number, :length] = torch.tensor(item.completion_ids)
        # The hidden state before a token predicts it, hence − 1.
        place[number, :length] = torch.arange(length) + len(item.prompt_ids) - 1
        mask[number, :length] = 1.0
    decoder, config = base.get_decoder(), base.config.get_text_config()
    hidden = decoder(input_ids=ids.to(device), attention_mask=attention.to(device))[0]
    places = place.to(hidden.device).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
    logps, _ = logps_and_entropies(
        hidden.gather(1, places),
        head.weight,
        index.to(device),
        temperature=temperature,
        lm_head_bias=getattr(head, "bias", None),
        logit_softcapping=_number(config, "final_logit_softcapping"),  # Gemma
        logit_scale_multiply=_number(config, "logit_scale"),  # Cohere
        logit_scale_divide=_number(config, "logits_scaling"),  # Granite
    )
    return logps, mask.to(logps.device)


def _number(config: Any, name: str) -> float:
    """A number in the config; 0 if missing."""
    return float(getattr(config, name, None) or 0.0)


@torch.no_grad()
def _check_scoring(model: Any, row: Stored, logps: Tensor, temperature: float) -> None:
    """Checks the log-probs of one completion against the model's own logits."""
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]], device=logps.device)
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    length = len(row.completion_ids)
    scores = torch.log_softmax(logits[0, -length - 1 : -1].float() / temperature, -1)
    own = scores.gather(-1, ids[0, -length:].unsqueeze(-1)).squeeze(-1)
    apart = (own - logps[:length]).abs().mean().item()
    # Two roundings of 16-bit logits, by two orders of summation.
    allowed = SCORING_TOLERANCE_16_BIT if logits.dtype.itemsize == 2 else SCORING_TOLERANCE
    if not apart <= allowed:
        raise ContractError(
            "the log-probs of a rehearsal must be those of the model's logits",
            actual=f"{apart:.4g} nats apart in the mean",
            expected=f"{allowed:g} at most",
        )
