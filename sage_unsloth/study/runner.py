"""Runs a study: points over training seeds, one process for each run, and a report.

report = study("runs/study", start="runs/sft", data="mine.jsonl",
               benchmarks=["own=held_out.jsonl"], methods=["grpo=0.05,0.2", "maxrl=0.05"])
"""

import glob
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.weights import model_identity
from sage_unsloth.runs.files import read_json, write_json
from sage_unsloth.runs.locks import exclusive_lock
from sage_unsloth.runs.record import open_run
from sage_unsloth.study.plan import FREE_VARIANTS, Plan, completed_runs, cost_text, plan_text
from sage_unsloth.study.points import Claim, Point, find_twin, parse_claims, parse_methods
from sage_unsloth.study.publish import publish
from sage_unsloth.study.tasks import Task, get_task, own_task, shrink
from sage_unsloth.training.own_algorithms import own_code
from sage_unsloth.training.rlvr_job import recorded_guide
from sage_unsloth.training.side_by_side import MEMORY, Job, choose_processes, run_side_by_side
from sage_unsloth.training.stage import rows_digest

DESIGN = "design.json"
"""The file with the settings of a study, its claims, and when each was registered."""
METHODS = ("grpo=0.05,0.1,0.2,0.4", "maxrl=0.05,0.1,0.2", "dph-rl=0.3,1", "sage-branch=0.05,0.2")
REDUCED = ("grpo=0.05,0.2,0.4", "maxrl=0.05", "dph-rl=0.3", "sage-branch=0.2")
SEEDS, REDUCED_SEEDS = 8, 4

logger = logging.getLogger(__name__)


def study(
    out: str | Path,
    *,
    methods: Sequence[str] = (),
    task: str | Task | None = None,
    seeds: int | None = None,
    first_seed: int = 1,
    claims: Sequence[str] = (),
    free: Sequence[str] = FREE_VARIANTS,
    processes: int | None = None,
    reduced: bool = False,
    smoke: bool = False,
    report_only: bool = False,
    show: Callable[[str], object] = print,
    **own: Any,
) -> dict[str, Any]:
    """Runs or resumes a study in the folder `out`, and returns its report as data.

    Writes `records.json` (every count), `report.json`, `report.md`, figures with their tables, and
    under `runs/` the folder of each run, as `train` leaves it.

    Args:
        out: folder; a later call may add methods, seeds and claims.
        methods: see `points`; the first point is the baseline.
        task: an embedded task, `module:name`, or a `Task`; None for your own data.
        seeds: number of training seeds of every point.
        first_seed: the first of these seeds.
        claims: the comparisons that the study should decide, each as `A>B@K`.
        free: variants of the baseline without training, from `plan.FREE_VARIANTS`.
        processes: runs at a time; None for as many as cores and memory allow.
        reduced: fewer methods and seeds by default.
        smoke: a minimal size that only checks that everything works.
        report_only: only report on the seeds that are complete.
        show: called with each text for the terminal.
        own: arguments of `tasks.own_task`, for your own data.

    Raises:
        ValueError: invalid input, before anything is trained, or the folder of another study.
        SideBySideError: a run failed; complete runs remain, and the next call resumes.
    """
    if unknown := set(free) - set(FREE_VARIANTS):
        raise ValueError(
            f"--free must be of {', '.join(FREE_VARIANTS)}, got {', '.join(sorted(unknown))}"
        )
    count = seeds if seeds is not None else REDUCED_SEEDS if reduced else SEEDS
    if count < 1:
        raise ValueError(f"--seeds must be >= 1, got {count}")
    points = parse_methods(methods or (REDUCED if reduced else METHODS))
    if isinstance(task, str):
        task = get_task(task)
    if task is None:
        task = own_task(smoke=smoke, show=show, **own)
    elif given := [name for name, value in own.items() if value is not None]:
        raise ValueError(f"--task has its own data and settings, got {', '.join(given)} with it")
    elif smoke:
        task = shrink(task)
    plan = Plan(
        task=task,
        out=Path(out),
        points=points,
        seeds=tuple(range(first_seed, first_seed + count)),
        free=tuple(free),
    )
    for point in points:
        point.configure(task.rlvr, task.common)
    for benchmark in task.benchmarks:
        if count == 1 and len({row.get("unit", row["id"]) for row in benchmark.rows}) < 2:
            raise ValueError(
                "a study of one training seed needs at least two problems in each benchmark, got 1 "
                f"in {benchmark.name}. Give --seeds 2, or more problems"
            )
    plan = replace(plan, claims=tuple(parse_claims(claims, points, plan.ks, smoke=task.smoke)))
    with exclusive_lock(plan.out):
        open_run(plan.out, study_settings(task))
        plan = name_claims(plan, check=not report_only)
        if not report_only:
            run_jobs(plan, processes, show)
        return publish(plan, show)


def study_settings(task: Task) -> dict[str, Any]:
    """The settings that must be equal to resume a study, whatever it compares."""
    rlvr = asdict(task.rlvr)
    del rlvr["seed"]  # each run's own
    return {
        "command": "study",
        "task": task.name,
        "model": model_identity(task.model, task.adapter),
        "rlvr": rlvr,
        "common": {name: repr(value) for name, value in task.common.items()},
        "sampling": asdict(task.sampling),
        "sft": task.sft and asdict(task.sft),
        "rows": rows_digest(task.rows),
        "benchmarks": {
            benchmark.name: rows_digest(benchmark.rows) for benchmark in task.benchmarks
        },
        "verifier": task.verifier.label,
        "rewards": list(task.rewards or ()),
    }


def name_claims(plan: Plan, check: bool = True) -> Plan:
    """The plan with every claim ever registered here; each is recorded with its time.

    A claim that was named cannot be taken back: Holm's correction counts it.

    Args:
        check: refuse a point that has a run and is not what it was.

    Raises:
        ValueError: a point is not what it was when its first run began.
    """
    file = plan.out / DESIGN
    design = read_json(file) if file.exists() else {"points": {}, "claims": {}}
    named, points = design["claims"], design["points"]
    for point in plan.points:
        row, before = describe_point(point, plan), points.get(point.name, {})
        if has_run(point, plan):
            if check:
                check_unchanged(point.name, row, before)
            row = before or row
        points[point.name] = row | {
            "twin": find_twin(point, plan.points, plan.task.rlvr, plan.task.common)
        }
    complete = len(list(completed_runs(plan)))
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for claim in plan.claims:
        named.setdefault(claim.text, asdict(claim) | {"named": now, "runs_complete": complete})
    write_json(file, {"points": points, "seeds": list(plan.seeds), "claims": named})
    all_claims = [Claim(item["better"], item["worse"], item["k"]) for item in named.values()]
    return replace(plan, claims=tuple(all_claims))


def has_run(point: Point, plan: Plan) -> bool:
    """Whether a run of the point has begun, with any seed."""
    return any((plan.out / "runs").glob(f"{glob.escape(point.file_name)}_seed-*"))


def check_unchanged(name: str, row: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raises ValueError for a point that differs in what is recorded of it."""
    for key in row.keys() & before.keys():
        if row[key] != before[key]:
            # The digest of own code is that of its whole file.
            remedy = (
                "Restore its file and put new code into another file"
                if key == "code"
                else "Give the changed method another name, or choose another --out"
            )
            raise ValueError(
                f"a point must stay the same in all runs of a study, but {key} of {name!r} was "
                f"{before[key]} and is {row[key]}. {remedy}"
            )


def describe_point(point: Point, plan: Plan) -> dict[str, Any]:
    """What a point is, for the record: its guide, digests of own code, and changed settings."""
    rlvr = plan.task.rlvr
    config, guide = point.configure(rlvr, plan.task.common)
    changes = {
        field.name: getattr(config, field.name)
        for field in fields(config)
        if getattr(config, field.name) != getattr(rlvr, field.name)
    }
    row = {
        "algorithm": point.algorithm,
        "settings": dict(point.settings),
        "changes": changes,
        "guide": recorded_guide(guide),
        **own_code(guide, config.advantages, config.token_advantages),
    }
    return json.loads(json.dumps(row, default=repr))


def run_jobs(plan: Plan, processes: int | None, show: Callable[[str], object]) -> None:
    """Everything that is not complete, each in a process of its own."""
    plan.result("").parent.mkdir(exist_ok=True)
    memory = MEMORY if plan.task.is_small else MEMORY + 6 * _size_of(plan.task.model)

    def stages() -> list[list[Job]]:
        first = [] if plan.task.sft is None else [plan.sft_job()]
        return [first, plan.run_jobs(), plan.dose_jobs() + plan.variant_jobs()]

    left = [job for stage in stages() for job in stage if not job.is_complete]
    count, why = choose_processes(left, processes, long=True, memory=memory)
    if not left:
        return
    show(plan_text(plan, count, why))
    show(cost_text(plan, left, count))
    show("You can stop at any time: the same command resumes.\n")
    cores = len(os.sched_getaffinity(0))
    threads = 1 if plan.task.is_small or has_gpu() else max(1, cores // count)
    said: list[str] = []

    def tell_pace(job: Job, seconds: float) -> None:
        rest = [item for item in left if not item.is_complete]
        if rest and not said and job.max_steps and job.name != "sft":
            said.append(job.name)
            show(f"{job.name} took {seconds:.0f} s. {cost_text(plan, rest, count)}")

    folder = plan.out / "processes"
    for jobs in stages():
        if todo := [job for job in jobs if not job.is_complete]:
            run_side_by_side(todo, count, folder, threads=threads, ended=tell_pace)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier call that failed


def _size_of(model: str) -> int:
    """Bytes of a model's weights; a hub id's are not known here."""
    return sum(file.stat().st_size for file in Path(model).glob("*.safetensors"))
