"""Loss scaling for float16, on a CPU too, with skipped steps counted.

A gradient below 6e-8 is 0 in float16. So the loss is multiplied by a scale, and the gradient of the
float32 weights is divided by it before clipping. If it overflows, the scaler skips the step and
halves the scale; it is an error only once the scale is down to 1 (`finite`). accelerate does this
on a GPU. On a CPU it silently ignores fp16.
"""

import logging
from collections.abc import Callable
from typing import Any

LOSS_SCALE, SKIPPED = "fp16/loss_scale", "fp16/skipped"

logger = logging.getLogger(__name__)


def scale_losses(trainer: Any) -> None:
    """Enables autocast to float16 and loss scaling for a trainer with fp16 on a CPU.

    Call it before `trainer.train()`. Other trainers are not changed.
    """
    accelerator = trainer.accelerator
    if trainer.args.fp16 and accelerator.device.type == "cpu" and accelerator.scaler is None:
        import torch

        # accelerate sets both only on a GPU.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")


def with_loss_scale(
    trainer: Any, extra: Callable[[int, dict], dict]
) -> Callable[[int, dict], dict[str, Any]]:
    """Adds to `extra` of `stage.run_trainer` the scale after the step, and 1 for a skipped step.

    A skipped step's gradient norm is not finite and is removed from the row. Trainers without
    scaling are not changed.
    """

    def scaled(step: int, logs: dict) -> dict[str, Any]:
        accelerator = trainer.accelerator
        skipped = accelerator.optimizer_step_was_skipped
        if skipped:
            # inf in a row would end the run: every logged number must be finite.
            logs.pop("grad_norm", None)
            logger.info(
                "Step %d was skipped: its gradient overflowed in float16. The loss is scaled by "
                "%g from now on.",
                step,
                accelerator.scaler.get_scale(),
            )
        result = {LOSS_SCALE: accelerator.scaler.get_scale(), SKIPPED: int(skipped)}
        return extra(step, logs) | result

    return extra if trainer.accelerator.scaler is None else scaled
