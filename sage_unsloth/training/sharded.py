"""A model that is split among the processes (FSDP, DeepSpeed): what stage 2 must do otherwise.

Every process takes part in whatever reads the weights, so saving gathers them in all processes and
generation goes on until the last process is done. What only the first process would do is refused
(`by_trl.check_trl`).
"""

from typing import Any

from sage_unsloth.runs.processes import is_sharded, world_size


def whole_weights(trainer: Any) -> dict[str, Any] | None:
    """The weights in whole tensors, in the first process; None where each process has the model.

    Every process must call it.
    """
    if not is_sharded():
        return None
    return trainer.accelerator.get_state_dict(trainer.model_wrapped)


def let_generation_wait(trainer: Any) -> None:
    """A process that has drawn its completions takes part in the forward passes of the others until
    these are done too. transformers does so for models that it has split itself, which it knows by
    this mark; accelerate sets none.
    """
    if not is_sharded() or world_size() == 1:
        return
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base._is_fsdp_managed_module = True
