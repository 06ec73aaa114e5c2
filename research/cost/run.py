"""What a guide costs beside Unsloth's GRPO, and beside a loss that materialises the logits.

Three measurements (`measurements`):

    loss     loss and backward pass alone, at any hidden size and vocabulary, and their peak memory
    step     the whole optimizer step with rollouts by transformers: a random model, and the
             embedded task with its graded rewards
    growth   how time and memory of the loss grow with T, B and V, and a step with iterations and
             gradient accumulation
"""

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from research.cost.measurements import measure_growth, measure_loss, measure_steps
from research.cost.report import REPORT, write_report
from research.cost.sizes import Size
from research.cost.trainers import Place
from research.cost.variants import choose_variants
from sage_unsloth.models.meter import device_name, memory_source
from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import environment
from sage_unsloth.trainers.backends import UNSLOTH, load_backend
from sage_unsloth.trainers.switches import compilation_is_on

logger = logging.getLogger(__name__)


def measure_costs(
    out: str | Path,
    sizes: Sequence[Size],
    *,
    names: list[str] | None = None,
    rounds: int = 4,
    steps: int = 2,
    growth: bool = False,
    threads: int = 1,
    log_entropy: bool = False,
    one_pass: bool = False,
    backend: str = UNSLOTH,
) -> dict[str, Any]:
    """Measure, and leave `bench.json`, `bench.png` and `bench.csv` in the folder `out`.

    Args:
        sizes: of the loss; the first is also that of the whole step and of the growth.
        names: see `variants.choose_variants`.
        rounds: measured rounds over all variants, after one that warms up.
        steps: measured optimizer steps of each variant; 0 leaves the step out.
        growth: also measure how cost grows.
        threads: of the CPU.
        log_entropy: every variant asks for entropies, as the training stages do.
        one_pass: every variant but the baseline is within `one_pass_loss`.
        backend: whose trainer; TRL's own needs a process without Unsloth.

    Raises:
        ValueError: a size or a variant that cannot be, or a folder with the figures of other
            settings, or to which another process writes.
    """
    if rounds < 1 or steps < 0 or threads < 1:
        raise ValueError(
            "rounds and threads must be at least 1 and steps at least 0; got "
            f"rounds={rounds}, threads={threads}, steps={steps}"
        )
    variants = choose_variants(names, log_entropy, one_pass, backend)
    settings = {
        "sizes": [asdict(size) for size in sizes],
        "variants": [variant.name for variant in variants],
        "rounds": rounds,
        "steps": steps,
        "log_entropy": log_entropy,
        "one_pass": one_pass,
        "backend": backend,
    }
    out = Path(out)
    _refuse_other(out, settings)
    if not torch.cuda.is_available():
        _log_estimate(sizes, len(variants) * (rounds + 1))
    torch.set_num_threads(threads)
    load_backend(backend)
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "settings": settings,
        "device": device_name(),
        "threads": threads,
        "compiled": backend == UNSLOTH and compilation_is_on(),
        "memory_by": memory_source(),
        "environment": environment(),
    }
    with exclusive_lock(out), tempfile.TemporaryDirectory(prefix="sage_unsloth_bench_") as folder:
        place = Place(Path(folder))
        report["loss"] = [
            row for size in sizes for row in measure_loss(place, size, variants, rounds, len(sizes))
        ]
        write_report(report, out)  # each stage is on disk before the next one
        if steps:
            report["step"] = measure_steps(place, sizes[0], variants, steps)
            write_report(report, out)
        if growth:
            report["growth"] = measure_growth(place, sizes[0], variants)
            write_report(report, out)
    return report


def _log_estimate(sizes: Sequence[Size], passes: int) -> None:
    seconds = sum(passes * size.seconds_on_a_cpu for size in sizes)
    logger.info(
        "%d passes of loss and backward: about %.0f min on one quiet CPU core, steps and growth "
        "beside them.",
        passes * len(sizes),
        seconds / 60 + 0.5,
    )


def _refuse_other(out: Path, settings: dict[str, Any]) -> None:
    """Figures of other settings are not overwritten."""
    file = out / REPORT
    before = read_json(file)["settings"] if file.is_file() else settings
    if before != settings:
        raise ValueError(
            f"a folder holds the costs of one set of settings; {out} has {before}, asked for "
            f"{settings}; give another --out, or delete it"
        )
