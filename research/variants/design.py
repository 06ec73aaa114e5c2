"""Variants of the arithmetic task, and the queue of runs on them.

A variant is a task with one thing changed, and the SFT model that its runs start from. The runs of
variants with one SFT model lie in one folder, named after it.

    skewed, balanced, by-rate    training rows: as they are; every family equally often; each row by
                                 1/p of the SFT model (`rows`)
    fork, fork-twin              dialects in which the rare way, or the wrong one, writes free
                                 letters (`problems.fork`)
    sft-2, sft-3                 the SFT stage with another seed
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from research.benchmark.tasks import Task, arithmetic_fresh_task
from research.data import DATA
from research.frontier.design import FrontierRun, configured
from research.problems.fork import DIALECTS
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.problems.row_weights import balance_rows, inverse_pass_rates, repeat_rows
from sage_unsloth.runs.files import read_json
from sage_unsloth.training.rlvr_config import RlvrConfig

RESULTS = DATA / "results" / "frontier" / "variants"
RATES = RESULTS / "start_rates.json"
"""The SFT model's correct samples of each training problem, by id (`python -m …rates`)."""
FORK_LENGTH = 56  # tokens of a completion, 8 more than without letters
PLAIN_START = "arithmetic-fresh"


@dataclass(frozen=True)
class Variant:
    """A task with one thing changed, and the name of the SFT model that its runs start from."""

    task: Task
    start: str


@dataclass(frozen=True)
class VariantRun(FrontierRun):
    """A run of a frontier, on a variant of the task."""

    variant: str = "skewed"

    @property
    def name(self) -> str:
        return f"{self.variant}_{super().name}"


@dataclass(frozen=True)
class VariantDesign:
    """A design of one run, as `benchmark.worker.carry_out` takes it."""

    run: VariantRun

    def load_task(self) -> Task:
        return load_variant(self.run.variant).task

    def runs(self) -> list[VariantRun]:
        return [self.run]

    def training(self, run: VariantRun, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]:
        return configured(run, settings)


def load_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in VARIANTS:
        raise ValueError(f"a variant must be one of {', '.join(VARIANTS)}; got {name!r}")
    return VARIANTS[name]()


def queue_runs(text: str) -> list[VariantRun]:
    """The runs of a line of the queue, `VARIANT ALGORITHM=STRENGTH,… SEED,…`, seed by seed.

    Raises:
        ValueError: another form.
    """
    parts = text.split()
    if len(parts) != 3 or "=" not in parts[1]:
        raise ValueError(
            f"a line of the queue must be VARIANT ALGORITHM=STRENGTH,… SEED,…; got {text!r}"
        )
    variant, method, seeds = parts
    algorithm, _, strengths = method.partition("=")
    return [
        VariantRun(algorithm, "beta", float(strength), int(seed), variant)
        for seed in seeds.split(",")
        for strength in strengths.split(",")
    ]


def _skewed() -> Variant:
    return Variant(arithmetic_fresh_task(), PLAIN_START)


def _balanced() -> Variant:
    task = arithmetic_fresh_task()
    return Variant(replace(task, train_rows=balance_rows(task.train_rows, "family")), PLAIN_START)


def _by_rate() -> Variant:
    task = arithmetic_fresh_task()
    recorded: dict[str, Any] = read_json(RATES)
    correct_P = [recorded["correct"][row["id"]] for row in task.train_rows]
    weight_P = inverse_pass_rates(recorded["num_samples"], correct_P, task.rlvr.num_generations)
    return Variant(replace(task, train_rows=repeat_rows(task.train_rows, weight_P)), PLAIN_START)


def _fork(name: str) -> Variant:
    plain, dialect = arithmetic_fresh_task(), DIALECTS[name]
    task = replace(
        plain,
        name=name,
        title=f"embedded arithmetic, dialect {name}",
        prepare=lambda cache: pretrained(cache, name),
        sft_rows=dialect.problems("sft"),
        rlvr=replace(plain.rlvr, max_completion_length=FORK_LENGTH),
        sampling=replace(plain.sampling, max_completion_length=FORK_LENGTH),
        rare_route=dialect.way,  # the way that is counted is the one that writes letters
    )
    return Variant(task, name)


def _other_start(number: int) -> Variant:
    plain = arithmetic_fresh_task()
    sft = replace(plain.sft, seed=plain.sft.seed + number)
    return Variant(replace(plain, sft=sft), f"sft-{number}")


def pretrained(folder: Path, dialect: str) -> Path:
    """The base model of a dialect, pretrained if it is not in the folder: minutes of one core."""
    from research import pretrain

    out = folder / dialect
    if not out.is_dir():
        start = ["--start", str(DATA / "arithmetic-fresh"), "--steps", "200"]
        rate = ["--learning-rate", "2.5e-3", "--seed", "3410", "--samples", "8"]
        pretrain.main([*start, *rate, "--problems", dialect, "--out", str(out)])
    return out


VARIANTS: dict[str, Callable[[], Variant]] = {
    "skewed": _skewed,
    "balanced": _balanced,
    "by-rate": _by_rate,
    "fork": lambda: _fork("fork"),
    "fork-twin": lambda: _fork("fork-twin"),
    "sft-2": lambda: _other_start(2),
    "sft-3": lambda: _other_start(3),
}
