"""Several processes, as torchrun and accelerate start them (data parallel, a whole model in each): what Unsloth leaves out, and who writes.

TRL splits a step's completions among the processes and gathers what must be known of all of them: rewards, their groups, token counts,
entropies for a quantile. Two things are left to do. Part of the seam to Unsloth:

    gradients   Unsloth's loss runs the model itself and not PyTorch's DistributedDataParallel around it, whose averaging of
                gradients then never starts: each process would train a model of its own, with no error. `averaged_gradients`
                averages them after the backward pass of a step's last micro-batch, before they are clipped. Where they had been
                averaged already, that changes nothing.
    metrics     Unsloth logs `kl` and `completion_length` of the process's own rows. `guided_kl` gathers them.

Of one global batch, several processes then take the same step as one, but for what is drawn: rollouts and a guide's noise come from
random numbers of each process's own, so they depend on the number of processes.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

TRAINING_STEP = "training_step"


def world_size() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """The number of this process; the first one, 0, writes for all."""
    return int(os.environ.get("RANK", "0"))


def wait_for_all() -> None:
    """Go on once every process is here. Unsloth must have been imported."""
    if world_size() > 1:
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available()).wait_for_everyone()


@contextmanager
def first_process_speaks() -> Iterator[None]:
    """Within this context, the other processes print nothing and log warnings only."""
    if rank() == 0:
        yield
        return
    logging.disable(logging.INFO)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        logging.disable(logging.NOTSET)


def gathered(rows: list) -> list:
    """The rows of every process, those of the first one first."""
    if world_size() == 1:
        return rows
    from accelerate.utils import gather_object

    return gather_object(rows)


@contextmanager
def averaged_gradients(trainer: Any) -> Iterator[None]:
    """Within this context, the processes of `trainer` step by the mean of their gradients.

    Raises:
        ValueError: the model is split among the processes (FSDP, DeepSpeed), or nothing joins them.
    """
    accelerator = trainer.accelerator
    if max(accelerator.num_processes, world_size()) == 1:
        yield
        return
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind not in ("MULTI_GPU", "MULTI_CPU") or accelerator.num_processes != world_size():
        raise ValueError(
            "several processes must each hold the whole model and be joined by PyTorch's DistributedDataParallel; got "
            f"{kind} with {accelerator.num_processes} of {world_size()} processes; start with torchrun or accelerate launch "
            "--multi_gpu, without FSDP or DeepSpeed, and import sage_unsloth's load_unsloth after that"
        )
    plain, before = trainer.training_step, vars(trainer).get(TRAINING_STEP)

    def training_step(*args: Any, **kwargs: Any) -> Any:
        loss = plain(*args, **kwargs)
        if accelerator.sync_gradients:  # the step's last micro-batch
            _average([p for p in trainer.model.parameters() if p.requires_grad])
        return loss

    trainer.training_step = training_step
    try:
        yield
    finally:
        delattr(trainer, TRAINING_STEP)
        if before is not None:
            trainer.training_step = before


def _average(parameters: list[torch.nn.Parameter]) -> None:
    """The mean over processes of each gradient; one that a process lacks counts as 0."""
    import torch.distributed as dist

    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
