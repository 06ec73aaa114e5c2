"""Runs several RL runs at a time, each in its own process, for the quickstart and studies.

Each run ends bit-identical to a run by itself: it has its own threads, random numbers and folder
(`tests/test_quickstart.py`).
"""

import contextlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.runs.children import available_memory, end_children, start_child
from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.progress import progress
from sage_unsloth.training.rows import METRICS

WORKER = "sage_unsloth.training.side_by_side_worker"
MEMORY = 2 * 2**30
"""Upper bound for a run of the embedded model, bytes; 1.6 GB was measured."""
LOG_FILE, RESULT_FILE = "said.txt", "ended.json"
"""Log of a process, and its outcome."""
COMPLETION = "completion"

logger = logging.getLogger(__name__)


class SideBySideError(RuntimeError):
    """A run failed; the others have saved their steps."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of a function in another process, to which everything here is sent.

    Attributes:
        work: "module:function", imported there once the libraries are loaded.
        arguments: of the function, by name.
        folder: of the run; its metrics show the progress.
        result: exists once the run is complete.
        max_steps: optimizer steps; 0 for work without training.
        samples: folders of the evaluation that follows, whose records show the progress.
        num_completions: of this evaluation.
        backend: as `RlvrConfig.backend`.
        is_small: the model is so small that a second thread would only wait.
    """

    name: str
    work: str
    arguments: Mapping[str, Any]
    folder: Path
    result: Path
    max_steps: int
    samples: tuple[Path, ...] = ()
    num_completions: int = 0
    backend: str | None = None
    is_small: bool = True

    @property
    def is_complete(self) -> bool:
        return self.result.exists()


def choose_processes(
    jobs: Sequence[Job], processes: int | None, *, long: bool, memory: int = MEMORY
) -> tuple[int, str]:
    """How many runs go side by side, and why not more.

    Args:
        processes: None for as many as cores and memory allow.
        long: whether a run takes longer than starting a process.
        memory: bytes that a run takes at most.

    Raises:
        ValueError: fewer than one, or several on one GPU.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be >= 1, got {processes}. Give 1 for one run at a time")
    # Two runs on one GPU would compete for its memory, and neither plan would hold.
    if has_gpu():
        if processes not in (None, 1):
            raise ValueError(
                f"runs side by side would share the GPU, got {processes} processes. Give 1, or "
                "hide the GPU (CUDA_VISIBLE_DEVICES=)"
            )
        return 1, "they share the GPU"
    if len(jobs) < 2:
        return 1, "one run is left"
    if stays := [job.name for job in jobs if not _can_travel(job)]:
        return 1, f"the guide of {', '.join(stays)} cannot be sent to another process"
    if processes is not None:
        return min(processes, len(jobs)), "as requested"
    if not long:
        return 1, "a further process would take longer to start than a run takes"
    # Not cpu_count: a container may have fewer than the machine.
    cores, free = len(os.sched_getaffinity(0)), available_memory()
    # If the free memory is unknown, only cores limit.
    room = len(jobs) if free is None else free // memory
    count = max(1, min(len(jobs), cores, room))
    if count == len(jobs):
        return count, "a core for each"
    gib = "" if free is None else f", {free / 2**30:.1f} GiB of memory free"
    needed = f"{memory / 2**30:.0f} GiB"
    return count, f"{cores} core{'s' * (cores != 1)}{gib}, a run takes {needed}"


def _can_travel(job: Job) -> bool:
    """Whether a job can be sent to another process; a guide of a notebook cannot."""
    # It would pickle, but the child could not import its class.
    if type(job.arguments.get("guide")).__module__ == "__main__":
        return False
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def run_side_by_side(
    jobs: Sequence[Job],
    count: int,
    folder: Path,
    *,
    threads: int = 1,
    ended: Callable[[Job, float], object] = lambda job, seconds: None,
) -> dict[str, float]:
    """Runs the jobs in `count` processes at a time; the seconds of each, by name.

    A signal is passed on: each run finishes and saves its step, and the next call resumes it.

    Args:
        jobs: in the order in which they start.
        folder: for files of running processes; deleted at the end, kept after an error.
        ended: called with each finished job and its seconds.

    Raises:
        SideBySideError: a run failed, with its name and message; the others were stopped as by a
            signal.
    """
    waiting, running, seconds = list(jobs), list[_Child](), dict[str, float]()
    with contextlib.ExitStack() as bars:
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    job = waiting.pop(0)
                    running.append(bars.enter_context(_Child(job, folder, threads)))
                # A step takes seconds; looking more often would take time from the runs.
                time.sleep(0.2)
                for child in running:
                    child.show()
                for child in [item for item in running if item.process.poll() is not None]:
                    seconds[child.job.name] = child.result()
                    running.remove(child)
                    ended(child.job, seconds[child.job.name])
        except BaseException:
            # The others get the chance to save their step.
            end_children([child.process for child in running])
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return seconds


def show_step(bar: Any, step: int) -> None:
    """Moves a bar of tqdm to a step; back if the run resumed from an earlier checkpoint."""
    if step < bar.n:
        # The pace is counted from here, or it would be negative.
        bar.reset()
        bar.initial = step
    bar.n = step
    bar.refresh()


@dataclass
class _Child:
    """A process with a job, its bar and its log."""

    job: Job
    folder: Path
    threads: int
    process: subprocess.Popen = field(init=False)

    def __enter__(self) -> "_Child":
        name = self.job.name
        own = self.folder / name.lower()
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        self.own, self.log = own, own / "log.txt"
        self.process = start_child(
            [WORKER, str(own)], self.log, own / "compiled", threads=self.threads
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            # By its input and not a file: a job may hold rows of the user's.
            pickle.dump(self.job, self.process.stdin)
            self.process.stdin.flush()
        self._said, self._row = 0, self._last_row()
        self._counted = dict[Path, tuple[int, int]]()
        self._evaluates = False
        total, done = self.job.max_steps, self._row.get("step", 0)
        self.bar = progress(total=total, initial=done, desc=name, unit="step")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
        self.process.__exit__(None, None, None)

    def show(self) -> None:
        """Updates the bar and passes on new lines of the log."""
        row = self._last_row()
        if row != self._row:
            self._row = row
            if "reward" in row:
                self.bar.set_postfix_str(f"reward {row['reward']:.3f}", refresh=False)
            show_step(self.bar, row.get("step", 0))
        if self.job.num_completions and row.get("step", 0) >= self.job.max_steps:
            self._show_completions()
        said = self.own / LOG_FILE
        data = said.read_bytes()[self._said :] if said.exists() else b""
        # The last line may be half written.
        data = data[: data.rfind(b"\n") + 1]
        self._said += len(data)
        for line in data.decode(errors="replace").splitlines():
            logger.info("%s: %s", self.job.name, line.removeprefix(f"{self.job.name}: "))

    def _show_completions(self) -> None:
        """The bar of the evaluation, which begins with its first completion on disk."""
        count = self._count_completions()
        if count and not self._evaluates:
            self._evaluates = True
            self.bar.close()
            name, total = f"{self.job.name}, evaluation", self.job.num_completions
            self.bar = progress(total=total, initial=count, desc=name, unit=COMPLETION)
        elif count > self.bar.n:
            self.bar.update(count - self.bar.n)

    def _count_completions(self) -> int:
        """Lines of all record files; only what is new is read."""
        for path in (file for folder in self.job.samples for file in folder.rglob("*.jsonl")):
            read, lines = self._counted.get(path, (0, 0))
            with contextlib.suppress(OSError), path.open("rb") as stream:
                stream.seek(read)
                new = stream.read()
                self._counted[path] = read + len(new), lines + new.count(b"\n")
        return sum(lines for _, lines in self._counted.values())

    def _last_row(self) -> dict[str, Any]:
        """The last row of the run's metrics that is on disk."""
        with contextlib.suppress(OSError):
            # The last line may be half written, then the one before it is shown.
            for line in reversed((self.job.folder / METRICS).read_bytes().splitlines()):
                with contextlib.suppress(ValueError):
                    return json.loads(line)
        return {}

    def result(self) -> float:
        """Seconds of an ended process; SideBySideError if it failed."""
        self.show()
        ended = self.own / RESULT_FILE
        matches = read_json(ended) if ended.is_file() else {}
        if self.process.returncode == 0 and "seconds" in matches:
            return matches["seconds"]
        given = matches.get("error") or "\n".join(
            self.log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()[-8:]
        )
        raise SideBySideError(
            f"{self.job.name} stopped: {given or 'its process was killed'} (exit code "
            f"{self.process.returncode}, log {self.log}). The other runs have saved their last "
            "step, and the same command resumes"
        )
