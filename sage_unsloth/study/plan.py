"""The processes of a study: their work, their result files and their cost."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.planning.plan import duration
from sage_unsloth.runs.files import read_json
from sage_unsloth.study.points import START, Claim, Point
from sage_unsloth.study.tasks import Task
from sage_unsloth.training.quickstart_plan import UNIT_SECONDS
from sage_unsloth.training.side_by_side import Job

SERIES = {
    "reward": "reward",
    "kl": "kl/ref_k3",
    "entropy": "sage/entropy",
    "grad_norm": "grad_norm",
    "guide_mean": "sage/guide_mean",
    "log_guide_mean": "sage/log_guide_mean",
    "share_touched": "sage/share_touched",
    "mean_length": "completions/mean_length",
    "dead_groups": "frac_reward_zero_std",
}
"""Columns of a run's training series, and the trainer's names for them."""
EARLY, SCALE, TEMPERATURE = "early", "scale", "temperature"
FREE_VARIANTS = (EARLY, SCALE, TEMPERATURE)
"""Variants of the baseline's runs that need samples but no training."""
LORA_SCALES, TEMPERATURES, STEP_FRACTIONS = (0.75, 0.5, 0.25), (1.3,), (0.5, 0.25)
"""Factors of the LoRA, of the evaluation's temperature, and of the number of steps."""
MORE = 4
"""How many times more samples the start model gets: its noise is in every difference to it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a study trains and samples.

    Attributes:
        task: the model, its problems and settings.
        out: folder.
        points: the first one is the baseline.
        seeds: training seeds of every point.
        claims: registered before the runs.
        free: of `FREE_VARIANTS`.
    """

    task: Task
    out: Path
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    claims: tuple[Claim, ...] = ()
    free: tuple[str, ...] = FREE_VARIANTS

    @property
    def baseline(self) -> Point:
        return self.points[0]

    @property
    def ks(self) -> list[int]:
        """1, 4, 8, 16 … while n >= 2k."""
        n = self.task.sampling.num_samples
        return [1, *(k for k in (2**power for power in range(2, 20)) if 2 * k <= n)]

    def run_name(self, point: Point, seed: int) -> str:
        return f"{point.file_name}_seed-{seed}"

    def result(self, name: str) -> Path:
        return self.out / "results" / f"{name}.json"

    def num_steps(self, point: Point) -> int:
        return point.configure(self.task.rlvr, self.task.common)[0].max_steps

    def early_steps(self) -> list[int]:
        """Steps of the baseline's runs after which the adapter is copied."""
        config = self.baseline.configure(self.task.rlvr, self.task.common)[0]
        if EARLY not in self.free or config.full_finetuning:
            return []
        # Rounded up, so that neighbours are at most a factor of 2 apart: the line has no gap.
        steps = {math.ceil(part * config.max_steps) for part in STEP_FRACTIONS}
        return sorted(steps - {config.max_steps})

    def variants(self) -> list[tuple[str, float]]:
        """The free variants of a baseline's run, (kind, value)."""
        config = self.baseline.configure(self.task.rlvr, self.task.common)[0]
        values: list[tuple[str, float]] = [(EARLY, float(step)) for step in self.early_steps()]
        if SCALE in self.free and not config.full_finetuning:
            values += [(SCALE, scale) for scale in LORA_SCALES]
        if TEMPERATURE in self.free and not config.full_finetuning:
            temperature = self.task.sampling.temperature
            values += [(TEMPERATURE, round(temperature * t, 4)) for t in TEMPERATURES]
        return values

    def sft_job(self) -> Job:
        assert self.task.sft is not None
        return self._job(
            "sft",
            "prepare_start",
            {},
            folder=self.out / "sft",
            result=self.out / "sft" / "model",
            max_steps=self.task.sft.max_steps,
        )

    def run_jobs(self) -> list[Job]:
        """The start model, then seed by seed: complete seeds are a whole study at any time."""
        start = {"num_samples": MORE * self.task.sampling.num_samples}
        jobs = [self._job(START, "sample_start", start, models=[START], **start)]
        for seed in self.seeds:
            for point in self.points:
                name = self.run_name(point, seed)
                early = self.early_steps() if point == self.baseline else []
                jobs.append(
                    self._job(
                        name,
                        "train_run",
                        {"point": point, "seed": seed, "early": early},
                        folder=self.out / "runs" / name,
                        max_steps=self.num_steps(point),
                        models=[name],
                    )
                )
        return jobs

    def dose_jobs(self) -> list[Job]:
        """The dose of each guide on completions of the start model, sampled earlier."""
        return [
            self._job(f"{point.file_name}_dose", "measure_guide", {"point": point})
            for point in self.points
            if point.configure(self.task.rlvr, self.task.common)[1] is not None
        ]

    def variant_jobs(self) -> list[Job]:
        """Evaluations of the baseline's variants, a process for each line of each of its runs."""
        jobs = []
        for seed, kind in itertools.product(self.seeds, FREE_VARIANTS):
            run = self.run_name(self.baseline, seed)
            trained = self.result(run).exists()
            variants = []
            for _, value in (variant for variant in self.variants() if variant[0] == kind):
                copy = self.out / "runs" / run / EARLY / f"{value:g}"
                if kind != EARLY or not trained or copy.is_dir():
                    variants.append((kind, value))  # else an earlier call made no copies
            if variants:
                arguments = {"run": run, "seed": seed, "variants": variants}
                models = [variant_name(run, kind, value) for _, value in variants]
                job = self._job(f"{run}_free-{kind}", "sample_variants", arguments, models=models)
                jobs.append(job)
        return jobs

    def _job(
        self,
        name: str,
        function: str,
        arguments: dict[str, Any],
        folder: Path | None = None,
        result: Path | None = None,
        max_steps: int = 0,
        models: Sequence[str] = (),
        num_samples: int | None = None,
    ) -> Job:
        """A process; it evaluates `models` by `num_samples` of each problem."""
        num_samples = num_samples or self.task.sampling.num_samples
        shared: dict[str, Any] = {"task": self.task, "out": self.out}
        if result is None:
            result = self.result(name)
            shared["result"] = result
        return Job(
            name=name,
            work=f"sage_unsloth.study.worker:{function}",
            arguments=shared | arguments,
            folder=folder or self.out / "evaluation" / name,
            result=result,
            max_steps=max_steps,
            samples=tuple(self.out / "evaluation" / model for model in models),
            num_completions=len(models) * num_samples * self.task.num_problems,
            backend=self.task.rlvr.backend,
            is_small=self.task.is_small,
        )

    def amount(self, jobs: Sequence[Job]) -> tuple[int, int]:
        """Optimizer steps and evaluation completions of these jobs."""
        return sum(job.max_steps for job in jobs), sum(job.num_completions for job in jobs)


def variant_name(run: str, kind: str, value: float) -> str:
    """The name of a free variant of a run."""
    return f"{run}_{kind}-{value:g}"


def measured_pace(plan: Plan) -> dict[str, Any]:
    """Seconds per `step` and per `completion`, from a complete run if there is one."""
    for path, result in completed_runs(plan):
        steps = plan.num_steps(next(p for p in plan.points if p.name == result["point"]))
        completions = plan.task.num_problems * plan.task.sampling.num_samples
        if result["seconds"]["evaluate"] > 1:  # else it only read what was sampled before
            return {
                "step": result["seconds"]["train"] / steps,
                "completion": result["seconds"]["evaluate"] / completions,
                "run": path.stem,
            }
    return dict(plan.task.seconds)


def completed_runs(plan: Plan) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Result files and contents of the complete runs."""
    for seed in plan.seeds:
        for point in plan.points:
            path = plan.result(plan.run_name(point, seed))
            if path.exists():
                yield path, read_json(path)


def cost_text(plan: Plan, jobs: Sequence[Job], count: int) -> str:
    """What is left to do, and how long it takes if the pace is known."""
    steps, completions = plan.amount(jobs)
    text = f"{len(jobs)} processes left: {steps:,} steps and {completions:,} completions to grade"
    pace = measured_pace(plan)
    if not pace:
        return f"{text}. The time is estimated after the first run."
    seconds = steps * pace["step"] + completions * pace["completion"]
    seconds = (seconds + len(jobs) * UNIT_SECONDS["start"]) / count
    whose = f"the pace of {pace['run']}" if "run" in pace else "the pace of an idle machine"
    return f"{text}: about {duration(seconds)}, {count} at a time, at {whose}."


def plan_text(plan: Plan, count: int, why: str) -> str:
    """The plan, for the terminal."""
    task, config = plan.task, plan.task.rlvr
    requested = ", ".join(
        f"{len(benchmark.rows)} of {benchmark.name}" for benchmark in task.benchmarks
    )
    free = ", ".join(f"{kind} {value:g}" for kind, value in plan.variants()) or "none"
    lines = [
        f"Study -> {plan.out}  ({task.title})",
        f"  {len(plan.points)} points x {len(plan.seeds)} training seeds: "
        + ", ".join(point.name for point in plan.points),
        f"  each: {config.max_steps} steps of {config.completions_per_step} completions, then "
        f"{task.sampling.num_samples} samples of {requested}, the start model {MORE} times as many",
        f"  free lines of {plan.baseline.name}: mixture with the start model, {free}",
        f"  claims named before the runs: {', '.join(c.text for c in plan.claims) or 'none'}",
        f"  {count} at a time: {why}",
    ]
    return "\n".join(lines)
