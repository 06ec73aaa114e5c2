"""Trackers: a run's metrics under their own names, and its completions as a table.

TensorBoard and Weights & Biases are fed from here; trackio by transformers' own callback, which
puts `train/` before each name. None of them needs a network or an account: TensorBoard and trackio
write files, and W&B is offline unless you set `WANDB_MODE` yourself.
"""

import hashlib
import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sage_unsloth.runs.files import read_json, read_jsonl
from sage_unsloth.runs.text import markdown
from sage_unsloth.training.rows import numbers

COMPLETIONS = "completions"
"""The name of the table."""


class Tracker(Protocol):
    """Where metrics and completions go."""

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

    def __init__(self, folder: Path) -> None:
        wandb: Any = importlib.import_module("wandb")
        os.environ.setdefault("WANDB_MODE", "offline")
        record = read_json(folder / "run.json")
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


class Tracked:
    """The callback that feeds a tracker from the rows that a run writes.

    Args:
        report_to: "tensorboard" or "wandb".
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
            wandb = self.report_to == "wandb"
            self.tracker = Wandb(self.folder) if wandb else TensorBoard(self.folder, first)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Pass on a row that has its step: `step_log` has put the run's own metrics into it."""
        if self.tracker is None or not logs or "step" not in logs:
            return
        step = int(logs["step"])
        row = {k: v for k, v in numbers(logs).items() if isinstance(v, float) and k != "step"}
        self.tracker.metrics(step, row)
        rows = read_jsonl(self.samples) if self.samples.exists() else []
        rows = [
            {k: v for k, v in one.items() if k != "step"} for one in rows if one["step"] == step
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
