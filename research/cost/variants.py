"""The losses that are compared, each put on a trainer as training does.

A loss is measured where training meets it: `compute_loss` of Unsloth's generated trainer.

Shapes: B completions, T completion tokens, V vocabulary.
"""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from research.cost.report import BASELINE
from sage_unsloth.methods.composed import with_methods
from sage_unsloth.models.meter import synchronize
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.objective.loss import grpo_loss
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.one_pass import one_pass_loss
from sage_unsloth.trainers.backends import TRL, UNSLOTH
from sage_unsloth.training.algorithms import ALGORITHMS, Algorithm, get_algorithm

MATERIALISED = "materialised"
ONE_PASS = "one-pass"
"""The baseline within `one_pass_loss`, and nothing else of this package."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One loss of the comparison.

    Attributes:
        name: of an algorithm, "one-pass", or "materialised".
        guide: shapes the anchor; None is q = 1.
        kl_estimator: the KL penalty.
        credit: "token" or "sequence".
        log_entropy: entropies are asked for whatever the guide, as the training stages do.
        one_pass: within `one_pass_loss`.
        materialised: the whole (B, T, V) logits and their entropy in plain torch instead of
            Unsloth's loss.
    """

    name: str
    guide: Guide | None = None
    kl_estimator: str = "k3"
    credit: str = "token"
    log_entropy: bool = False
    one_pass: bool = False
    materialised: bool = False

    @contextmanager
    def on(self, trainer: Any, guide_seconds: list[float] | None = None) -> Iterator[None]:
        """Within this context `trainer.compute_loss` is this variant's.

        Args:
            guide_seconds: gets the time of each call of the guide.
        """
        trainer.args.use_bias_correction_kl = self.kl_estimator == "k3-is"
        if self.materialised:
            trainer.compute_loss = lambda model, inputs, **_: materialised_loss(
                trainer,
                model,
                inputs,
                self.guide,  # pyright: ignore[reportArgumentType]
            )
            try:
                yield
            finally:
                del trainer.compute_loss
            return
        guide = self.guide
        if guide is not None and guide_seconds is not None:
            guide = _timed(guide, guide_seconds)
        with (
            one_pass_loss(trainer) if self.one_pass else nullcontext(),
            with_methods(
                trainer,
                guide,
                kl_estimator=self.kl_estimator,
                credit=self.credit,
                log_entropy=self.log_entropy,
            ),
        ):
            yield


def choose_variants(
    names: list[str] | None = None,
    log_entropy: bool = False,
    one_pass: bool = False,
    backend: str = UNSLOTH,
) -> list[Variant]:
    """The baseline first, then what is compared with it.

    Args:
        names: algorithms with the KL term and the loss type of the baseline, or with sequence
            credit (whose cost does not depend on the loss type, so the baseline's is taken), or
            "one-pass", or "materialised". None: the guides of the paper, and "materialised".
        log_entropy: of every variant, the baseline included.
        one_pass: every variant but the baseline is within `one_pass_loss`.
        backend: with "trl", the guides alone.

    Raises:
        ValueError: an unknown algorithm, one that differs in more than guide, penalty and credit,
            or one that needs a teacher; what is compared with Unsloth's loss alone.
    """
    if backend == TRL and (one_pass or {ONE_PASS, MATERIALISED} & set(names or ())):
        raise ValueError(
            f"{ONE_PASS} and {MATERIALISED} need Unsloth's loss, got backend='trl', whose loss "
            "makes one pass already. Leave them out"
        )
    beside = [] if backend == TRL else [MATERIALISED]
    rows = []
    for name in names if names is not None else [*_guided_algorithms(), *beside]:
        if name == MATERIALISED:
            rows.append(Variant(name=name, guide=BranchGuide(), materialised=True))
            continue
        if name == ONE_PASS:
            rows.append(Variant(name=name, log_entropy=log_entropy, one_pass=True))
            continue
        algorithm = get_algorithm(name)
        if name not in _comparable():
            raise ValueError(
                "variants must have the baseline's loss type, advantages and β and no teacher, but "
                f"{name!r} has "
                f"loss_type={algorithm.loss_type!r}, advantages={algorithm.advantages!r}, "
                f"beta={algorithm.beta}, guide={algorithm.guide!r}. Choose among "
                f"{', '.join([*_comparable(), ONE_PASS, MATERIALISED])}"
            )
        rows.append(
            Variant(
                name=name,
                guide=algorithm.guide,
                kl_estimator=algorithm.kl_estimator,
                credit=algorithm.credit,
                log_entropy=log_entropy,
                one_pass=one_pass,
            )
        )
    return [
        Variant(name=BASELINE, log_entropy=log_entropy),
        *(row for row in rows if row.name != BASELINE),
    ]


def _comparable() -> list[str]:
    base = ALGORITHMS[BASELINE]

    def alike(row: Algorithm) -> bool:
        same_loss = row.loss_type == base.loss_type or row.credit == "sequence"
        # A variant has no rule for advantages, no bonus, no rehearsal and no KL in the reward.
        others = ("advantages", "entropy_coef", "rehearsal_coef", "kl_in")
        same_rest = all(getattr(row, name) == getattr(base, name) for name in others)
        needs_teacher = row.guide is not None and "teacher_logps" in row.guide.needs
        return same_loss and same_rest and row.beta == base.beta and not needs_teacher

    return [name for name, row in ALGORITHMS.items() if alike(row)]


def _guided_algorithms() -> list[str]:
    rows = {name: ALGORITHMS[name] for name in _comparable()}
    return [name for name, row in rows.items() if row.guide is not None and row.paper_row]


def materialised_loss(trainer: Any, model: Any, inputs: dict, guide: Guide) -> Tensor:
    """The guided loss of a script without Unsloth: (B, T, V) logits, TRL's functions, plain torch.

    Logits and their gradient are whole, as in TRL's trainer and in the authors' code; the entropy
    has no gradient.
    """
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    mask = inputs["completion_mask"]
    length = mask.shape[1]
    with trainer.compute_loss_context_manager():
        logits = model(input_ids=ids, attention_mask=attention, logits_to_keep=length + 1).logits
        logits = logits[:, :-1] / trainer.temperature
        logps = selective_log_softmax(logits, inputs["completion_ids"])
        with torch.no_grad():
            entropies = entropy_from_logits(logits)
    ref = inputs["ref_per_token_logps"][:, -length:]
    signals = TokenSignals(logps.detach(), ref, mask, entropies)
    log_guide = guide.log_guide(
        signals, step=trainer.state.global_step, max_steps=max(trainer.args.max_steps, 1)
    )
    return grpo_loss(
        logps,
        ref,
        mask,
        inputs["advantages"],
        log_guide=log_guide,
        beta=trainer.beta,
        epsilon=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        loss_type=trainer.args.loss_type,
    )


def _timed(guide: Guide, seconds: list[float]) -> Guide:
    """The same guide, whose calls are timed."""
    timed = copy.copy(guide)

    def log_guide(*args: Any, **kwargs: Any) -> Tensor:
        synchronize()
        started = time.perf_counter()
        result = guide.log_guide(*args, **kwargs)
        synchronize()
        seconds.append(time.perf_counter() - started)
        return result

    object.__setattr__(timed, "log_guide", log_guide)  # guides are frozen
    return timed
