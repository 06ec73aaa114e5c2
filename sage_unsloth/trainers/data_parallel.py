"""Checks of the patch for several processes, each with a whole model or a part."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sage_unsloth.runs.processes import world_size

if TYPE_CHECKING:
    import torch


REPLICATED_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Kinds of accelerate in which each process holds the whole model."""
SPLIT = ("FSDP", "DEEPSPEED")
"""Kinds in which each process holds a part."""


def check_data_parallel(accelerator: Any, *, whole_model: bool) -> None:
    """Raises ValueError unless the processes are joined in a supported way.

    Args:
        whole_model: each process must hold the whole model, as Unsloth's trainer needs it.
    """
    result, kind = accelerator.num_processes, parallelism(accelerator)
    known = REPLICATED_KINDS if whole_model else REPLICATED_KINDS + SPLIT
    if result == world_size() and (result == 1 or kind in known[1:]):
        return
    if whole_model:
        raise ValueError(
            f"several processes must be joined by PyTorch's DistributedDataParallel, got {kind} "
            f"with {result} of WORLD_SIZE={world_size()} processes. Start them with torchrun or "
            "accelerate launch --multi_gpu (FSDP and DeepSpeed need TRL's own trainer, without "
            "Unsloth)"
        )
    raise ValueError(
        f"several processes must be joined by one of {', '.join(known[1:])}, got {kind} with "
        f"{result} of WORLD_SIZE={world_size()} processes. Start them with accelerate launch"
    )


def shares_model(accelerator: Any) -> bool:
    """Whether each process holds only a part of the model."""
    return parallelism(accelerator) in SPLIT


def own_part(tensor: "torch.Tensor") -> "torch.Tensor":
    """This process's part of a tensor; all of it without FSDP."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parallelism(accelerator: Any) -> str:
    """The kind of parallelism, by its name in accelerate."""
    return str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))


def check_same_gradients(trainer: Any, parameters: "Iterable[torch.nn.Parameter]") -> None:
    """Before an optimizer step, checks that every process holds the mean gradients.

    Raises:
        ContractError: they differ, so that each process would train its own model.
    """
    import torch

    from sage_unsloth.trainers.trainer_names import ContractError

    squares = [p.grad.double().square().sum() for p in parameters if p.grad is not None]
    if not squares:
        return
    total = torch.stack(squares).sum().float().unsqueeze(0)
    totals = trainer.accelerator.gather(total)
    if (totals != totals[0]).any() and not totals.isnan().any():
        raise ContractError(
            "the gradients must be averaged over the processes before each optimizer step",
            actual=f"squared norms {totals.tolist()}",
            expected="the same in every process",
        )


def pooled_means(result: tuple, mask: "torch.Tensor", accelerator: Any) -> tuple:
    """Unsloth's result with its logged means, completion length and KL, over all processes.

    Args:
        result: loss, mean length, mean KL and the rest of Unsloth's result.
        mask: of this process's completions, (B, T).
    """
    import torch

    if accelerator.num_processes == 1:
        return result
    loss, length, kl, *rest = result
    rows = torch.tensor(float(len(mask)), device=mask.device)
    selected = (mask.sum(-1) > 0).sum().float()
    sums = accelerator.reduce(
        torch.stack([length.detach() * rows, rows, kl.detach() * selected, selected]), "sum"
    )
    return (loss, sums[0] / sums[1], sums[2] / sums[3].clamp(min=1), *rest)
