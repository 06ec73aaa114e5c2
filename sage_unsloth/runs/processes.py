"""Several processes, as torchrun and accelerate start them, each with a whole model or a part.

TRL splits a step's completions among the processes and gathers what all must know (rewards of a
group, token counts, entropies for a quantile). Unsloth averages the gradients by its own function,
since its loss runs the model itself and not PyTorch's DistributedDataParallel around it. Without
that, each process would silently train its own model, so `guided_kl` checks it at the first step.

On the same global batch several processes take the same step as one. Samples differ: each process
has its own random numbers, so rollouts and a guide's noise depend on the number of processes.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta

LONGEST_WAIT = timedelta(hours=4)
"""Time limit for waiting on the first process, which makes the preflight and writes."""

SHARDED_BY = {"FSDP": "ACCELERATE_USE_FSDP", "DeepSpeed": "ACCELERATE_USE_DEEPSPEED"}


def world_size() -> int:
    """Number of processes that train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process; the first one, 0, writes for all."""
    return int(os.environ.get("RANK", "0"))


def sharding() -> str | None:
    """How accelerate splits the model, "FSDP" or "DeepSpeed"; None if it does not."""
    for name, variable in SHARDED_BY.items():
        if os.environ.get(variable, "false").lower() == "true":
            return name
    return None


def is_sharded() -> bool:
    return sharding() is not None


def wait_for_all() -> None:
    """Returns once every process has called it. Unsloth must be imported."""
    if world_size() > 1:
        import torch
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available(), timeout=LONGEST_WAIT).wait_for_everyone()


@contextmanager
def first_process_speaks() -> Iterator[None]:
    """Within this context, the other processes print nothing and log only warnings."""
    if rank() == 0:
        yield
        return
    logging.disable(logging.INFO)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)


def gather_rows(rows: list) -> list:
    """The rows of every process, the first process first."""
    if world_size() == 1:
        return rows
    from accelerate.utils import gather_object

    return gather_object(rows)


def read_numbered_cpus() -> None:
    """Lets `torch.load` read onto "cpu:1".

    transformers uses that device name if several processes resume on one CPU.
    """
    import torch

    torch.serialization.register_package(
        0,
        lambda storage: None,
        lambda storage, location: storage if location.startswith("cpu:") else None,
    )
