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

from research.data import DATA
from research.problems.fork import DIALECTS
from research.tasks import arithmetic_fresh
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.problems.row_weights import balance_rows, inverse_pass_rates, repeat_rows
from sage_unsloth.runs.files import read_json
from sage_unsloth.study.points import Point
from sage_unsloth.study.tasks import Task
from sage_unsloth.training.rlvr_config import RlvrConfig

RESULTS = DATA / "results" / "frontier" / "variants"
RATES = RESULTS / "start_rates.json"
"""The SFT model's correct samples of each training problem, by id (`python -m …rates`)."""
FORK_LENGTH = 56  # tokens of a completion, 8 more than without letters
PLAIN_START = "arithmetic-fresh"
SFT = "sft"  # the model that every run starts from
SAMPLES = 32  # of each test problem
TITLE = "held-out problems"


@dataclass(frozen=True)
class Variant:
    """A task with one thing changed.

    Attributes:
        task: what is trained and asked.
        start: name of the SFT model that its runs start from.
        way: the way of working that is counted.
        pretrain: of a dialect: from a folder to its base model, pretrained there.
    """

    task: Task
    start: str
    way: str = "round-up"
    pretrain: Callable[[Path], Path] | None = None

    def base(self, folder: Path) -> Path:
        return Path(self.task.model) if self.pretrain is None else self.pretrain(folder)


@dataclass(frozen=True)
class VariantRun:
    """One RL run: an algorithm, its strength and the setting that this is, a seed, a variant."""

    algorithm: str
    setting: str
    strength: float
    seed: int
    variant: str = "skewed"

    @property
    def point(self) -> Point:
        return Point(self.algorithm, ((self.setting, self.strength),))

    @property
    def name(self) -> str:
        return f"{self.variant}_{self.point.file_name}_seed-{self.seed}"

    def configure(self, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]:
        config, guide = self.point.configure(settings)
        return replace(config, seed=self.seed), guide


def result_path(out: Path, run: VariantRun | None) -> Path:
    """The file of a run's result once it is complete; None is the SFT model."""
    return out / "results" / f"{SFT if run is None else run.name}.json"


def load_variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in VARIANTS:
        raise ValueError(f"a variant must be one of {', '.join(VARIANTS)}, got {name!r}")
    return VARIANTS[name]()


def queue_runs(text: str) -> list[VariantRun]:
    """The runs of a line of the queue, `VARIANT ALGORITHM=STRENGTH,… SEED,…`, seed by seed.

    Raises:
        ValueError: another form.
    """
    parts = text.split()
    if len(parts) != 3 or "=" not in parts[1]:
        raise ValueError(
            f"a line of the queue must be VARIANT ALGORITHM=STRENGTH,… SEED,…, got {text!r}"
        )
    variant, method, seeds = parts
    algorithm, _, strengths = method.partition("=")
    return [
        VariantRun(algorithm, "beta", float(strength), int(seed), variant)
        for seed in seeds.split(",")
        for strength in strengths.split(",")
    ]


def _skewed() -> Variant:
    return Variant(arithmetic_fresh(), PLAIN_START)


def _balanced() -> Variant:
    task = arithmetic_fresh()
    return Variant(replace(task, rows=balance_rows(task.rows, "family")), PLAIN_START)


def _by_rate() -> Variant:
    task = arithmetic_fresh()
    recorded: dict[str, Any] = read_json(RATES)
    correct_P = [recorded["correct"][row["id"]] for row in task.rows]
    weight_P = inverse_pass_rates(recorded["num_samples"], correct_P, task.rlvr.num_generations)
    return Variant(replace(task, rows=repeat_rows(task.rows, weight_P)), PLAIN_START)


def _fork(name: str) -> Variant:
    plain, dialect = arithmetic_fresh(), DIALECTS[name]
    task = replace(
        plain,
        name=name,
        title=f"embedded arithmetic, dialect {name}",
        sft_rows=dialect.problems("sft"),
        rlvr=replace(plain.rlvr, max_completion_length=FORK_LENGTH),
        sampling=replace(plain.sampling, max_completion_length=FORK_LENGTH),
    )
    # The way that is counted is the one that writes letters.
    return Variant(task, name, dialect.way, lambda folder: pretrained(folder, name))


def _other_start(number: int) -> Variant:
    plain = arithmetic_fresh()
    assert plain.sft is not None
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
