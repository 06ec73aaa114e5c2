"""Metrics of an open `guided_kl`, and the callback after each optimizer step."""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_unsloth.objective.guide_metrics import GuideMetrics
from sage_unsloth.objective.protocols import Guide, SteeredGuide
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.settings import fixed_settings
from sage_unsloth.patch.trained_with import check_resume_record
from sage_unsloth.trainers import trainer_names as names
from sage_unsloth.trainers.clock import Clock
from sage_unsloth.trainers.trainer_names import ContractError

STATE = "SageGuide"
"""Key of the guide's state in a checkpoint's trainer_state.json."""


class GuideMetricsLogger:
    """Counts the micro-batches of one `guided_kl` and logs their metrics with the trainer's."""

    def __init__(self, trainer: Any, guide: Guide | None) -> None:
        self.trainer = trainer
        self.guide = guide
        self.micro_batches = 0  # of training alone
        self._of_window = {"train": GuideMetrics(), "eval": GuideMetrics()}
        # A guide is steered by the metrics of one optimizer step, however seldom the trainer logs.
        self._of_step = GuideMetrics()
        self._step_values: dict[str, list] = {}

    def add(
        self, signals: TokenSignals, log_guide: Tensor | None, further: Mapping[str, Tensor]
    ) -> None:
        """Logs one micro-batch; tensors are (B, T), see `GuideMetrics.add`."""
        mode = "train" if self.trainer.model.training else "eval"
        self.micro_batches += mode == "train"
        metrics, gather = names.logged_metrics(self.trainer, mode), self.trainer.accelerator.gather
        self._of_window[mode].add(signals, log_guide, gather, metrics, further)
        if isinstance(self.guide, SteeredGuide):
            if mode == "train":
                self._of_step.add(signals, log_guide, gather, self._step_values)
            # Overwritten and not appended: the state at the end of the window is what is logged.
            metrics.update({f"sage/{name}": [value] for name, value in self.guide.state().items()})

    def pop_step(self) -> dict[str, float]:
        """The metrics of the ended optimizer step; empty if it had no completion token."""
        self._step_values.clear()
        return self._of_step.values if self._of_step.tokens else {}


def guide_watch(
    trainer: Any,
    measured: GuideMetricsLogger | None,
    clock: Clock | None,
    *,
    guide: Guide | None,
    record: dict[str, Any],
    frozen_adapters: Collection[str],
    loss: str,
    resume_with_changes: bool,
) -> Any:
    """The `TrainerCallback` of an open `guided_kl`.

    It stops training if an optimizer step bypassed the guide or a setting changed, updates a
    steered guide, and writes the settings into each checkpoint. It also removes frozen adapters
    from checkpoints: transformers would restore them instead of the policy's.

    Args:
        measured, clock: the hook's; None if nothing in the trainer's loss is replaced.
        record: must be equal to resume a checkpoint.
        loss: the function that each step must reach.
        resume_with_changes: resume a checkpoint even if its settings differ.
    """
    from transformers import TrainerCallback

    steered = guide if isinstance(guide, SteeredGuide) else None
    settings = fixed_settings(trainer)

    class GuideWatch(TrainerCallback):
        seen = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            selected = state.stateful_callbacks.get(STATE)
            if state.global_step > 0 and not resume_with_changes:
                check_resume_record(state.global_step, selected, record, steered)
            if steered is not None:
                # Another guide, or other settings of it, starts from its own strength.
                same = ((selected or {}).get("args") or record)["guide"] == record["guide"]
                steered.restore(((selected or {}).get("attributes") or None) if same else None)
            if measured is not None and clock is not None:  # of a step that was interrupted
                measured.pop_step()
                clock.restart()
            self.keep(state)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now = fixed_settings(trainer)
            changed = [
                f"{k} was {v!r} and is {now[k]!r}" for k, v in settings.items() if now[k] != v
            ]
            if changed:
                raise ValueError(
                    "the trainer's settings must not change while guided_kl is open, but "
                    f"{', '.join(changed)}. Leave the context, change them, and open it again"
                )

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if measured is None:
                return
            if measured.micro_batches == self.seen:
                raise ContractError(
                    f"every optimizer step must apply the guide, but step {state.global_step} did "
                    "not",
                    actual="a loss that bypasses the patched function",
                    expected=f"a call of {loss}",
                )
            self.seen = measured.micro_batches
            if steered is not None:
                metrics = measured.pop_step()
                if metrics:  # empty if every completion was masked
                    steered.after_step(metrics)
                self.keep(state)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero:
                checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                for adapter in frozen_adapters:
                    # Only the main process saves, so only it deletes.
                    shutil.rmtree(checkpoint / adapter, ignore_errors=True)

        def keep(self, state: Any) -> None:
            """The trainer writes this dict into every checkpoint's trainer_state.json."""
            attributes = {} if steered is None else steered.state()
            state.stateful_callbacks[STATE] = {"args": record, "attributes": attributes}

    return GuideWatch()
