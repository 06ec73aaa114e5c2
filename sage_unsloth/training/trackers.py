"""Trackers: a run's metrics under their own names, and its completions as a table.

None of them needs a network or an account: TensorBoard and trackio write files, and W&B is offline
unless you set `WANDB_MODE` yourself.
"""

import contextlib
import hashlib
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sage_unsloth.runs.files import read_jsonl
from sage_unsloth.runs.record import read_record
from sage_unsloth.runs.text import markdown
from sage_unsloth.training.rows import METRICS, numbers

COMPLETIONS = "completions"
"""The name of the table."""
REMOTE = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_BUCKET_ID")
"""What would have trackio send a run away while it trains."""

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Where metrics and completions go.

    Attributes:
        begins_anew: whether a run that resumes must be told its earlier steps again.
    """

    begins_anew: bool

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """The metrics of one optimizer step."""
        ...

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """The completions that were sampled from this step's batch."""
        ...

    def close(self) -> None:
        """Nothing more comes."""
        ...


class TensorBoard:
    """Event files in `RUN/tensorboard`.

    Args:
        folder: of the run.
        first: the next step; what an earlier start of the run logged from there on is hidden.
    """

    begins_anew = False

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """A scalar for each metric."""
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of text."""
        columns = list(rows[0])
        lines = [columns, ["---"] * len(columns)]
        lines += [[_cell(row.get(name, "")) for name in columns] for row in rows]
        text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        self.writer.add_text(COMPLETIONS, text, step)

    def close(self) -> None:
        """Writes what is not on the disk yet."""
        self.writer.close()


class Wandb:
    """A run of Weights & Biases in `RUN/wandb`, offline unless `WANDB_MODE` is set; a run that
    resumes has the same id, so `wandb sync` makes one of its parts.
    """

    begins_anew = False

    def __init__(self, folder: Path, first: int) -> None:
        wandb: Any = importlib.import_module("wandb")
        os.environ.setdefault("WANDB_MODE", "offline")
        record = read_record(folder) or {}
        name = hashlib.sha256(f"{folder.name} {record['environment']['date']}".encode()).hexdigest()
        self.table = wandb.Table
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "sage_unsloth"),
            name=folder.name,
            id=name[:12],
            mode=os.environ["WANDB_MODE"],
            resume="allow" if os.environ["WANDB_MODE"] == "online" else None,
            dir=str(folder),
            config=record["settings"],
            settings=wandb.Settings(console="off", silent=True),
        )

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """A row of the history."""
        self.run.log(dict(row), step=step)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table beside the step's metrics."""
        columns = list(rows[0])
        data = [[row.get(name) for name in columns] for row in rows]
        self.run.log({COMPLETIONS: self.table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Ends the run, and its process."""
        self.run.finish()


class Trackio:
    """trackio's database in `RUN/trackio`, by a process of its own (`trackio_writer`).

    trackio keeps every row of a step, so a run that resumes writes its database anew.
    """

    begins_anew = True

    def __init__(self, folder: Path, first: int) -> None:
        database = folder / "trackio"
        shutil.rmtree(database, ignore_errors=True)
        database.mkdir()
        selected = {name: value for name, value in os.environ.items() if name not in REMOTE}
        self.log, self.ended = database / "writer.log", False
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sage_unsloth.training.trackio_writer"),
                    *(os.environ.get("TRACKIO_PROJECT", "sage_unsloth"), folder.name),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=selected
                | {
                    "TRACKIO_DIR": str(database.absolute()),
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONPATH": os.pathsep.join(sys.path),
                },
                start_new_session=True,  # Ctrl-C is for the run, which closes it
            )
        self._tell((read_record(folder) or {})["settings"])
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            self.process.wait()
            raise ValueError(
                f"trackio did not start, and {self.log} says: "
                f"{self.log.read_text(errors='replace').strip()[-300:]}. Fix it, or set "
                "report_to=none"
            )

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        """The values of a step."""
        self._tell({"step": step, "metrics": dict(row)})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the step."""
        columns = list(rows[0])
        data = [[row.get(name) for name in columns] for row in rows]
        self._tell({"step": step, "table": COMPLETIONS, "columns": columns, "data": data})

    def close(self) -> None:
        """Waits until everything is on the disk."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.__exit__(None, None, None)

    def _tell(self, given: Mapping[str, Any]) -> None:
        """Passes a line on. Where trackio has ended, training goes on without it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(given) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            if not self.ended:
                logger.warning(
                    "trackio has ended. %s says why, and %s has the rest", self.log, METRICS
                )
            self.ended = True


OPENED: dict[str, Callable[[Path, int], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}
"""The name for `report_to` -> the tracker."""


class Tracked:
    """The callback that feeds a tracker from the rows that a run writes.

    Args:
        report_to: one of `OPENED`.
        folder: of the run.
        samples: the file of its completions.
    """

    def __init__(self, report_to: str, folder: Path, samples: Path) -> None:
        self.report_to, self.folder, self.samples = report_to, folder, samples
        self.tracker: Tracker | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):  # the trainer's other events, in any version of transformers
            return lambda *args, **kwargs: None
        raise AttributeError(name)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open the tracker, in the first process."""
        if state.is_world_process_zero:
            first = state.global_step + 1 if state.global_step else 0
            self.tracker = OPENED[self.report_to](self.folder, first)
            if first and self.tracker.begins_anew:
                for row in read_jsonl(self.folder / METRICS):
                    self._pass_on(row)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Pass on a row that has its step: `step_log` has put the run's own metrics into it."""
        if logs and "step" in logs:
            self._pass_on(logs)

    def _pass_on(self, logs: Mapping[str, Any]) -> None:
        if self.tracker is None:
            return
        step = int(logs["step"])
        row = {k: v for k, v in numbers(logs).items() if isinstance(v, float) and k != "step"}
        self.tracker.metrics(step, row)
        rows = read_jsonl(self.samples) if self.samples.exists() else []
        rows = [
            {k: v for k, v in row.items() if k != "step"} for row in rows if row["step"] == step
        ]
        if rows:
            self.tracker.completions(step, rows)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the tracker."""
        if self.tracker is not None:
            self.tracker.close()
            self.tracker = None


def _cell(value: Any) -> str:
    """What a model wrote, in one cell of a Markdown table."""
    return markdown(str(value))
