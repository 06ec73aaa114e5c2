"""float16's loss scaling: on a CPU too, and with each step that it skips counted.

A gradient below 6e-8 is 0 in float16. So the loss is multiplied by a scale, and the gradient of
the float32 weights divided by it before it is clipped. Where it overflows, the scaler skips the
step and halves the scale: no error until the scale is down to 1 (`finite`). accelerate does this on
a GPU; on a CPU it passes over fp16 without a word, and neither scales nor computes in float16.
"""

import logging
from collections.abc import Callable
from typing import Any

SCALE, SKIPPED = "fp16/loss_scale", "fp16/skipped"

logger = logging.getLogger(__name__)


def scale_losses(trainer: Any) -> None:
    """Before `trainer.train()`: a trainer with fp16 on a CPU computes under autocast to float16 and
    scales its loss, as accelerate lets it on a GPU. Any other trainer is left as it is.
    """
    accelerator = trainer.accelerator
    if trainer.args.fp16 and accelerator.device.type == "cpu" and accelerator.scaler is None:
        import torch

        # What accelerate sets on a GPU by itself.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu")


def with_loss_scale(
    trainer: Any, extra: Callable[[int, dict], dict]
) -> Callable[[int, dict], dict[str, Any]]:
    """The `extra` of `stage.train`, which of a trainer that scales its loss also returns the scale
    after the step, and 1 where the step was skipped, else 0. A skipped step's gradient is not
    finite, and its norm is taken out of the row.
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
        result = {SCALE: accelerator.scaler.get_scale(), SKIPPED: int(skipped)}
        return extra(step, logs) | result

    return extra if trainer.accelerator.scaler is None else scaled
