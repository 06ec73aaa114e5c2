"""What both training stages share: the settings that are recorded, rows, and the training loop."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sage_unsloth.models.device import has_gpu
from sage_unsloth.models.weights import model_identity
from sage_unsloth.problems.sources import check_columns
from sage_unsloth.runs.checkpoints import keeper, step_of
from sage_unsloth.runs.files import append_jsonl, read_jsonl
from sage_unsloth.runs.processes import (
    LONGEST_WAIT,
    rank,
    read_numbered_cpus,
    sharding,
    world_size,
)
from sage_unsloth.runs.settings import names_where
from sage_unsloth.runs.stopping import finishing
from sage_unsloth.trainers.backends import TRL, backend
from sage_unsloth.training.number_formats import precision_arguments
from sage_unsloth.training.rows import METRICS

if TYPE_CHECKING:
    from sage_unsloth.training.held_out import HeldOut

COMPLETIONS = "completions.jsonl"
REPLACED = ".replaced.jsonl"
"""Ends the name of a file of rows whose steps were trained again."""
TRACKERS = ("none", "tensorboard", "wandb", "trackio")

logger = logging.getLogger(__name__)


def run_settings(
    stage: str, config: Any, model_path: str | Path, rows: Sequence[dict]
) -> dict[str, Any]:
    """What must be equal for a stage to resume in a folder: config, model, rows by a digest of
    their content, and the number of processes.

    Raises:
        ValueError: SFT, started as one of several processes.
    """
    if stage == "sft" and world_size() > 1:
        raise ValueError(
            f"SFT runs in one process; got WORLD_SIZE={world_size()}; start it without torchrun "
            "(RL supports several)"
        )
    free = names_where(type(config), "free")
    settings = {key: value for key, value in asdict(config).items() if key not in free}
    model = f"{Path(model_path).name} {model_identity(model_path)['weights']}"
    if world_size() > 1:  # each process draws from a random stream of its own
        settings["processes"] = world_size()
    if (kind := sharding()) is not None:  # its checkpoints are of its own form
        settings["sharded_by"] = kind
    return {"stage": stage, "model": model, "rows": digest_of(rows)} | settings


def digest_of(rows: Sequence[dict]) -> str:
    """Of the content of rows."""
    text = json.dumps([dict(row) for row in rows], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known_settings(
    stage: str, config: Any, model_path: str | Path, **others: Any
) -> dict[str, Any]:
    """`run_settings` without what is decided later: by the rows, the tokenizer, the engine."""
    settings, later = run_settings(stage, config, model_path, ()), ("rows", "template", "rollouts")
    return {name: value for name, value in settings.items() if name not in later} | others


def check_rows(rows: Sequence[dict], columns: Sequence[str]) -> None:
    """There must be rows, each with a non-empty text in each column.

    Raises:
        ValueError: naming the row, the column, and what the row has instead.
    """
    if not rows:
        raise ValueError("training needs at least one row; got none")
    check_columns(rows, columns)


def read_metrics(folder: str | Path, first: int = 1) -> list[dict]:
    """The rows of a run's `metrics.jsonl`, one per optimizer step; of a repeated step the last.

    An evaluation that was made when the run resumed has a line of its own; its values go to the row
    of its step.

    Args:
        folder: of the run.
        first: the first step; 0 also gives the held-out evaluation before training, as the row of
            step 0.
    """
    rows: dict[int, dict] = {}
    for row in read_jsonl(Path(folder) / METRICS):
        trained = "seconds" in row
        rows[row["step"]] = row if trained else rows.get(row["step"], {}) | row
    return [rows[step] for step in sorted(rows) if step >= first]


def set_aside_after(path: Path, resume: Path | None) -> None:
    """Move a file's rows of steps after the checkpoint `resume` (None: all rows) to
    `<name>.replaced.jsonl` beside it, because these steps are trained again; and log it.
    """
    if not path.exists():
        return
    rows, last = read_jsonl(path), -1 if resume is None else step_of(resume)
    selected = next((i for i, row in enumerate(rows) if row["step"] > last), None)
    if selected is None:
        return
    aside = path.with_name(f"{path.stem}{REPLACED}")
    append_jsonl(aside, rows[selected:])
    with path.open("rb+") as file:
        file.truncate(sum(len(file.readline()) for _ in range(selected)))
    logger.warning(
        "Training resumes after step %d, so steps %d to %d are trained again; their old rows of "
        "%s are now in %s.",
        max(last, 0),
        rows[selected]["step"],
        rows[-1]["step"],
        path.name,
        aside,
    )


def check_tracker(report_to: str) -> None:
    """Raises ValueError if `report_to` is not one of `TRACKERS`, or is not installed."""
    import importlib.util

    if report_to not in TRACKERS:
        raise ValueError(f"report_to must be one of {', '.join(TRACKERS)}; got {report_to!r}")
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        raise ValueError(
            f"report_to={report_to!r} needs that package; it is not installed; pip install "
            f"{report_to}, or leave it out: every metric is in {METRICS} anyway"
        )


def tracker_callbacks(report_to: str, folder: Path) -> list[Any]:
    """transformers' own callback of a tracker. W&B is offline unless `WANDB_MODE` is set."""
    if report_to == "none":
        return []
    from transformers.integrations import get_reporting_integration_callbacks

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "tensorboard")
    for name, value in {"WANDB_MODE": "offline", "WANDB_PROJECT": "sage_unsloth"}.items():
        os.environ.setdefault(name, value)
    return [callback() for callback in get_reporting_integration_callbacks([report_to])]


def common_arguments(
    folder: Path, save_steps: int, precision: str = "auto", optim: str = "auto"
) -> dict[str, Any]:
    """Arguments that the trainers of both stages share."""
    usual = "adamw_8bit" if has_gpu() and backend() != TRL else "adamw_torch"
    arguments = {
        "output_dir": str(folder / "checkpoints"),
        "logging_steps": 1,
        "report_to": "none",  # `tracker_callbacks` adds them behind the step's own metrics
        "run_name": folder.name,
        "save_strategy": "steps",
        "save_steps": save_steps,
        "save_total_limit": None,  # `checkpoints.keep_newest` deletes
        "optim": usual if optim == "auto" else optim,
        "use_cpu": not has_gpu(),
        "disable_tqdm": True,
        "gradient_checkpointing": False,  # on a GPU Unsloth's own is in the model
        "dataloader_pin_memory": has_gpu(),
        "ddp_timeout": int(LONGEST_WAIT.total_seconds()),
    }
    arguments |= precision_arguments(precision)
    if backend() != TRL:
        return arguments
    from sage_unsloth.training.by_trl import common_trl_arguments  # which imports torch

    return arguments | common_trl_arguments()


def train(trainer: Any, folder: Path, name: str, *, resume: Path | None, **logging: Any) -> None:
    """Run `trainer.train()` inside `log_steps`, whose arguments these are."""
    with log_steps(trainer, folder, name, resume=resume, **logging):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))


@contextmanager
def log_steps(
    trainer: Any,
    folder: Path,
    name: str,
    *,
    resume: Path | None,
    callbacks: Sequence[Any] = (),
    held_out: "HeldOut | None" = None,
    report_to: str = "none",
    extra: Callable[[int, dict], dict] = lambda step, logs: {},
) -> Iterator[None]:
    """Within this context `trainer.train()` has every step's metrics on disk before the next step.

    SIGTERM, SIGHUP and Ctrl-C end it after the step in flight, with a checkpoint
    (`stopping.finishing`). Of several processes the first writes, and all end once one of them is
    asked to.

    Args:
        trainer: of either stage.
        folder: gets `metrics.jsonl`.
        name: on the progress bar.
        resume: checkpoint that training resumes from.
        callbacks: the caller's own, told of each step once its row is on disk.
        held_out: evaluates between the steps, and may end the run before its last one.
        report_to: a tracker, one of `TRACKERS`.
        extra: called with the step and the trainer's metrics before they are written, in every
            process; what it returns is written beside them.

    Raises:
        ValueError: the trainer ended before the last step.
        KeyboardInterrupt: Ctrl-C was pressed; the message says what is saved.
        Terminated: the same by SIGTERM or SIGHUP.
    """
    from transformers import PrinterCallback, ProgressCallback

    from sage_unsloth.training.loss_scale import scale_losses, with_loss_scale
    from sage_unsloth.training.step_log import EvaluatesFirst, NothingLeftError, StepLog

    if resume is not None and world_size() > 1 and not has_gpu():
        read_numbered_cpus()
    scale_losses(trainer)
    extra = with_loss_scale(trainer, extra)
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    if rank() == 0:
        set_aside_after(folder / METRICS, resume)
    with finishing("the optimizer step in flight") as stop:
        log = StepLog(folder / METRICS, name, stop, extra, held_out)
        trainer.callback_handler.callbacks.insert(0, log)  # before the trackers'
        for callback in (keeper(), *tracker_callbacks(report_to, folder), *callbacks):
            trainer.add_callback(callback)
        if held_out is not None:
            trainer.add_callback(EvaluatesFirst(log, held_out, trainer))
        with suppress(NothingLeftError):
            yield
        # A process that was asked while the last checkpoint was written must not leave the others
        # waiting.
        log.agree()
    if held_out is not None and (reason := held_out.reason_to_end):
        logger.info(
            "%s ends after step %d of %d: %s.",
            name,
            trainer.state.global_step,
            trainer.state.max_steps,
            reason,
        )
    elif trainer.state.global_step < trainer.state.max_steps:
        raise ValueError(
            f"training must take all its {trainer.state.max_steps} steps; the trainer ended after "
            f"{trainer.state.global_step}, with {len(trainer.train_dataset)} rows to train on; "
            "give more rows, or fewer in a step"
        )
