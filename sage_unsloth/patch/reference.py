"""π_ref of a trainer whose reference is its own model under another adapter, or under none."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

REFERENCE = "ref"
"""The name of the adapter's copy that TRL scores π_ref with, where a model brought an adapter."""


@contextmanager
def reference_adapter(trainer: Any) -> Iterator[None]:
    """Within it, the trainer's model is π_ref as the trainer's own KL term has it: under the copy
    `REFERENCE` of the adapter where there is one, else without an adapter.
    """
    from trl.trainer.utils import use_adapter

    model = trainer.accelerator.unwrap_model(trainer.model)
    name = REFERENCE if REFERENCE in getattr(model, "peft_config", {}) else None
    with use_adapter(model, adapter_name=name):
        yield
