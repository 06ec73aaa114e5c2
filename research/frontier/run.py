"""Every point of a frontier over training seeds, by the benchmark's workers."""

from pathlib import Path
from typing import Any

from research.benchmark.records import result_path
from research.benchmark.run import run_all, task_settings
from research.benchmark.text import pilot_report
from research.data import DATA
from research.frontier.design import FrontierConfig
from research.frontier.publish import publish
from research.frontier.text import power_lines
from sage_unsloth.planning.plan import duration
from sage_unsloth.training.quickstart_plan import SECONDS


def frontier(out: str | Path, config: FrontierConfig, workers: int | None = None) -> dict[str, Any]:
    """Run or resume a frontier in the folder `out`, and return what `report.json` holds.

    The folder is a benchmark's: records, report, figures, and a folder for each run.

    Args:
        out: folder.
        config: what is run; a later call may add methods, strengths and seeds.
        workers: processes; None takes one for each core, or one in all where there is a GPU.

    Raises:
        ValueError: the folder holds other settings, or another process runs it.
        SideBySideError: a run failed; its log is named, and what others finished is kept.
    """
    task = config.load_task()
    settings = task_settings(task) | {"command": "frontier"}

    def announce(workers: int) -> str:
        return plan(config, Path(out), workers)

    with run_all(out, config, task, settings, workers, announce) as folder:
        return publish(folder, config)


def plan(config: FrontierConfig, out: Path, workers: int) -> str:
    """What will be done, how long it should take, and which differences it can find."""
    task, runs = config.load_task(), config.runs()
    left = [run for run in runs if not result_path(out, run).exists()]
    samples = sum(len(item.rows) * item.num_samples for item in task.sets.values())
    evaluation = samples * task.seconds["completion"] + SECONDS["start"]
    steps = [config.training(run, task.rlvr)[0].max_steps for run in left]
    seconds = sum(count * task.seconds["step"] + evaluation for count in steps) + evaluation
    return "\n".join(
        [
            f"Frontier -> {out}  ({task.title}, {config.problems} problems)",
            *(f"  {method.text()}" for method in config.parsed()),
            f"  {len(config.points())} points x {len(config.seeds)} training seeds; samples: "
            + ", ".join(f"{len(s.rows)} {s.title} x {s.num_samples}" for s in task.sets.values()),
            *power(config),
            f"Estimate: {duration(seconds / workers)} for {len(left)} runs in {workers} "
            f"process{'es' * (workers > 1)} on idle cores; the bar shows this machine's own pace.",
            "Stop it whenever you like: the same command resumes it; a report on what is "
            "complete: --report.\n",
        ]
    )


def results_folder(task: str, problems: str) -> Path:
    """The repository's folder of a frontier's results."""
    return DATA / "results" / "frontier" / task / problems


def power(config: FrontierConfig) -> list[str]:
    """The differences that the design can find, by the variances of the committed pilot."""
    folder = results_folder(config.task, "pilot")
    report = pilot_report(folder, config.seeds, smoke=config.smoke)
    if isinstance(report, str):
        return [report]
    first = next(iter(config.load_task().sets.values()))
    points = config.points()
    result = {k: v for k, v in report["components"].items() if k.partition(" - ")[0] in points}
    units = len({row.get("unit", row["id"]) for row in first.rows})
    lines = power_lines(report | {"components": result}, len(config.seeds), units)
    return [
        f"  Power, from a pilot with {len(report['seeds'])} seeds: a true difference that "
        f"{len(config.seeds)} seeds x {units} problems find 4 times in 5:",
        *(f"    {line}" for line in lines),
    ]
