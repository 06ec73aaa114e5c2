"""`python -m sage_unsloth bench`: what a guide costs beside Unsloth's GRPO, and beside a loss that
materialises the logits.

All variants run in one process on one trainer, in turn: round after round, so that what slows the
machine slows all of them. A time is reported as the median over rounds of the ratio to the baseline
of the same round, with quartiles; the ratio of the process's CPU time beside it is the steadier one
where other work competes (a GPU's work is not in it). Three measurements:

    loss     loss and backward pass alone, at any hidden size and vocabulary, and their peak memory
    step     the whole optimizer step with rollouts by transformers: random model, and the embedded task with its graded rewards
    growth   how time and memory of the loss grow with T, B and V, and a step with iterations and gradient accumulation

Shapes: B completions, T completion tokens, V vocabulary, H hidden size.
"""

import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.lab.cost.report import BASELINE, quartiles, write_report
from sage_unsloth.runs.locks import locked
from sage_unsloth.runs.record import environment

MIB, GIB = 2**20, 2**30
FLOAT32 = 4
STEP_TOKENS = 32
"""Completion tokens of the whole step of a random model, at most: rollouts by transformers are slow
on a CPU.
"""
LOGITS_HELD = 4
"""Tensors of the logits' size that a materialised loss holds at once; a size that does not fit is
left out, and it is said.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of the loss.

    Attributes:
        hidden: H.
        vocabulary: V.
        length: T, completion tokens.
        batch: B, completions of one pass.
    """

    hidden: int
    vocabulary: int
    length: int
    batch: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if self.batch % min(8, self.batch):
            raise ValueError(
                f"batch must be a multiple of 8, the completions of a prompt, or less than 8; "
                f"got {self.batch}"
            )

    @property
    def logits_bytes(self) -> int:
        """Of (B, T, V) in float32."""
        return self.batch * self.length * self.vocabulary * FLOAT32

    @property
    def seconds_on_a_cpu(self) -> float:
        """Of one pass, for the estimate, as measured on one core: 15 ns a logit, and two products
        at 50 GFLOP/s.
        """
        return self.logits_bytes / FLOAT32 * (15e-9 + 4 * self.hidden / 50e9)

    def __str__(self) -> str:
        return f"V {self.vocabulary:,}, H {self.hidden:,}, T {self.length:,}, B {self.batch}"


SMALL = Size(hidden=256, vocabulary=151_936, length=128, batch=8)
LARGE = Size(hidden=3584, vocabulary=151_936, length=2048, batch=8)


def default_size() -> Size:
    """A 7B model's shapes on a GPU; elsewhere what takes minutes."""
    import torch

    return LARGE if torch.cuda.is_available() else SMALL


def run(
    out: str | Path,
    sizes: Sequence[Size],
    *,
    names: list[str] | None = None,
    rounds: int = 4,
    steps: int = 2,
    growth: bool = False,
    threads: int = 1,
    log_entropy: bool = False,
) -> dict[str, Any]:
    """Measure, and leave `bench.json`, `bench.png` and `bench.csv` in the folder `out`.

    Args:
        sizes: of the loss; the first is also that of the whole step and of the growth.
        names: see `variants.variants`.
        rounds: measured rounds over all variants, after one that warms up.
        steps: measured optimizer steps of each variant; 0 leaves the step out.
        growth: also measure how cost grows.
        threads: of the CPU.
        log_entropy: every variant asks for entropies, as the training stages do.

    Raises:
        ValueError: a size or a variant that cannot be, or a folder with the figures of other
            settings, or to which another process writes.
    """
    if rounds < 1 or steps < 0 or threads < 1:
        raise ValueError(
            f"rounds and threads must be at least 1 and steps at least 0; got {rounds}, "
            f"{threads}, {steps}"
        )
    import torch

    from sage_unsloth.lab.cost.meter import device_name, memory_source
    from sage_unsloth.lab.cost.variants import variants
    from sage_unsloth.patch.loading import load_unsloth

    rows = variants(names, log_entropy)
    settings = {
        "sizes": [asdict(size) for size in sizes],
        "variants": [row.name for row in rows],
        "rounds": rounds,
        "steps": steps,
        "log_entropy": log_entropy,
    }
    _refuse_other(Path(out), settings)
    if not torch.cuda.is_available():
        passes = len(rows) * (rounds + 1)
        seconds = sum(passes * size.seconds_on_a_cpu for size in sizes)
        logger.info(
            "%d passes of loss and backward: about %.0f min on one quiet CPU core, steps and "
            "growth beside them.",
            passes * len(sizes),
            seconds / 60 + 0.5,
        )
    torch.set_num_threads(threads)
    load_unsloth()
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "settings": settings,
        "device": device_name(),
        "threads": threads,
        "compiled": os.environ.get("UNSLOTH_COMPILE_DISABLE", "0") == "0",
        "memory_by": memory_source(),
        "environment": environment(),
    }
    with locked(out), tempfile.TemporaryDirectory(prefix="sage_unsloth_bench_") as folder:
        place = _Place(Path(folder))
        report["loss"] = [
            row for size in sizes for row in measure_loss(place, size, rows, rounds, len(sizes))
        ]
        write_report(report, out)  # each stage is on disk before the next one
        if steps:
            report["step"] = measure_steps(place, sizes[0], rows, steps)
            write_report(report, out)
        if growth:
            report["growth"] = measure_growth(place, sizes[0], rows)
            write_report(report, out)
    return report


def _refuse_other(out: Path, settings: dict[str, Any]) -> None:
    """Figures of other settings are not written over."""
    file = out / "bench.json"
    before = (
        json.loads(file.read_text(encoding="utf-8"))["settings"] if file.is_file() else settings
    )
    if before != settings:
        raise ValueError(
            f"a folder holds the benchmark of one set of settings; {out} has {before}, asked for "
            f"{settings}; give another --out, "
            "or delete it"
        )


class _Place:
    """Models and trainers in a temporary folder; a model is made once, one trainer is held at a
    time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, hidden: int, vocabulary: int) -> Path:
        from sage_unsloth.lab.cost.variants import save_random_model

        path = self.folder / f"model-{hidden}-{vocabulary}"
        return path if path.exists() else save_random_model(path, hidden, vocabulary)

    def trainer(self, size: Size, **settings: Any) -> Any:
        from sage_unsloth.lab.cost.variants import make_trainer, token_sum_rewards
        from sage_unsloth.problems import arithmetic

        return make_trainer(
            self.model(size.hidden, size.vocabulary),
            self.folder / "out",
            rewards=token_sum_rewards,
            rows=arithmetic.problems("train"),
            completions=size.batch,
            length=size.length,
            **settings,
        )


def measure_loss(
    place: _Place, size: Size, variants: Sequence[Any], rounds: int, sizes: int = 1
) -> list[dict]:
    """Seconds and peak memory of loss and backward pass, one row for each variant; None in the
    place of what did not fit.
    """
    from tqdm.auto import tqdm

    from sage_unsloth.lab.cost.meter import measured
    from sage_unsloth.lab.cost.variants import make_batch

    trainer = place.trainer(size)
    trainer.model.train()
    batch = make_batch(trainer, size.batch, size.length, size.vocabulary)
    fitting = [v for v in variants if not v.materialised or _fits(size)]
    for variant in variants:
        if variant not in fitting:
            logger.info(
                "%s needs about %.0f GiB at %s: left out.",
                variant.name,
                LOGITS_HELD * size.logits_bytes / GIB,
                size,
            )

    def once(variant: Any) -> dict[str, float]:
        guide_seconds: list[float] = []
        trainer.model.zero_grad(set_to_none=True)
        with variant.on(trainer, guide_seconds), measured() as found_here:
            loss = trainer.compute_loss(trainer.model, dict(batch))
            loss.backward()
        return found_here | {"loss": loss.item(), "guide_seconds": sum(guide_seconds)}

    started = time.perf_counter()
    found: dict[str, list[dict]] = {v.name: [] for v in fitting}
    with tqdm(total=(rounds + 1) * len(fitting), desc=f"loss, {size}", unit="pass") as bar:
        for number in range(rounds + 1):
            for variant in rotated(fitting, number):
                values = once(variant)
                if number:
                    found[variant.name].append(values)
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
    return [_loss_row(size, variant.name, found) for variant in variants]


def _loss_row(size: Size, name: str, found: dict[str, list[dict]]) -> dict[str, Any]:
    row: dict[str, Any] = asdict(size) | {"variant": name}
    if not found.get(name):
        return row | {"seconds": None}
    values, base = found[name], found[BASELINE]
    peaks = [v["peak_bytes"] for v in values if v["peak_bytes"] is not None]
    return row | {
        "seconds": _rounded(v["seconds"] for v in values),
        "ratio": quartiles(
            [v["seconds"] / b["seconds"] for v, b in zip(values, base, strict=True)]
        ),
        "cpu_ratio": quartiles(
            [v["cpu_seconds"] / b["cpu_seconds"] for v, b in zip(values, base, strict=True)]
        ),
        "peak_mib": round(statistics.median(peaks) / MIB, 1) if peaks else None,
        "loss": values[-1]["loss"],
        "guide_share": round(
            statistics.median(v["guide_seconds"] / v["seconds"] for v in values), 6
        ),
    }


def measure_steps(place: _Place, size: Size, variants: Sequence[Any], steps: int) -> list[dict]:
    """The whole optimizer step: seconds, tokens a second and the share of each phase, for the
    random model and the embedded task.
    """
    from tqdm.auto import tqdm

    from sage_unsloth.grading.grader import Grader
    from sage_unsloth.grading.reward import SolutionReward
    from sage_unsloth.lab.cost.variants import EMBEDDED, make_trainer
    from sage_unsloth.models.embedded import data_folder
    from sage_unsloth.problems import arithmetic

    short = Size(**asdict(size) | {"length": min(size.length, STEP_TOKENS)})
    rows = []
    with Grader(1) as grader:
        tasks: dict[str, Callable[[], Any]] = {
            f"random model, {short}": lambda: place.trainer(short),
            "embedded task": lambda: make_trainer(
                data_folder() / EMBEDDED,
                place.folder / "out",
                rewards=SolutionReward(grader),
                rows=arithmetic.problems("train"),
                completions=64,
                length=48,
            ),
        }
        for task, make in tasks.items():
            fitting = [v for v in variants if not v.materialised or _fits(short)]
            found: dict[str, list[dict]] = {v.name: [] for v in fitting}
            # Fresh trainers of one seed draw the same rollouts, since nothing is learned; one step
            # of each in turn.
            trainer = make()
            for number in tqdm(range(steps + 1), desc=f"step, {task}", unit="round"):
                for variant in rotated(fitting, number):
                    values = one_step(trainer, variant)
                    if number:
                        found[variant.name].append(values)
            rows += [_step_row(task, variant.name, found) for variant in fitting]
    return rows


def one_step(trainer: Any, variant: Any) -> dict[str, Any]:
    """One optimizer step of `trainer.train()`, from its first step's seed on, and the seconds of
    its phases.
    """
    from transformers import TrainerCallback, set_seed

    from sage_unsloth.lab.cost.meter import synchronize
    from sage_unsloth.lab.cost.variants import timed_phases

    class Clock(TrainerCallback):
        seconds = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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


def _step_row(task: str, name: str, found: dict[str, list[dict]]) -> dict[str, Any]:
    values, base = found[name], found[BASELINE]
    total = statistics.median(v["seconds"] for v in values)
    shares = {}
    for phase in values[0]["phases"]:
        shares[phase] = statistics.median(v["phases"][phase] / v["seconds"] for v in values)
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return {
        "task": task,
        "variant": name,
        "seconds": _rounded(v["seconds"] for v in values),
        "ratio": quartiles(
            [v["seconds"] / b["seconds"] for v, b in zip(values, base, strict=True)]
        ),
        "tokens_per_second": round(statistics.median(v["tokens"] for v in values) / total, 1),
        "shares": {phase: round(share, 4) for phase, share in shares.items()},
    }


def measure_growth(place: _Place, size: Size, variants: Sequence[Any]) -> list[dict]:
    """Seconds and peak memory of the loss while one of T, B, V is quartered and halved; and a
    step's, iterations and accumulation.
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
    """The order of a round: each variant comes first once, since the one after a large one finds
    the machine in another state.
    """
    first = number % len(variants)
    return [*variants[first:], *variants[:first]]


def _rounded(values: Any) -> list[float]:
    return [round(value, 4) for value in values]


def _fits(size: Size) -> bool:
    """Whether a loss that materialises the logits fits in what memory is free."""
    import torch

    if torch.cuda.is_available():
        free = torch.cuda.mem_get_info()[0]
    elif hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return True
    return LOGITS_HELD * size.logits_bytes < free
