"""What an open `guided_kl` measures, and the callback that acts on it after each optimizer step."""

import shutil
from pathlib import Path
from typing import Any

from torch import Tensor

from sage_unsloth.objective.guide_metrics import GuideMetrics
from sage_unsloth.objective.guides import Guide, SteeredGuide
from sage_unsloth.objective.signals import TokenSignals
from sage_unsloth.patch.unsloth_names import LOSS, ContractError

STATE = "SageGuide"
"""Where a checkpoint's trainer_state.json holds the guide's state."""


class Measured:
    """Counts the micro-batches of one `guided_kl` and logs their metrics as the trainer's own."""

    def __init__(self, trainer: Any, guide: Guide | None) -> None:
        self.trainer = trainer
        self.guide = guide
        self.micro_batches = 0
        self._of_window = {"train": GuideMetrics(), "eval": GuideMetrics()}
        # A guide is steered by the metrics of one optimizer step, however seldom the trainer logs.
        self._of_step = GuideMetrics()
        self._step_values: dict[str, list] = {}

    def add(self, signals: TokenSignals, log_guide: Tensor | None, credit: Tensor | None) -> None:
        """Log one micro-batch; tensors are (B, T), see `GuideMetrics.add`."""
        self.micro_batches += 1
        mode = "train" if self.trainer.model.training else "eval"
        metrics, gather = self.trainer._metrics[mode], self.trainer.accelerator.gather
        self._of_window[mode].add(signals, log_guide, gather, metrics, credit)
        if isinstance(self.guide, SteeredGuide):
            if mode == "train":
                self._of_step.add(signals, log_guide, gather, self._step_values)
            metrics.update({f"sage/{name}": [value] for name, value in self.guide.state().items()})

    def pop_step(self) -> dict[str, float]:
        """The metrics of the optimizer step that ends; the next one begins empty."""
        self._step_values.clear()
        return self._of_step.values


def guide_watch(measured: Measured, teacher: Any) -> Any:
    """A `TrainerCallback` that stops training after the first optimizer step that bypassed the
    guide, and steers and keeps a guide with a state.

    It also takes a teacher's adapter out of each checkpoint: transformers, finding it there, would
    restore it and not the policy's.

    Args:
        measured: what the hook of `guided_kl` reports to.
        teacher: as given to `guided_kl`.
    """
    from transformers import TrainerCallback

    guide = measured.guide

    class GuideWatch(TrainerCallback):
        seen = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not isinstance(guide, SteeredGuide):
                return
            kept = state.stateful_callbacks.get(STATE)
            if kept is None and state.global_step > 0:
                raise ValueError(
                    "a checkpoint must hold the state of the guide that it was trained with; the "
                    f"one of step {state.global_step} holds none for {guide!r}; resume with the "
                    "guide that it was trained with, or start a new run"
                )
            guide.restore(None if kept is None else kept["attributes"])
            self.keep(state, guide)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if measured.micro_batches == self.seen:
                raise ContractError(
                    f"every optimizer step must consult the guide; step {state.global_step} did "
                    "not",
                    found="a loss that bypasses the patched function",
                    expected=f"a call of {LOSS}",
                )
            self.seen = measured.micro_batches
            if isinstance(guide, SteeredGuide):
                guide.after_step(measured.pop_step())
                self.keep(state, guide)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if isinstance(teacher, str) and state.is_world_process_zero:
                checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                shutil.rmtree(checkpoint / teacher, ignore_errors=True)

        def keep(self, state: Any, guide: SteeredGuide) -> None:
            """The trainer writes this dict into every checkpoint's trainer_state.json."""
            state.stateful_callbacks[STATE] = {"args": {}, "attributes": guide.state()}

    return GuideWatch()
