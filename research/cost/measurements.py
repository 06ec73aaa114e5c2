"""The three measurements: the loss alone, the whole optimizer step, and how cost grows.

All variants run in one process on one trainer, in turn: round after round, so that what slows the
machine slows all of them. A time is reported as the median over rounds of the ratio to the baseline
of the same round, with quartiles; the ratio of the process's CPU time beside it is the steadier one
where other work competes (a GPU's work is not in it).

Shapes: B completions, T completion tokens, V vocabulary, H hidden size.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from research.cost.phases import timed_phases
from research.cost.report import BASELINE, quartiles
from research.cost.sizes import LOGITS_HELD, Size, fits
from research.cost.trainers import Place, make_batch
from research.cost.variants import Variant
from sage_unsloth.grading.grader import Grader
from sage_unsloth.grading.reward import SolutionReward
from sage_unsloth.models.meter import measure, synchronize
from sage_unsloth.runs.progress import progress

MIB, GIB = 2**20, 2**30
STEP_TOKENS = 32  # completion tokens of a step, at most: transformers' rollouts are slow on a CPU

logger = logging.getLogger(__name__)


def measure_loss(
    place: Place, size: Size, variants: Sequence[Variant], rounds: int, sizes: int = 1
) -> list[dict[str, Any]]:
    """Seconds and peak memory of loss and backward pass, a row for each variant.

    One that does not fit into memory is left out, which is logged, and has None for its seconds.
    """
    trainer = place.trainer(size)
    trainer.model.train()
    batch = make_batch(trainer, size.batch, size.length, size.vocabulary)
    fitting = _fitting(variants, size)
    started = time.perf_counter()
    result: dict[str, list[dict]] = {variant.name: [] for variant in fitting}
    with progress(total=(rounds + 1) * len(fitting), desc=f"loss, {size}", unit="pass") as bar:
        for number in range(rounds + 1):
            for variant in rotated(fitting, number):
                values = one_pass(trainer, batch, variant)
                if number:
                    result[variant.name].append(values)
                bar.update()
            if number == 0:
                seconds = time.perf_counter() - started
                logger.info(
                    "The round that warms up took %.0f s; %d more, for this of %d size(s), take "
                    "about %.0f s.",
                    seconds,
                    rounds,
                    sizes,
                    seconds * rounds,
                )
    return [_loss_row(size, variant.name, result) for variant in variants]


def _fitting(variants: Sequence[Variant], size: Size) -> list[Variant]:
    fitting = [variant for variant in variants if not variant.materialised or fits(size)]
    for variant in variants:
        if variant not in fitting:
            logger.info(
                "%s needs about %.0f GiB at %s: left out.",
                variant.name,
                LOGITS_HELD * size.logits_bytes / GIB,
                size,
            )
    return fitting


def one_pass(trainer: Any, batch: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """Loss and backward pass of one variant: time, memory, the loss, and the guide's seconds."""
    guide_seconds: list[float] = []
    trainer.model.zero_grad(set_to_none=True)
    with variant.on(trainer, guide_seconds), measure() as values:
        loss = trainer.compute_loss(trainer.model, dict(batch))
        loss.backward()
    return values | {"loss": loss.item(), "guide_seconds": sum(guide_seconds)}


def _loss_row(size: Size, name: str, result: Mapping[str, list[dict]]) -> dict[str, Any]:
    row: dict[str, Any] = asdict(size) | {"variant": name}
    if not result.get(name):
        return row | {"seconds": None}
    values, base = result[name], result[BASELINE]
    peaks = [v["peak_bytes"] for v in values if v["peak_bytes"] is not None]
    return row | {
        "seconds": _rounded(v["seconds"] for v in values),
        "ratio": _ratio(values, base, "seconds"),
        "cpu_ratio": _ratio(values, base, "cpu_seconds"),
        "peak_mib": round(statistics.median(peaks) / MIB, 1) if peaks else None,
        "loss": values[-1]["loss"],
        "guide_share": round(
            statistics.median(v["guide_seconds"] / v["seconds"] for v in values), 6
        ),
    }


def _ratio(values: Sequence[dict], base: Sequence[dict], name: str) -> dict[str, float]:
    """Quartiles over rounds of the ratio to the baseline of the same round."""
    return quartiles([own[name] / other[name] for own, other in zip(values, base, strict=True)])


def measure_steps(
    place: Place, size: Size, variants: Sequence[Variant], steps: int
) -> list[dict[str, Any]]:
    """The whole optimizer step, on the random model and on the embedded task.

    Rows of seconds, tokens a second and the share of each phase.
    """
    short = Size(**asdict(size) | {"length": min(size.length, STEP_TOKENS)})
    fitting = _fitting(variants, short)
    rows = []
    with Grader(1) as grader:
        tasks: dict[str, Callable[[], Any]] = {
            f"random model, {short}": lambda: place.trainer(short),
            "embedded task": lambda: place.embedded_trainer(SolutionReward(grader)),
        }
        for task, make in tasks.items():
            result: dict[str, list[dict]] = {variant.name: [] for variant in fitting}
            # Every variant draws the same rollouts, since nothing is learned; a step of each in
            # turn.
            trainer = make()
            for number in progress(range(steps + 1), desc=f"step, {task}", unit="round"):
                for variant in rotated(fitting, number):
                    values = one_step(trainer, variant)
                    if number:
                        result[variant.name].append(values)
            rows += [_step_row(task, variant.name, result) for variant in fitting]
    return rows


def one_step(trainer: Any, variant: Variant) -> dict[str, Any]:
    """One optimizer step of `trainer.train()` from its first step's seed, and its phases."""
    from transformers import TrainerCallback, set_seed  # after Unsloth, which patches it

    class Clock(TrainerCallback):
        seconds = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            synchronize()
            self.seconds += time.perf_counter() - self.started

    clock = Clock()
    trainer.add_callback(clock)
    trainer.args.max_steps = trainer.args.num_iterations
    trainer._step, trainer._buffered_inputs = 0, None
    set_seed(trainer.args.seed)
    try:
        with variant.on(trainer), timed_phases(trainer) as phases:
            trainer.train()
    finally:
        trainer.remove_callback(clock)
    tokens = trainer.state.log_history[0]["completions/mean_length"]
    completions = (
        trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    )
    return {"seconds": clock.seconds, "phases": dict(phases), "tokens": tokens * completions}


def _step_row(task: str, name: str, result: Mapping[str, list[dict]]) -> dict[str, Any]:
    values, base = result[name], result[BASELINE]
    total = statistics.median(v["seconds"] for v in values)
    shares = {}
    for phase in values[0]["phases"]:
        shares[phase] = statistics.median(v["phases"][phase] / v["seconds"] for v in values)
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return {
        "task": task,
        "variant": name,
        "seconds": _rounded(v["seconds"] for v in values),
        "ratio": _ratio(values, base, "seconds"),
        "tokens_per_second": round(statistics.median(v["tokens"] for v in values) / total, 1),
        "shares": {phase: round(share, 4) for phase, share in shares.items()},
    }


def measure_growth(place: Place, size: Size, variants: Sequence[Variant]) -> list[dict[str, Any]]:
    """Seconds and peak memory of the loss while one of T, B, V is quartered, halved and whole.

    And seconds of a step while iterations and gradient accumulation grow.
    """
    chosen = [v for v in variants if v.guide is None or v.materialised or v.name == "sage-branch"]
    rows = []
    for field in ("length", "batch", "vocabulary"):
        for part in (4, 2, 1):
            smaller = Size(**asdict(size) | {field: max(1, getattr(size, field) // part)})
            for row in measure_loss(place, smaller, chosen, 2):
                rows.append({"grows": field, "value": getattr(smaller, field)} | row)
    short = Size(**asdict(size) | {"length": min(size.length, STEP_TOKENS)})
    for field in ("num_iterations", "gradient_accumulation_steps"):
        for value in (1, 2, 4):
            trainer = place.trainer(short, **{field: value})
            for variant in chosen[:2]:
                one_step(trainer, variant)
                values = one_step(trainer, variant)
                rows.append(
                    {
                        "grows": field,
                        "value": value,
                        "variant": variant.name,
                        "seconds": [round(values["seconds"], 4)],
                        "phases": {k: round(v, 4) for k, v in values["phases"].items()},
                    }
                )
    return rows


def rotated(variants: Sequence[Any], number: int) -> list[Any]:
    """The order of a round: each variant comes first once.

    The one after a large one finds the machine in another state.
    """
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]


def _rounded(values: Iterable[float]) -> list[float]:
    return [round(value, 4) for value in values]
