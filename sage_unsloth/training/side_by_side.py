"""Several RL runs from one model beside each other, each in a process of its own.

A run there ends as it would alone, to the last bit: each has one thread, random numbers of its own
and a folder of its own (`tests/test_quickstart.py`).
"""

import contextlib
import json
import logging
import os
import pickle
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.runs.children import available_memory, end_children, start_child
from sage_unsloth.runs.files import read_json
from sage_unsloth.runs.progress import progress
from sage_unsloth.training.rows import METRICS

if TYPE_CHECKING:
    from sage_unsloth.training.rlvr_config import RlvrConfig

WORKER = "sage_unsloth.training.side_by_side_worker"
MEMORY = 2 * 2**30
"""Bytes that a run of the embedded model takes at most: 1.6 GB measured."""
SAID, ENDED = "said.txt", "ended.json"
"""What a process logs, and its outcome."""

logger = logging.getLogger(__name__)


class SideBySideError(RuntimeError):
    """A run failed; the others have saved their steps."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of `rlvr`; everything in it goes to another process.

    Attributes:
        name: of the run.
        config: its settings.
        arguments: the others of `rlvr`, by name.
    """

    name: str
    config: "RlvrConfig"
    arguments: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        return Path(self.arguments["folder"])

    @property
    def is_complete(self) -> bool:
        result = "model" if self.config.full_finetuning else "adapter"
        return (self.folder / result).is_dir()


def processes_for(jobs: Sequence[Job], wanted: int | None, *, long: bool) -> tuple[int, str]:
    """How many of the runs go beside each other, and why no more.

    Args:
        jobs: that are not complete.
        wanted: processes; None for as many as cores and memory allow.
        long: whether a run takes longer than a further process takes to start.

    Raises:
        ValueError: fewer than one, or several on one GPU.
    """
    if wanted is not None and wanted < 1:
        raise ValueError(f"processes must be >= 1; got {wanted}; give 1 for one run at a time")
    if has_gpu():
        if wanted not in (None, 1):
            raise ValueError(
                f"runs side by side need a core each, and here all would share the GPU; got "
                f"{wanted} processes; give 1, or hide the GPU (CUDA_VISIBLE_DEVICES=)"
            )
        return 1, "they share the GPU"
    if len(jobs) < 2:
        return 1, "one run is left"
    if stays := [job.name for job in jobs if not _can_travel(job)]:
        return 1, f"the guide of {', '.join(stays)} cannot be sent to another process"
    if wanted is not None:
        return min(wanted, len(jobs)), "as asked for"
    if not long:
        return 1, "a further process would take longer to start than a run takes"
    cores, memory = len(os.sched_getaffinity(0)), available_memory()
    room = len(jobs) if memory is None else memory // MEMORY
    count = max(1, min(len(jobs), cores, room))
    if count == len(jobs):
        return count, "a core for each"
    gib = "" if memory is None else f", {memory / 2**30:.1f} GiB of memory free"
    return count, f"{cores} core{'s' * (cores != 1)}{gib}, a run takes {MEMORY // 2**30} GiB"


def _can_travel(job: Job) -> bool:
    """Whether another process can read it: a guide of a notebook or a script is there alone."""
    if type(job.arguments.get("guide")).__module__ == "__main__":
        return False
    try:
        pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


def train_side_by_side(jobs: Sequence[Job], count: int, folder: Path) -> dict[str, float]:
    """Trains the jobs in `count` processes at a time; the seconds of each, by name.

    A signal is passed on: each run finishes its step, saves it, and is resumed by the next call.

    Args:
        jobs: in the order in which they begin.
        count: processes.
        folder: for what the processes leave while they run; deleted at the end, kept after an
            error.

    Raises:
        SideBySideError: a run failed, with its name and message; the others were ended like by a
            signal.
    """
    waiting, running, seconds = list(jobs), list[_Child](), dict[str, float]()
    with contextlib.ExitStack() as bars:
        try:
            while waiting or running:
                while waiting and len(running) < count:
                    job = waiting.pop(0)
                    running.append(bars.enter_context(_Child(job, folder)))
                time.sleep(0.2)
                for child in running:
                    child.show()
                for child in [one for one in running if one.process.poll() is not None]:
                    seconds[child.job.name] = child.result()
                    running.remove(child)
        except BaseException:
            end_children([child.process for child in running])
            raise
    shutil.rmtree(folder, ignore_errors=True)
    return seconds


@dataclass
class _Child:
    """A process with a job, its bar, and what it says."""

    job: Job
    folder: Path
    process: subprocess.Popen = field(init=False)

    def __enter__(self) -> "_Child":
        name = self.job.name
        own = self.folder / name.lower()
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir(parents=True)
        self.own, self.log = own, own / "log.txt"
        self.process = start_child([WORKER, str(own)], self.log, own / "compiled")
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(self.job, self.process.stdin)
            self.process.stdin.flush()
        self._said, self._row = 0, self._last_row()
        total, done = self.job.config.max_steps, self._row.get("step", 0)
        self.bar = progress(total=total, initial=done, desc=name, unit="step")
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
        self.process.__exit__(None, None, None)

    def show(self) -> None:
        """The steps that are on the disk, and the lines that the process has written."""
        row = self._last_row()
        if row != self._row:
            self._row, self.bar.n = row, row.get("step", 0)
            if "reward" in row:
                self.bar.set_postfix_str(f"reward {row['reward']:.3f}", refresh=False)
            self.bar.refresh()
        said = self.own / SAID
        data = said.read_bytes()[self._said :] if said.exists() else b""
        data = data[: data.rfind(b"\n") + 1]
        self._said += len(data)
        for line in data.decode(errors="replace").splitlines():
            logger.info("%s: %s", self.job.name, line.removeprefix(f"{self.job.name}: "))

    def _last_row(self) -> dict[str, Any]:
        """Of the run's metrics, as far as it is written."""
        with contextlib.suppress(OSError):
            for line in reversed((self.job.folder / METRICS).read_bytes().splitlines()):
                with contextlib.suppress(ValueError):
                    return json.loads(line)
        return {}

    def result(self) -> float:
        """Seconds of a process that has ended.

        Raises:
            SideBySideError: it failed.
        """
        self.show()
        ended = self.own / ENDED
        found = read_json(ended) if ended.is_file() else {}
        if self.process.returncode == 0 and "seconds" in found:
            return found["seconds"]
        told = found.get("error") or "\n".join(
            self.log.read_text(errors="replace").replace("\r", "\n").strip().splitlines()[-8:]
        )
        raise SideBySideError(
            f"{self.job.name} stopped: {told or 'its process was killed'} (exit code "
            f"{self.process.returncode}, log {self.log}); the other runs have saved their last "
            "step, and the same command resumes"
        )
