"""π_ref of a trainer whose reference is its own model with another adapter, or without one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sage_unsloth.trainers.trainer_names import REFERENCE_ADAPTER


@contextmanager
def reference_adapter(trainer: Any) -> Iterator[None]:
    """Within it, the trainer's model is π_ref, as in its KL term.

    That is the copy `REFERENCE_ADAPTER` if it exists, else the model without an adapter.
    """
    from trl.trainer.utils import use_adapter

    model = trainer.accelerator.unwrap_model(trainer.model)
    copied = REFERENCE_ADAPTER in getattr(model, "peft_config", {})
    with use_adapter(model, adapter_name=REFERENCE_ADAPTER if copied else None):
        yield
