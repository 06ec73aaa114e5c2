"""What a frontier runs: methods, the strengths of each, training seeds, and the problems."""

import re
from dataclasses import dataclass, fields, replace
from typing import Any

from research.benchmark.tasks import TASKS, Task, get_task
from sage_unsloth.methods.advantage_rules import advantage_rule
from sage_unsloth.objective.protocols import Guide
from sage_unsloth.planning.presets import PAPER_BETA
from sage_unsloth.training.algorithms import SETTINGS, Algorithm, get_algorithm
from sage_unsloth.training.rlvr_config import RlvrConfig

PROBLEMS = {"pilot": "", "fresh": "-fresh"}
"""The problems to choose strengths on, those of the verdict, and what their tasks' names end in."""
BETAS = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0)
OWN = {
    "dph-rl": ("rehearsal_coef", (0.1, 0.3, 1.0, 3.0)),
    "grpo-entropy": ("entropy_coef", (0.001, 0.003, 0.01, 0.03)),
    "pkpo": ("k", (2.0, 4.0, 7.0)),
    "pass-at-k": ("k", (2.0, 4.0, 6.0)),
}
"""The strength of algorithms for which it is not β, and its values by default."""
DEFAULT = (
    "grpo", "grpo-reverse-kl", "grpo-no-kl", "sage-branch", "sage-token", "sage-random",
    "maxrl", "pass-at-k", "dph-rl",
)  # fmt: skip
REDUCED = (
    "grpo=0.05,0.2,0.4", "grpo-reverse-kl=0.4", "sage-branch=0.2", "grpo-no-kl", "maxrl=0.05",
    "dph-rl=0.3,1",
)  # fmt: skip
NUM_SEEDS, REDUCED_SEEDS = 8, 6
BASELINE = f"grpo beta={PAPER_BETA:g}"
"""The point whose pass@1 the others are asked for."""

_SPEC = re.compile(r"([^:=]+)(?::([a-z_]+))?(?:=([^:=]+))?")


@dataclass(frozen=True)
class FrontierRun:
    """One RL run: an algorithm, the setting that is its strength with the value, and a seed."""

    algorithm: str
    setting: str
    strength: float | None
    seed: int

    @property
    def point(self) -> str:
        """The algorithm at this strength, `grpo beta=0.4`; without a strength its name alone."""
        return point_name(self.algorithm, self.setting, self.strength)

    @property
    def name(self) -> str:
        return f"{self.point.replace(' ', '_').replace('=', '-')}_seed-{self.seed}"


def point_name(algorithm: str, setting: str, strength: float | None) -> str:
    return algorithm if strength is None else f"{algorithm} {setting}={strength:g}"


@dataclass(frozen=True)
class Method:
    """An algorithm, and the strengths at which it is trained.

    Attributes:
        algorithm: a row of the table of algorithms.
        setting: its strength: a number among the fields of `RlvrConfig`, or of the settings of its
            rule for advantages.
        strengths: values of it; empty leaves the algorithm as it is, one point.
    """

    algorithm: str
    setting: str = "beta"
    strengths: tuple[float, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Method":
        """`NAME`, `NAME=0.1,0.4` or `NAME:SETTING=0.1,0.4`.

        Without a setting it is the algorithm's in `OWN`, or β; without values those of `OWN`, or
        `BETAS` where it has a KL term, and any other algorithm stays as it is.

        Raises:
            ValueError: another form, an unknown algorithm or setting, values that are not numbers,
                not different, or that the algorithm refuses.
        """
        form = "NAME, NAME=VALUE,… or NAME:SETTING=VALUE,…, as in grpo=0.1,0.4"
        if not (match := _SPEC.fullmatch(text)):
            raise ValueError(f"a method must be {form}; got {text!r}")
        row = get_algorithm(match[1])
        own, values = OWN.get(match[1], ("beta", BETAS if row.beta else ()))
        setting = match[2] or own
        if row.guide is not None and "teacher_logps" in row.guide.needs:
            raise ValueError(f"a frontier has no teacher, which {match[1]} needs; leave it out")
        try:
            given = tuple(float(value) for value in (match[3] or "").split(",") if value)
        except ValueError as error:
            raise ValueError(f"strengths must be numbers, {form}; got {text!r}") from error
        if match[2] and not given:
            raise ValueError(f"a setting needs values, {form}; got {text!r}")
        if len(set(given)) < len(given):
            raise ValueError(f"strengths must be different; got {text!r}")
        method = cls(match[1], setting, given or values)
        for strength in method.strengths:
            configured(FrontierRun(method.algorithm, setting, strength, 0), RlvrConfig())
        return method

    def text(self) -> str:
        """The method as `parse` reads it."""
        values = ",".join(f"{value:g}" for value in self.strengths)
        return f"{self.algorithm}:{self.setting}={values}" if values else self.algorithm

    def runs(self, seed: int) -> list[FrontierRun]:
        if not self.strengths:
            return [FrontierRun(self.algorithm, "", None, seed)]
        return [FrontierRun(self.algorithm, self.setting, value, seed) for value in self.strengths]


def configured(run: FrontierRun, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]:
    """The settings and the guide of one run, from those that all runs share.

    Raises:
        ValueError: the setting does not exist, is not a number, or does not suit the algorithm.
    """
    row = get_algorithm(run.algorithm)
    given = {} if run.strength is None else _given(row, run.setting, run.strength)
    row = row.with_settings(given)
    beside = {name: value for name, value in given.items() if name not in SETTINGS}
    return replace(row.configure(settings), seed=run.seed, **beside), row.guide


def _given(row: Algorithm, setting: str, strength: float) -> dict[str, Any]:
    """The strength as a setting of `RlvrConfig`."""
    kinds = {field.name: field.type for field in fields(RlvrConfig)}
    numbers = {name: kind for name, kind in kinds.items() if kind in (int, float)}
    del numbers["seed"]
    whole = strength == int(strength)
    if setting in numbers:
        if numbers[setting] is int and not whole:
            raise ValueError(f"{setting} must be a whole number; got {strength:g}")
        return {setting: int(strength) if numbers[setting] is int else strength}
    rule = advantage_rule(row.advantages)
    if rule.is_grpo or setting in kinds:
        raise ValueError(
            "a strength must be a number among the settings of RLVR "
            f"({', '.join(numbers)}), or of the algorithm's rule for advantages; got {setting!r}"
        )
    return {"advantages": f"{rule.text},{setting}={int(strength) if whole else strength}"}


@dataclass(frozen=True, kw_only=True)
class FrontierConfig:
    """What is run.

    Attributes:
        task: a name of `tasks.TASKS`; only its first set, the held-out problems, is answered.
        problems: "pilot", on which strengths are chosen, or "fresh", for a verdict, which are
            trained and evaluated on for nothing else.
        methods: each as `Method.parse` reads it; empty takes `DEFAULT`.
        seeds: training seeds of every point; empty takes `NUM_SEEDS`, from 101 for the pilot and
            from 201 for the verdict.
        smoke: two steps of everything, to see that it works.

    Raises:
        ValueError: see `Method.parse`; unknown problems or task, seeds that are not different, a
            point named twice, or `BASELINE` not among the points.
    """

    task: str = "arithmetic"
    problems: str = "pilot"
    methods: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    smoke: bool = False

    def __post_init__(self) -> None:
        if self.problems not in PROBLEMS:
            raise ValueError(
                f"--problems must be one of {', '.join(PROBLEMS)}; got {self.problems!r}"
            )
        if self.problems == "fresh" and f"{self.task}{PROBLEMS['fresh']}" not in TASKS:
            raise ValueError(f"--task {self.task} has no fresh problems; give a task that has some")
        self.load_task()
        texts = tuple(Method.parse(text).text() for text in self.methods or DEFAULT)
        object.__setattr__(self, "methods", texts)
        if not self.seeds:
            object.__setattr__(self, "seeds", seeds(self.problems, NUM_SEEDS))
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be different values; got {self.seeds}")
        points = self.points()
        if len(set(points)) < len(points):
            twice = next(point for point in points if points.count(point) > 1)
            raise ValueError(f"every point must be named once; got {twice!r} twice")
        if BASELINE not in points:
            raise ValueError(
                f"grpo={PAPER_BETA:g} must be among the methods, because the others are asked for "
                f"its pass@1; got {', '.join(texts)}"
            )

    def load_task(self) -> Task:
        task = get_task(self.task + PROBLEMS[self.problems], smoke=self.smoke)
        first = next(iter(task.sets))
        return replace(task, sets={first: task.sets[first]})

    def parsed(self) -> list[Method]:
        return [Method.parse(text) for text in self.methods]

    def points(self) -> list[str]:
        return [run.point for method in self.parsed() for run in method.runs(0)]

    def runs(self) -> list[FrontierRun]:
        """Seed by seed, so that the complete seeds always make a whole frontier."""
        return [run for seed in self.seeds for item in self.parsed() for run in item.runs(seed)]

    def training(self, run: FrontierRun, settings: RlvrConfig) -> tuple[RlvrConfig, Guide | None]:
        return configured(run, settings)


def seeds(problems: str, count: int, first: int | None = None) -> tuple[int, ...]:
    """Training seeds of the pilot, from 101, or of the verdict, from 201."""
    first = {"pilot": 101, "fresh": 201}[problems] if first is None else first
    return tuple(range(first, first + count))
