"""Between two optimizer steps: metrics on disk, progress bar, held-out evaluation, early end.

Imported once a trainer exists, because Unsloth must be loaded before transformers.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sage_unsloth.planning.plan import duration
from sage_unsloth.runs.files import append_jsonl
from sage_unsloth.runs.processes import gather_rows, world_size
from sage_unsloth.runs.progress import progress
from sage_unsloth.runs.stopping import Stop
from sage_unsloth.training.held_out import HeldOut
from sage_unsloth.training.rows import PASS_AT_1, numbers

# On the progress bar; 80 columns show the first ones. The loss is left out: in RL advantages sum
# to 0, so it means nothing.
BAR_METRICS = {
    "reward": "reward",
    "kl/ref_k3": "kl",
    "sage/entropy": "entropy",
    "frac_reward_zero_std": "dead",
    "advantages/dead_groups": "dead",  # logged where another rule than GRPO's decides
    PASS_AT_1: "held-out",
    "sage/guide_mean": "guide",
    "kl/anchor_k3": "kl to anchor",
    "grad_norm": "grad",
    "completions/mean_length": "tokens",
    "completions/clipped_ratio": "cut",
    "seconds": "s",
    "mean_token_accuracy": "accuracy",
}

logger = logging.getLogger(__name__)


class NothingLeftError(Exception):
    """Training is over before its next step; ends `trainer.train()` in `stage.run_trainer`."""


class StepLog(TrainerCallback):
    """Writes a row of metrics for every optimizer step, and ends the run after the step in flight.

    Args:
        stop: of `stopping.finishing`.
        extra: called in every process with the step and the trainer's metrics; its result is added
            to the row.
        held_out: evaluates between the steps; None for no evaluation.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        stop: Stop,
        extra: Callable[[int, dict], dict],
        held_out: HeldOut | None = None,
    ) -> None:
        self.path, self.name, self.stop, self.extra = path, name, stop, extra
        self.held_out = held_out
        self.before_first: list[dict[str, Any]] = []  # written with the row of the first step
        self.ending = False
        self.bar: Any = None
        self.first_step = 0
        self.started = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.bar = progress(
            total=state.max_steps,
            initial=state.global_step,
            desc=self.name,
            unit="step",
            disable=not state.is_world_process_zero,
        )
        self.first_step = state.global_step + 1

    def on_step_begin(self, args, state, control, **kwargs):
        # Rollouts belong to the step: the trainer makes them after `on_step_begin`.
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.ending = self.agree()
        if self.ending:
            control.should_save = control.should_training_stop = True

    def on_save(self, args, state, control, **kwargs):
        if self.held_out is not None and state.is_world_process_zero:
            self.held_out.saved(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}")
        self.stop.saved = (
            f"step {state.global_step} of {state.max_steps} is saved in {args.output_dir}"
        )
        # Several processes must agree first, which they do at the end of a step.
        if self.stop.cause is not None and world_size() == 1:  # while the checkpoint was written
            control.should_training_stop = True

    def on_log(self, args, state, control, logs: Any = None, **kwargs):
        # The summary at the end belongs to no step.
        if "loss" not in logs:
            return
        seconds = time.perf_counter() - self.started
        # The trainer keeps every row, and writes all of them into each checkpoint; here they are
        # on disk.
        del state.log_history[:-1]
        row = {"step": state.global_step, "seconds": round(seconds, 3)} | numbers(logs)
        # In every process, because it gathers from all of them.
        row |= self.extra(state.global_step, row)
        # When the run ends by a signal, the resumed run evaluates first.
        if self.held_out is not None and not self.ending:
            row |= self.held_out.after(state.global_step)
            if self.is_over():
                control.should_save = control.should_training_stop = True
        if not state.is_world_process_zero:
            return
        append_jsonl(self.path, [*self.before_first, row])
        self.before_first = []
        # For the trackers, whose callbacks run after this one.
        logs.update(row)
        self._show(row, state.global_step)
        left = state.max_steps - state.global_step
        # The second step: the first also compiles and warms up.
        if left and state.global_step == self.first_step + 1:
            logger.info(
                "%s: the second step took %.1f s. At this pace %d more take %s.",
                self.name,
                seconds,
                left,
                duration(seconds * left),
            )

    def on_train_end(self, args, state, control, **kwargs):
        self.bar.close()
        if self.held_out is not None:
            self.held_out.report()

    def agree(self) -> bool:
        """Whether any process was asked to end; then all end. Signals are not lost meanwhile."""
        # A collective call, so all processes make it at the same place of the loop.
        requested = [signum for signum in gather_rows([self.stop.cause]) if signum is not None]
        if requested:
            self.stop.cause = requested[0]
        return bool(requested)

    def take(self, row: dict[str, Any]) -> None:
        """Writes a row of an evaluation alone.

        A run has begun once it has trained a step, so the row before the first step is written with
        that step's row.
        """
        if row["step"] == 0:
            self.before_first = [row]
        else:
            append_jsonl(self.path, [row])

    def is_over(self) -> bool:
        """Whether the evaluation was interrupted, or ends the run."""
        if self.held_out is None:
            return False
        # The signal reached the evaluation, so it is passed on to the end of the run.
        if self.held_out.cause is not None:
            self.stop.cause = self.held_out.cause
        return self.held_out.cause is not None or bool(self.held_out.reason_to_end)

    def _show(self, row: dict[str, Any], step: int) -> None:
        curve = self.held_out.curve if self.held_out is not None else ()
        row = ({PASS_AT_1: curve[-1][PASS_AT_1]} if curve else {}) | row
        shown = {title: row[key] for key, title in BAR_METRICS.items() if key in row}
        self.bar.set_postfix({title: f"{value:.3g}" for title, value in shown.items()})
        self.bar.update(step - self.bar.n)


class EvaluatesFirst(TrainerCallback):
    """Evaluates before the first step, or repeats an interrupted evaluation on resuming.

    It is the last callback, so the others get its row after their own start.
    """

    def __init__(self, log: StepLog, held_out: HeldOut, trainer: Any) -> None:
        self.log, self.held_out, self.trainer = log, held_out, trainer

    def on_train_begin(self, args, state, control, **kwargs):
        """Raises NothingLeftError after a signal, or if this evaluation ends the run."""
        row = self.held_out.begin(state.global_step)
        if row and state.is_world_process_zero:
            self.log.take(row)
            for callback in self.trainer.callback_handler.callbacks:
                callback.on_log(args, state, control, logs=dict(row))
        if self.log.is_over() or state.global_step >= state.max_steps:
            for callback in self.trainer.callback_handler.callbacks:
                # The trainer will not get to its own end, which closes bars and trackers.
                callback.on_train_end(args, state, control)
            raise NothingLeftError
