"""A long run watched from outside: do memory, open files, processes and the time of a step grow?

    python -m research.soak --steps 5000 --out runs/soak

Trains the embedded task by the real command (`python -m sage_unsloth train`, in a process of its
own, with checkpoints, metrics, graded completions and everything else switched on) at a small
batch, so that many optimizer steps fit into an hour of one core, and reads /proc while it runs
(Linux only). The golds are written as fractions, so that math-verify's worker processes have to
compare them. A row of `series.csv` is a window of steps:

    rss, rss_children     resident memory of the trainer, and of its child processes (the graders),
                          MiB, mean over the window
    handles, threads, children
                          open file descriptors and threads of the trainer, and its child processes:
                          the most in the window
    cpu_per_step          seconds of the trainer's work on the CPU, in which other work on the
                          machine does not count
    clock_per_step        seconds by the clock
    folder, checkpoints   MiB of the run's folder without its checkpoints, and the number of these

After a warm-up, each series gets a least-squares slope with a 95 % interval from a block bootstrap
of its residuals, since neighbouring windows resemble each other. `soak.json` says which are flat.
"""

import argparse
import contextlib
import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from sage_unsloth.figures import line_styles, new_figure, write_table
from sage_unsloth.problems import arithmetic
from sage_unsloth.runs.files import append_jsonl, write_json
from sage_unsloth.training.stage import METRICS

SETTINGS = ("prompts_per_step=2", "num_generations=4", "max_completion_length=48", "save_steps=50",
            "sample_steps=25", "learning_rate=1e-3")  # fmt: skip
SECONDS_BETWEEN_LOOKS = 0.25
MIB = 2**20
SERIES = ("rss", "rss_children", "handles", "threads", "children", "cpu_per_step",
          "clock_per_step", "folder", "checkpoints")  # fmt: skip
MEMORY_LIMIT = 1.0  # MiB in 1,000 steps: memory is flat where the interval of its slope ends below
TIME_LIMIT = 1.1  # CPU time of a step in the last tenth over the first: flat below


def watch(
    out: Path, steps: int, window: int, hours: float, settings: Sequence[str] = SETTINGS
) -> list[dict]:
    """Run the training in `out`/run, and return the rows of `series.csv`.

    Args:
        out: an empty folder.
        steps, window: optimizer steps, of the run and of a row.
        hours: after these the training is stopped.
        settings: of the training, as `train --set` takes them.

    Raises:
        ValueError: `out` is used, or the training failed.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ValueError(f"--out must be an empty folder, but {out} is not. Give another")
    run, data = out / "run", out / "rows.jsonl"
    rows_of_data = [
        {"prompt": row["problem"], "solution": rf"\frac{{{2 * int(row['answer'])}}}{{2}}"}
        for row in arithmetic.problems("train")
    ]
    append_jsonl(data, rows_of_data)
    command = [sys.executable, "-m", "sage_unsloth", "train", "--algorithm", "sage-branch"]
    command += ["--from", "arithmetic-base", "--path", str(data), "--out", str(run)]
    command += ["--set", f"max_steps={steps}", *settings]
    rows: list[dict] = []
    with (out / "train.log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            for row in _windows(child, run, window, time.monotonic() + 3600 * hours):
                rows.append(row)
                write_table(out / "series.csv", rows)
        finally:
            ended = child.poll() is not None
            child.terminate()  # its time is up, or this process was stopped
            code = child.wait()
    if ended and code != 0:
        raise ValueError(f"the training failed with exit code {code}. See {out / 'train.log'}")
    return rows


def _windows(
    child: subprocess.Popen, run: Path, window: int, deadline: float
) -> Iterator[dict[str, float]]:
    """A row whenever another `window` steps are done, until the process ends or its time is up."""
    looks: list[dict[str, float]] = []
    before: tuple[int, float, float] | None = None
    metrics = run / METRICS
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        step = _lines(metrics)
        look = _look(child.pid)
        if step == 0 or look is None:
            continue
        now = (step, look.pop("cpu"), time.monotonic())
        looks.append(look)
        if before is None or step < before[0] + window:
            before = before or now
            continue
        done = step - before[0]
        row = {"step": step}
        row |= {k: float(np.mean([x[k] for x in looks])) for k in ("rss", "rss_children")}
        row |= {k: max(x[k] for x in looks) for k in ("handles", "threads", "children")}
        row |= {
            "cpu_per_step": (now[1] - before[1]) / done,
            "clock_per_step": (now[2] - before[2]) / done,
        }
        checkpoints = run / "checkpoints"
        row["folder"] = _size(run, checkpoints) / MIB
        row["checkpoints"] = len(list(checkpoints.glob("checkpoint-*")))
        looks, before = [], now
        yield row


def _look(process: int) -> dict[str, float] | None:
    """What the process holds now; None once it has ended."""
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")

    def resident(pid: int) -> float:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page / MIB

    try:
        children = _descendants(process)
        # Behind the name, which may hold spaces: state, parent, …; user and system time are the
        # 14th and 15th field of all.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        look = {
            "rss": resident(process),
            "handles": len(os.listdir(f"/proc/{process}/fd")),
            "threads": len(os.listdir(f"/proc/{process}/task")),
            "children": len(children),
            "cpu": (int(fields[11]) + int(fields[12])) / ticks,
            "rss_children": 0.0,
        }
    except OSError:
        return None
    for child in children:
        with contextlib.suppress(OSError):  # it has ended since
            look["rss_children"] += resident(child)
    return look


def _descendants(process: int) -> list[int]:
    """Processes below this one, by /proc/PID/task/TID/children."""
    results: list[int] = []
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):
            results += [int(pid) for pid in (task / "children").read_text().split()]
    return results + [pid for child in results for pid in _descendants_or_none(child)]


def _descendants_or_none(process: int) -> list[int]:
    with contextlib.suppress(OSError):
        return _descendants(process)
    return []


def _lines(file: Path) -> int:
    with contextlib.suppress(OSError):
        return file.read_bytes().count(b"\n")
    return 0


def _size(folder: Path, without: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        if without not in path.parents:
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


def report(rows: Sequence[Mapping]) -> dict:
    """Slopes with intervals, first and last tenth, and what is flat, after the warm-up.

    The warm-up is the first tenth of the rows.

    Raises:
        ValueError: fewer than 20 rows.
    """
    if len(rows) < 20:
        raise ValueError(
            f"a slope needs at least 20 windows, got {len(rows)}. Let the run continue, or make "
            "--window smaller"
        )
    selected = rows[len(rows) // 10 :]
    steps = [row["step"] for row in selected]
    tenth = max(2, len(selected) // 10)
    result: dict = {
        "steps": rows[-1]["step"],
        "after_warm_up_from": selected[0]["step"],
        "series": {},
    }
    for name in SERIES:
        values = [row[name] for row in selected]
        per_step, low, high = slope(steps, values)
        result["series"][name] = {
            "first_tenth": float(np.mean(values[:tenth])),
            "last_tenth": float(np.mean(values[-tenth:])),
            "largest": max(values),
            "per_1000_steps": [1000 * value for value in (per_step, low, high)],
        }
    series = result["series"]
    result["flat"] = {
        name: series[name]["per_1000_steps"][2] < MEMORY_LIMIT for name in ("rss", "rss_children")
    }
    for name in ("handles", "threads", "children"):
        third = len(selected) // 3
        result["flat"][name] = max(r[name] for r in selected[-third:]) <= max(
            r[name] for r in selected[:third]
        )
    cpu = series["cpu_per_step"]
    result["flat"]["cpu_per_step"] = cpu["last_tenth"] < TIME_LIMIT * cpu["first_tenth"]
    return result


def slope(
    x: Sequence[float], y: Sequence[float], resamples: int = 5000
) -> tuple[float, float, float]:
    """The least-squares slope, and its 95 % interval by a circular block bootstrap of residuals."""
    values = np.asarray(y, float)
    centred = np.asarray(x, float) - np.mean(np.asarray(x, float))
    weights = centred / (centred @ centred)
    estimate = weights @ values
    residuals = values - values.mean() - estimate * centred
    block = math.ceil(len(y) ** (1 / 2))
    starts = np.random.default_rng(0).integers(len(y), size=(resamples, -(-len(y) // block)))
    places = (starts[:, :, None] + np.arange(block)) % len(y)
    resampled = residuals[places.reshape(resamples, -1)[:, : len(y)]] @ weights
    low, high = np.percentile(resampled, [2.5, 97.5])
    return float(estimate), float(estimate + low), float(estimate + high)


def draw(rows: Sequence[Mapping], path: Path) -> None:
    """The series against the optimizer step: a PNG, and the rows as a CSV beside it."""
    panels = {
        "resident memory, MiB more than after the warm-up": ("rss", "rss_children"),
        "open files, threads, child processes": ("handles", "threads", "children"),
        "seconds of CPU for a step": ("cpu_per_step",),
        "run folder without checkpoints (MiB); checkpoints": ("folder", "checkpoints"),
    }
    figure, axes = new_figure(len(panels))
    steps = [row["step"] for row in rows]
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        memory = "rss" in names
        styles = line_styles(names)
        for name in names:
            start = rows[len(rows) // 10][name] if memory else 0.0
            axis.plot(
                steps,
                [row[name] - start for row in rows],
                color=styles[name]["color"],
                label=name,
            )
        axis.set(title=title, xlabel="optimizer step", ylim=(-20, 20) if memory else (0, None))
        axis.legend(frameon=False, fontsize=8)
    note = (
        "embedded task, 2 prompts x 4 completions a step, read from /proc by another process; "
        "each point a window of steps"
    )
    figure.supxlabel(note, fontsize=8, color="#555555")
    write_table(path.with_suffix(".csv"), rows)
    figure.savefig(path, dpi=130)


def summary(result: Mapping) -> str:
    lines = [f"{result['steps']} steps; slopes from step {result['after_warm_up_from']} on"]
    for name, series in result["series"].items():
        middle, low, high = series["per_1000_steps"]
        verdict = {True: "flat", False: "NOT FLAT", None: ""}[result["flat"].get(name)]
        lines.append(
            f"  {name:<15} first tenth {series['first_tenth']:9.3f}  last "
            f"{series['last_tenth']:9.3f}  per 1,000 steps {middle:+.4f} "
            f"[{low:+.4f}, {high:+.4f}]  {verdict}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/soak"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=5000, help="optimizer steps (default: %(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=25, help="steps of a row (default: %(default)s)"
    )
    parser.add_argument("--hours", type=float, default=2.0, help="at most (default: %(default)s)")
    parser.add_argument(
        "--report", action="store_true", help="of a run that is there, or still running"
    )
    options = parser.parse_args(arguments)
    if not options.report:
        watch(options.out, options.steps, options.window, options.hours)
    with (options.out / "series.csv").open(newline="") as file:
        rows = [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]
    begun = json.loads((options.out / "run" / "run.json").read_text(encoding="utf-8"))
    result = report(rows) | {"settings": list(SETTINGS), "environment": begun["environment"]}
    write_json(options.out / "soak.json", result)
    draw(rows, options.out / "soak.png")
    print(summary(result))
    return 0 if all(result["flat"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
