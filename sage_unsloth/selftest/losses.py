"""Checks the guided loss and its gradient, in one dtype, against the float64 oracle.

Only rounding may differ. Its size on this batch is measured: the same loss in plain PyTorch
(`decoder.py`), with products in the policy's dtype, on the same device. The trainer may be
`ALLOWED` times as far from the oracle, since its kernels round in another order and at other
places. No constant of a GPU is used.

The gradient is also written as a · advantage + b · kl + c · guide, the oracle's three terms, by
least squares. Each coefficient must be 1, within the effect of the allowed rounding: so a term with
a wrong sign or scale, or a missing guide, is reported by name.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sage_unsloth.models.device import release_memory
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.patch.guided import guided_kl
from sage_unsloth.selftest import policy
from sage_unsloth.selftest.decoder import decoder_of, plain_name
from sage_unsloth.selftest.findings import FAILED, PASSED, Finding
from sage_unsloth.selftest.oracle import TERMS, Expected, expected_step

ALLOWED = 4.0
MOST_STEPS = 8
SMALLEST_LOSS = 0.1  # the loss's terms cancel, so its error is not taken relative to less than this
COEFFICIENT_MAX = 0.5  # whatever the rounding, a coefficient may not be this far from 1

WAYS = {
    # name: (compiled, whose entropies the guide reads)
    "eager": (False, "policy"),
    "compiled": (True, "policy"),
    # The guide then needs nothing of the gradient pass, and Unsloth's PrefixGrouper may take it.
    "shared prefix": (True, "reference"),
}


@dataclass
class Step:
    """One optimizer step of the trainer: its batch, its loss, its gradients (flat, float64)."""

    inputs: dict[str, Any] = field(default_factory=dict)
    loss: float = float("nan")
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Distance:
    """How far a step is from the oracle's.

    Attributes:
        gradient: the largest ‖error‖ / ‖expected‖ of a weight.
        loss: the error over the larger of the loss and `SMALLEST_LOSS`.
    """

    gradient: float
    loss: float


def guided_loss(folder: Path, number_format: str, ways: Sequence[str]) -> Iterator[Finding]:
    """A finding for each of the `ways` (of `WAYS`) to compute the loss."""
    model, tokenizer = policy.load(policy.small_model(folder / "model"), number_format)
    exact = decoder_of(model)
    computed = getattr(torch, policy.compute_format(number_format))
    rounded = decoder_of(model, dtype=computed, device=model.device)
    for way in ways:
        compiled, source = WAYS[way]
        trainer = policy.make_test_trainer(
            model, tokenizer, folder / "out", number_format, max_steps=MOST_STEPS
        )
        with torch.compiler.set_stance("default" if compiled else "force_eager"):
            step = take_step(trainer, source)
        settings: dict[str, Any] = dict(
            guide=policy.GUIDE,
            source=source,
            beta=trainer.beta,
            epsilon=trainer.epsilon_low,
        )
        expected = expected_step(exact, step.inputs, **settings)
        plain = expected_step(rounded, step.inputs, **settings)
        finding = judge_step(step, expected, plain, torch.finfo(computed).eps / 2)
        yield Finding(
            name=f"loss, {number_format}, {way}",
            **finding | {"figures": finding["figures"] | _paths_taken(model)},
        )
        del trainer
        release_memory()


def take_step(trainer: Any, source: str) -> Step:
    """One optimizer step of `trainer.train()` under the Branch guide."""
    from transformers import TrainerCallback

    step, compute_loss = Step(), trainer.compute_loss

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for name, parameter in trainer.model.named_parameters():
                if "lora_" in name and parameter.grad is not None:
                    gradient = parameter.grad.detach().double().cpu().flatten()
                    step.gradients[plain_name(name)] = gradient

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # The scale of float16 begins too high, and comes down by steps that do nothing.
            control.should_training_stop |= all(g.isfinite().all() for g in step.gradients.values())

    def recorded_loss(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        step.inputs = {k: v.clone() if torch.is_tensor(v) else v for k, v in inputs.items()}
        loss = compute_loss(model, inputs, *args, **kwargs)
        step.loss = loss.item()
        return loss

    callback = Gradients()
    trainer.compute_loss = recorded_loss
    trainer.add_callback(callback)
    guide = BranchGuide(source=source, **policy.GUIDE)
    try:
        with guided_kl(trainer, guide):
            trainer.train()
    finally:
        trainer.remove_callback(callback)
        with contextlib.suppress(AttributeError):
            del trainer.compute_loss
    return step


def judge_step(step: Step, expected: Expected, plain: Expected, rounding: float) -> dict[str, Any]:
    """Status, sentence, remedy and figures of a step.

    Args:
        plain: plain PyTorch's, in the policy's dtype.
        rounding: the unit roundoff of that dtype, a lower bound of the allowed distance.
    """
    required = expected.total
    result = distance(step.gradients, step.loss, required, expected.loss)
    yardstick = distance(plain.total, plain.loss, required, expected.loss)
    allowed = ALLOWED * max(yardstick.gradient, rounding)
    coefficients, movable = coefficients_of(step.gradients, expected, allowed)
    wrong = [t for t in TERMS if not abs(coefficients[t] - 1) <= movable[t]]
    good = result.gradient <= allowed and result.loss <= allowed and not wrong
    text = f"gradient off by {result.gradient:.1e} (allowed {allowed:.1e})"
    if wrong:
        text += ", and " + ", ".join(f"the {t} term is {coefficients[t]:.3g} times" for t in wrong)
    elif not result.loss <= allowed:
        text += f", and the loss is {step.loss:.6f}, expected {expected.loss:.6f}"
    return {
        "status": PASSED if good else FAILED,
        "found": text,
        "remedy": "" if good else "do not train in this way here. Send selftest.json",
        "figures": {
            "gradient_error": result.gradient,
            "error_allowed": allowed,
            "gradient_error_of_plain_pytorch": yardstick.gradient,
            "loss": step.loss,
            "loss_expected": expected.loss,
            "coefficients": coefficients,
            "coefficients_may_differ_by": movable,
            "completion_tokens": int(step.inputs["completion_mask"].sum()),
        },
    }


def distance(
    gradients: Mapping[str, Tensor], loss: float, required: Mapping[str, Tensor], wanted_loss: float
) -> Distance:
    """See `Distance`; a missing gradient is infinitely far."""
    ratios = []
    for name, expected in required.items():
        error = gradients.get(name, torch.zeros_like(expected)) - expected
        ratios.append(error.norm() / expected.norm())
    worst = torch.stack(ratios).max().item()  # nan, if one is
    return Distance(worst, abs(loss - wanted_loss) / max(abs(wanted_loss), SMALLEST_LOSS))


def coefficients_of(
    gradients: Mapping[str, Tensor], expected: Expected, allowed: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The gradient's coefficients on the oracle's terms, and the effect of rounding on each.

    An error of the whole gradient of size ε changes a coefficient by at most ε over the length of
    that term's part that is orthogonal to the other terms.
    """
    names = list(expected.total)
    terms = torch.stack([torch.cat([expected.gradients[t][n] for n in names]) for t in TERMS], 1)
    whole = torch.cat([gradients.get(n, torch.zeros_like(expected.total[n])) for n in names])
    inverse = torch.linalg.pinv(terms)
    solved = inverse @ whole
    error = allowed * terms.sum(1).norm()
    # Row i of the pseudo-inverse has length 1 / (orthogonal part of term i).
    reach = inverse.norm(dim=1)
    return (
        {t: value.item() for t, value in zip(TERMS, solved, strict=True)},
        {t: min(COEFFICIENT_MAX, (error * r).item()) for t, r in zip(TERMS, reach, strict=True)},
    )


def _paths_taken(model: Any) -> dict[str, Any]:
    """What Unsloth's own checks of its packed and shared-prefix passes left on the model."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    marks: dict[str, Any] = {}
    for name in {**vars(model), **vars(base)}:
        if name.startswith(("_unsloth_seq_packing", "_unsloth_prefix_grouper")):
            value = getattr(base, name, None)
            marks[name] = value if isinstance(value, bool | int | float | str) else repr(value)
    return {"unsloth": marks} if marks else {}
