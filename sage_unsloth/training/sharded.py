"""What stage 2 does differently for a model that is split among processes (FSDP, DeepSpeed).

Every process takes part in whatever reads the weights, so saving gathers them in all processes, and
generation goes on until the last process is done. What only the first process could do is refused
(`by_trl.check_trl_config`).
"""

from typing import Any

from sage_unsloth.runs.processes import is_sharded, world_size


def whole_weights(trainer: Any) -> dict[str, Any] | None:
    """The full weights, in the first process; None if each process has the whole model.

    Every process must call it.
    """
    if not is_sharded():
        return None
    return trainer.accelerator.get_state_dict(trainer.model_wrapped)


def let_generation_wait(trainer: Any) -> None:
    """Makes a process that has finished its completions join the forward passes of the others.

    transformers does so for models that it has split itself, which it recognises by this attribute;
    accelerate does not set it.
    """
    if not is_sharded() or world_size() == 1:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base._is_fsdp_managed_module = True
