"""What a benchmark runs: its settings, its runs, and their names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from research.benchmark.tasks import Task, get_task
from sage_unsloth.objective.guides import BranchGuide
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.training.algorithms import ALGORITHMS, Algorithm, get_algorithm
from sage_unsloth.training.rlvr_config import RlvrConfig

THRESHOLDS, RATIOS = (0.8, 1.2, 2.0), (0.1, 0.3, 0.5)
"""The grid of the Branch guide: nats, and a number per nat (the paper's Table 6)."""
SFT = "sft"  # the model that every run starts from

BASELINE = "grpo"  # all others are compared with it


@dataclass(frozen=True)
class Run:
    """One RL run: an algorithm and a seed, and the cell of the grid where it is one."""

    algorithm: str
    seed: int
    threshold: float | None = None
    ratio: float | None = None

    @property
    def name(self) -> str:
        cell = (
            "" if self.threshold is None else f"_threshold-{self.threshold:g}_ratio-{self.ratio:g}"
        )
        return f"{self.algorithm}{cell}_seed-{self.seed}"

    def row(self, beta: float | None = None) -> Algorithm:
        """What is trained; `beta` replaces the algorithm's own, where that is not 0."""
        algorithm = get_algorithm(self.algorithm)
        if beta is not None and algorithm.beta:
            algorithm = replace(algorithm, settings={**algorithm.settings, "beta": beta})
        if self.threshold is None or self.ratio is None:
            return algorithm
        return replace(algorithm, guide=BranchGuide(threshold=self.threshold, ratio=self.ratio))


class Design(Protocol):
    """What runs there are, and what each trains: `BenchmarkConfig`, or the frontier's."""

    def load_task(self) -> Task: ...
    def runs(self) -> Sequence[Any]: ...
    def training(self, run: Any, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]: ...


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What is run.

    Attributes:
        task: a name of `tasks.TASKS`.
        algorithms: rows of `ALGORITHMS`; empty takes the task's default set, which takes two
            hours on two cores (computed).
        seeds: training seeds of every algorithm; empty takes as many as the task has by default,
            from 1.
        grid_seeds: how many of the seeds train the threshold × ratio grid of the Branch guide; None
            takes the task's own number.
        beta: KL coefficient of every algorithm that has a KL term; None leaves each its own, the
            paper's .05.
        smoke: two steps of everything, to see that it works.

    Raises:
        ValueError: an unknown task or algorithm, one named twice, no seeds, `grpo` not among the
            algorithms, or one that needs a teacher.
    """

    task: str = "arithmetic"
    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    grid_seeds: int | None = None
    beta: float | None = None
    smoke: bool = False

    def __post_init__(self) -> None:
        task = self.load_task()
        if not self.algorithms:
            object.__setattr__(self, "algorithms", task.algorithms)
        if not self.seeds:
            object.__setattr__(self, "seeds", tuple(range(1, task.num_seeds + 1)))
        if self.grid_seeds is None:
            object.__setattr__(self, "grid_seeds", min(task.grid_seeds, len(self.seeds)))
        for name in ("algorithms", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(f"{name} must be different values, at least one; got {values}")
        for name in self.algorithms:
            guide = get_algorithm(name).guide
            if guide is not None and "teacher_logps" in guide.needs:
                raise ValueError(f"the benchmark has no teacher, which {name} needs; leave it out")
        if "grpo" not in self.algorithms:
            raise ValueError(
                "grpo must be among the algorithms because all others are compared with it; got "
                f"{self.algorithms}"
            )
        if self.beta is not None and not self.beta > 0:
            raise ValueError(
                f"beta must be > 0, as grpo-no-kl is without the term; got {self.beta}"
            )
        if not 0 <= (self.grid_seeds or 0) <= len(self.seeds):
            raise ValueError(
                f"grid_seeds must be in [0, {len(self.seeds)}], a number of the seeds; got "
                f"{self.grid_seeds}"
            )

    def load_task(self) -> Task:
        return get_task(self.task, smoke=self.smoke)

    def training(self, run: Run, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]:
        """The settings and the guide of one run, from those that all runs share."""
        row = run.row(self.beta)
        return replace(row.configure(settings), seed=run.seed), row.guide

    def runs(self) -> list[Run]:
        """Seed by seed, so that the complete seeds always make a whole benchmark; the grid last."""
        runs = [Run(name, seed) for seed in self.seeds for name in self.algorithms]
        default = BranchGuide()
        for seed in self.seeds[: self.grid_seeds]:
            for threshold in THRESHOLDS:
                for ratio in RATIOS:
                    if (threshold, ratio) != (default.threshold, default.ratio):
                        runs.append(Run("sage-branch", seed, threshold, ratio))
                    elif "sage-branch" not in self.algorithms:
                        runs.append(Run("sage-branch", seed))
        return runs


def all_algorithms() -> tuple[str, ...]:
    """Every row of the table of algorithms that needs no teacher."""
    return tuple(
        name
        for name, row in ALGORITHMS.items()
        if row.guide is None or "teacher_logps" not in row.guide.needs
    )
