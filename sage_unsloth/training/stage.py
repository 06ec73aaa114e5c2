"""Shared by both stages: recorded settings, rows and the training loop."""

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
from sage_unsloth.runs.checkpoints import checkpoint_step, keeper
from sage_unsloth.runs.files import append_jsonl, read_jsonl
from sage_unsloth.runs.processes import (
    LONGEST_WAIT,
    rank,
    read_numbered_cpus,
    sharding,
    world_size,
)
from sage_unsloth.runs.settings import names_where
from sage_unsloth.runs.stopping import finish_step
from sage_unsloth.trainers.backends import TRL, backend
from sage_unsloth.training.number_formats import precision_arguments
from sage_unsloth.training.rows import METRICS

if TYPE_CHECKING:
    from sage_unsloth.training.held_out import HeldOut

COMPLETIONS = "completions.jsonl"
REPLACED = ".replaced.jsonl"
"""Suffix of a file with old rows of steps that were trained again."""
TRACKERS = ("none", "tensorboard", "wandb", "trackio")

logger = logging.getLogger(__name__)


def run_settings(
    stage: str, config: Any, model_path: str | Path, rows: Sequence[dict]
) -> dict[str, Any]:
    """The settings that must be equal to resume: config, model, digest of the rows, processes.

    Raises:
        ValueError: SFT in several processes.
    """
    if stage == "sft" and world_size() > 1:
        raise ValueError(
            f"SFT runs in one process, got WORLD_SIZE={world_size()}. Start it without torchrun "
            "(RL supports several)"
        )
    free = names_where(type(config), "free")
    settings = {key: value for key, value in asdict(config).items() if key not in free}
    model = f"{Path(model_path).name} {model_identity(model_path)['weights']}"
    # Each process has its own random stream, so their number changes what is sampled.
    if world_size() > 1:
        settings["processes"] = world_size()
    # Sharded checkpoints have another form.
    if (kind := sharding()) is not None:
        settings["sharded_by"] = kind
    return {"stage": stage, "model": model, "rows": rows_digest(rows)} | settings


def rows_digest(rows: Sequence[dict]) -> str:
    text = json.dumps([dict(row) for row in rows], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def known_settings(
    stage: str, config: Any, model_path: str | Path, **others: Any
) -> dict[str, Any]:
    """`run_settings` without what rows, tokenizer and engine decide later.

    A teacher is recorded by its weights, which `Ledger.begin` compares.
    """
    settings = run_settings(stage, config, model_path, ())
    later = ("rows", "template", "rollouts", "teacher")
    return {name: value for name, value in settings.items() if name not in later} | others


def check_rows(rows: Sequence[dict], columns: Sequence[str]) -> None:
    """Raises ValueError without rows, or for a row without a non-empty text in each column."""
    if not rows:
        raise ValueError("training needs at least one row, got none")
    check_columns(rows, columns)


def read_metrics(folder: str | Path, first: int = 1) -> list[dict]:
    """The rows of a run's `metrics.jsonl`, one per optimizer step; the last one of a repeated step.

    An evaluation made on resuming has its own line; its values are added to the row of its step.

    Args:
        first: the first step; 0 includes the held-out evaluation before training, as step 0.
    """
    rows: dict[int, dict] = {}
    for row in read_jsonl(Path(folder) / METRICS):
        trained = "seconds" in row
        # Only a training step has "seconds"; anything else is added to the row of its step.
        rows[row["step"]] = row if trained else rows.get(row["step"], {}) | row
    return [rows[step] for step in sorted(rows) if step >= first]


def set_aside_rows(path: Path, resume: Path | None) -> None:
    """Moves the rows after the checkpoint `resume` (None: all) to `<name>.replaced.jsonl`, and logs
    it.

    These steps are trained again.
    """
    if not path.exists():
        return
    rows, last = read_jsonl(path), -1 if resume is None else checkpoint_step(resume)
    selected = next((i for i, row in enumerate(rows) if row["step"] > last), None)
    if selected is None:
        return
    aside = path.with_name(f"{path.stem}{REPLACED}")
    append_jsonl(aside, rows[selected:])
    with path.open("rb+") as file:
        # Cut in place: the lines before stay byte for byte as they were.
        file.truncate(sum(len(file.readline()) for _ in range(selected)))
    logger.warning(
        "Training resumes after step %d, so steps %d to %d are trained again. Their old rows of "
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
        raise ValueError(f"report_to must be one of {', '.join(TRACKERS)}, got {report_to!r}")
    if report_to != "none" and importlib.util.find_spec(report_to) is None:
        raise ValueError(
            f"report_to={report_to!r} needs that package, which is not installed (pip install "
            f"{report_to}). Every metric is in {METRICS} anyway"
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
    # Unsloth's usual optimizer, which needs bitsandbytes and a GPU.
    usual = "adamw_8bit" if has_gpu() and backend() != TRL else "adamw_torch"
    arguments = {
        "output_dir": str(folder / "checkpoints"),
        "logging_steps": 1,
        # `tracker_callbacks` adds trackers after the step's own metrics.
        "report_to": "none",
        "run_name": folder.name,
        "save_strategy": "steps",
        "save_steps": save_steps,
        # `checkpoints.keep_newest` deletes old ones.
        "save_total_limit": None,
        "optim": usual if optim == "auto" else optim,
        "use_cpu": not has_gpu(),
        "disable_tqdm": True,
        # On a GPU Unsloth's own checkpointing is part of the model.
        "gradient_checkpointing": False,
        "dataloader_pin_memory": has_gpu(),
        # The first process samples the preflight while the others wait.
        "ddp_timeout": int(LONGEST_WAIT.total_seconds()),
    }
    arguments |= precision_arguments(precision)
    if backend() != TRL:
        return arguments
    from sage_unsloth.training.by_trl import common_trl_arguments  # imports torch

    return arguments | common_trl_arguments()


def run_trainer(
    trainer: Any, folder: Path, name: str, *, resume: Path | None, **logging: Any
) -> None:
    """Runs `trainer.train()` inside `log_steps`, which has the same arguments."""
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
    """Within this context `trainer.train()` writes every step's metrics before the next step.

    SIGTERM, SIGHUP and Ctrl-C end it after the step in flight, with a checkpoint
    (`stopping.finish_step`). With several processes the first one writes, and a signal to any of
    them ends all.

    Args:
        folder: gets `metrics.jsonl`.
        callbacks: called for each step once its row is on disk.
        held_out: evaluates between the steps, and may end the run early.
        report_to: one of `TRACKERS`.
        extra: called in every process with the step and the trainer's metrics; its result is added
            to the row.

    Raises:
        ValueError: the trainer ended before the last step.
        KeyboardInterrupt: Ctrl-C; the message says what is saved.
        Terminated: the same for SIGTERM or SIGHUP.
    """
    from transformers import PrinterCallback, ProgressCallback

    from sage_unsloth.training.loss_scale import scale_losses, with_loss_scale
    from sage_unsloth.training.step_log import EvaluatesFirst, NothingLeftError, StepLog

    if resume is not None and world_size() > 1 and not has_gpu():
        read_numbered_cpus()
    scale_losses(trainer)
    extra = with_loss_scale(trainer, extra)
    # One prints every log, the other draws a bar of its own.
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    if rank() == 0:
        # Only the first process writes, so only it moves rows.
        set_aside_rows(folder / METRICS, resume)
    with finish_step("the optimizer step in flight") as stop:
        log = StepLog(folder / METRICS, name, stop, extra, held_out)
        # First, since what it adds to `logs` is what later callbacks show.
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
            f"training must take all its {trainer.state.max_steps} steps, but the trainer ended "
            f"after {trainer.state.global_step}, with {len(trainer.train_dataset)} rows to train "
            "on. Give more rows, or fewer in a step"
        )
