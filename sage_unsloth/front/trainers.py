"""Arguments of a trainer of TRL or Unsloth, and the files of its run."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sage_unsloth.grading.total_reward import TotalReward


def grpo_config(
    folder: str | Path,
    tokenizer: Any,
    *,
    rollouts: str = "transformers",
    recompute_logits: bool = False,
    **given: Any,
) -> Any:
    """TRL's `GRPOConfig`, as Unsloth generates it, without misleading defaults.

    `training.grpo_arguments.QUIET_DEFAULTS` lists these, and why.

    Args:
        folder: folder of the run; checkpoints are saved in its `checkpoints/`.
        tokenizer: its pad token is never sampled.
        rollouts: "transformers" or "vllm".
        recompute_logits: Unsloth's loss computes its logits twice instead of storing them, which
            needs less memory and gives the same result. Applies to the whole process.
        given: fields of `GRPOConfig`, which override the rest.
    """
    from sage_unsloth.trainers import switches
    from sage_unsloth.training.grpo_arguments import grpo_arguments

    switches.recompute_logits(recompute_logits)
    return grpo_arguments(Path(folder), tokenizer.pad_token_id, rollouts=rollouts, **given)


@dataclass(frozen=True)
class Recording:
    """The state of a run's folder.

    Attributes:
        checkpoint: the newest complete one, for `trainer.train(resume_from_checkpoint=...)`; None
            at the start.
        finished: nothing is left to train.
    """

    checkpoint: str | None
    finished: bool


@contextmanager
def record_run(
    trainer: Any, folder: str | Path, *, name: str = "GRPO", reward: TotalReward | None = None
) -> Iterator[Recording]:
    """Within this context `trainer.train()` can be stopped and resumed.

    Each step's metrics are on disk before the next step starts. An interrupt saves a checkpoint
    first, and `checkpoint` is where training resumes.

        with guided_kl(trainer, guide), record_run(trainer, folder, reward=reward) as run:
            if not run.finished:
                trainer.train(resume_from_checkpoint=run.checkpoint)

    Args:
        trainer: TRL's or Unsloth's, for SFT or RL; must save checkpoints to `folder/checkpoints`.
        folder: receives `metrics.jsonl`, `completions.jsonl` with rewards, and at the end
            `adapter/`.
        name: shown on the progress bar.
        reward: from `rewards`; its grades are counted at each step.
    """
    from sage_unsloth.models.loading import load_adapter_weights
    from sage_unsloth.patch.choice import is_open
    from sage_unsloth.runs.checkpoints import copy_result, last_checkpoint, trained_adapter
    from sage_unsloth.runs.files import whole_folder
    from sage_unsloth.trainers.finite import finite_only
    from sage_unsloth.training import stage
    from sage_unsloth.training.live import LivePlot
    from sage_unsloth.training.rlvr_trainer import log_grades

    folder = Path(folder)
    resume = last_checkpoint(folder / "checkpoints")
    trained = trained_adapter(folder, resume)
    if trained is None:
        trainer.add_callback(LivePlot())
        extra: dict[str, Any] = {}
        if reward is not None:
            extra["extra"] = log_grades(folder, reward, sample_steps=25)
        # An open `guided_kl` stops at a number that is not finite already.
        guided = reward is not None or is_open(trainer)
        checks = nullcontext() if guided else finite_only(trainer)
        with checks, stage.log_steps(trainer, folder, name, resume=resume, **extra):
            yield Recording(None if resume is None else str(resume), finished=False)
    else:
        if (trained / "adapter_config.json").exists():
            # The trainer's own adapter is fresh, and what comes next may merge or sample it.
            load_adapter_weights(trainer.model, trained)
        yield Recording(None, finished=True)
    if not (folder / "adapter").exists():
        with whole_folder(folder / "adapter") as partial:
            if trained is None:
                trainer.model.save_pretrained(partial)
            else:
                copy_result(trained, partial)


def train(
    trainer: Any,
    folder: str | Path,
    *,
    name: str = "GRPO",
    reward: TotalReward | None = None,
    merge_with: Any = None,
) -> list[dict]:
    """`trainer.train()` inside `record_run`, which resumes a stopped run; a finished one is kept.

    Args:
        trainer, folder, name, reward: see `record_run`.
        merge_with: the tokenizer, as it was before the trainer changed it. If given, the merged
            model is written to `model/`, for RL to start from.

    Returns:
        The rows of `metrics.jsonl`, one per optimizer step.
    """
    from sage_unsloth.models.merging import save_merged
    from sage_unsloth.training import stage

    folder = Path(folder)
    with record_run(trainer, folder, name=name, reward=reward) as run:
        if not run.finished:
            trainer.train(resume_from_checkpoint=run.checkpoint)
    if merge_with is not None and not (folder / "model").exists():
        save_merged(trainer.model, merge_with, folder / "model")
    return stage.read_metrics(folder)
